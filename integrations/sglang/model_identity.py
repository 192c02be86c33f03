"""The identity of the model that SGLang loaded, which conditions every namespace.

1. Weights that are loaded anew have a new epoch, whose number is never used again. Copies in files outlive the process,
   and must not be found under other weights of the same epoch. A process begins with epoch 0.
2. The weights' digest is a fingerprint of the files' names, sizes and times, or of a hub name's revision. Its prefix
   names which.
"""

from __future__ import annotations

from typing import Any

from kvcustody.governance.identity.content_digest import (
    attributes_text,
    named_digest,
    unique_epoch,
    weights_fingerprint,
)
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.logger import get_logger

_log = get_logger(__name__)


class LoadedModel:
    """The model of one scheduler, by epoch of its weights."""

    def __init__(self, server_args: Any, model_config: Any, page_tokens: int, pool: Any) -> None:
        self._args = server_args
        self._config = model_config
        self._page_tokens = page_tokens
        self._pool = pool
        self._epoch = 0
        self.identity = self._made()

    def reloaded(self) -> None:
        """Note that the weights changed: nothing computed before can be reached any more."""
        self._epoch = unique_epoch()
        self.identity = self._made()

    def _made(self) -> ModelIdentity:
        args, text = self._args, self._config.hf_text_config
        identity = ModelIdentity(
            weights_digest=weights_fingerprint(str(args.model_path), str(args.revision)),
            weights_epoch=self._epoch,
            tokenizer_digest=named_digest("tokenizer", str(args.tokenizer_path), str(args.revision)),
            chat_template="engine: prompts arrive as token ids",
            quantization=str(args.quantization or "none"),
            kv_dtype=f"{self._config.dtype}/{args.kv_cache_dtype}",
            kv_layout=type(self._pool).__name__,
            block_tokens=self._page_tokens,
            rope={"config": attributes_text(text, "rope_parameters", "rope_theta", "rope_scaling")},
            attention={
                "config": attributes_text(
                    text, "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"
                )
            },
            tensor_parallel=1,
            pipeline_parallel=1,
            adapter_digest=None,
            adapter_epoch=None,
        )
        _log.info("model identity", **identity.named())
        return identity
