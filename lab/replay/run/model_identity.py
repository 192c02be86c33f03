"""The model for which a replay stands in: an identity that says so, and the replay's own cache layout."""

from __future__ import annotations

from kvcustody.governance.identity.model_identity import ModelIdentity


def replay_model(block_tokens: int, *, kv_dtype: str = "float16") -> ModelIdentity:
    """Return a `ModelIdentity` for replays; blocks of different sizes are never shared."""
    return ModelIdentity(
        weights_digest="replay:no-weights",
        weights_epoch=0,
        tokenizer_digest="replay:trace-ids",
        chat_template="none",
        quantization="none",
        kv_dtype=kv_dtype,
        kv_layout="kv-blocks",
        block_tokens=block_tokens,
        rope={},
        attention={},
    )
