"""What vLLM loaded, as the identity that conditions every key: model, quantisation, cache format, adapter.

1. Weights and adapters that are loaded anew are of another epoch, with a number that nobody has again: copies in files
   outlive the process, and must not be found under other weights. What a process begins with is epoch 0.
2. The digests of weights and adapters are what the operator states (`revision`, a content digest in the path) or
   fingerprints of the files' names, sizes and times. They say so in their prefix.
3. An adapter that is reloaded in place is a new one from then on.
4. Every identity is logged when it is made: a declared segment names it by its digest (`policy segment add --model`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from kvcustody.governance.identity.content_digest import (
    attributes_text,
    named_digest,
    unique_epoch,
    weights_fingerprint,
)
from kvcustody.governance.identity.model_identity import ModelIdentity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ADAPTERS_MAX = 4096
_log = structlog.get_logger(__name__)


class Models:
    """The base model's identity and those of the adapters seen so far."""

    def __init__(self, config: VllmConfig, block_tokens: int) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._weights_epoch = self._adapter_epoch = 0
        self._adapters: dict[tuple[str, int, str], ModelIdentity] = {}
        self._base = self._known(None, None)

    def of(self, adapter: Any) -> ModelIdentity:
        """The identity of a request with this `LoRARequest`, or with none."""
        if adapter is None:
            return self._base
        key = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        if getattr(adapter, "load_inplace", False):
            self._adapter_epoch = unique_epoch()
            self._adapters.pop(key, None)
        known = self._adapters.get(key)
        if known is None:
            if len(self._adapters) >= _ADAPTERS_MAX:
                self._adapters.clear()
                self._adapter_epoch = unique_epoch()
            files = weights_fingerprint(str(adapter.lora_path), "")
            digest = named_digest("adapter", *map(str, key), files)
            known = self._adapters[key] = self._known(digest, self._adapter_epoch)
        return known

    def reloaded(self) -> None:
        """The weights changed: nothing computed before is reachable any more."""
        self._weights_epoch = unique_epoch()
        self._adapters.clear()
        self._base = self._known(None, None)

    def _known(self, adapter: str | None, adapter_epoch: int | None) -> ModelIdentity:
        made = self._identity(adapter, adapter_epoch)
        _log.info("model identity", **made.named())
        return made

    def _identity(self, adapter: str | None, adapter_epoch: int | None) -> ModelIdentity:
        model, cache, parallel = (
            self._config.model_config,
            self._config.cache_config,
            self._config.parallel_config,
        )
        text = model.hf_text_config
        return ModelIdentity(
            weights_digest=weights_fingerprint(str(model.model), str(model.revision)),
            weights_epoch=self._weights_epoch,
            tokenizer_digest=named_digest("tokenizer", str(model.tokenizer), str(model.tokenizer_revision)),
            chat_template="engine: prompts arrive as token ids",
            quantization=str(model.quantization or "none"),
            kv_dtype=f"{model.dtype}/{cache.cache_dtype}",
            kv_layout=str(getattr(cache, "kv_cache_layout", None) or "default"),
            block_tokens=self._block_tokens,
            rope={"config": attributes_text(text, "rope_parameters", "rope_theta", "rope_scaling")},
            attention={
                "config": attributes_text(
                    text,
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "head_dim",
                    "sliding_window",
                )
            },
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
            adapter_digest=adapter,
            adapter_epoch=adapter_epoch,
        )
