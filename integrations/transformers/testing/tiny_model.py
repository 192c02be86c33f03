"""A model to try the adapter with: random, small, and the same every time."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256


def tiny_model() -> Any:
    """A random Llama of two layers, the same every time."""
    torch.manual_seed(11)
    config: Any = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.4,  # large, so that what is said depends on all that was read
    )
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config)
    return model.eval()
