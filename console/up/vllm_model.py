"""Makes the model that `kvcustody up --engine vllm` serves: `python -m kvcustody.console.up.vllm_model FOLDER`.

A language model of random weights with a tokenizer of numbered words: nothing is downloaded, and its answers mean
nothing. It runs in the engine's own Python, which has transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 4096
CONTEXT_TOKENS = 2048
FIRST_WORD = 4  # what is before is a marker
_SEED = 7


def save(folder: Path) -> None:
    """Save model and tokenizer in the form that vLLM loads."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    markers = ("bos", "eos", "pad", "unk")  # the first ids, in this order
    words = {f"<{name}>": token for token, name in enumerate(markers)}
    words |= {f"w{token}": token for token in range(FIRST_WORD, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, f"<{markers[-1]}>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {f"{name}_token": f"<{name}>" for name in markers}
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=tokenizer, **named)
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    made.save_pretrained(folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
