"""The identity of an untrained model: the fields that a test states, and defaults for the others."""

from __future__ import annotations

from typing import Any

from kvcustody.governance.identity.model_identity import ModelIdentity


def tiny_model(**stated: Any) -> ModelIdentity:
    """Return a model's identity; `stated` are fields of `ModelIdentity`."""
    fields: dict[str, Any] = {
        "weights_digest": "sha256:aa",
        "weights_epoch": 1,
        "tokenizer_digest": "sha256:bb",
        "chat_template": "v1",
        "quantization": "none",
        "kv_dtype": "fp16",
        "kv_layout": "NHD",
        "block_tokens": 16,
        "rope": {"base": 10000},
        "attention": {"heads": 1},
    }
    return ModelIdentity(**fields | stated)
