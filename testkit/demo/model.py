"""A language model with about ten thousand random weights that every engine accepts.

1. Everything is a function of one seed: two processes that make it hold the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcustody.testkit.demo.vocabulary import WORDS

SEED = 7
HEADS, HEAD_DIM, LAYERS = 2, 32, 2
CONTEXT_TOKENS = 512


def make_model() -> Any:
    """Return the model, on the CPU, in float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=-(-len(WORDS) // 64) * 64,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: Any = Qwen2ForCausalLM(config)
        return model.eval()


def save_model(folder: Path) -> None:
    """Save the model to `folder` in bfloat16, in the form that vLLM loads."""
    import torch

    make_model().to(torch.bfloat16).save_pretrained(folder)
