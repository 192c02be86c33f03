"""The identity of the model that vLLM loaded, which conditions every key: model, quantisation, cache format, adapter.

1. Weights and adapters that are loaded anew have a new epoch, whose number is never used again. Copies in files outlive
   the process, and must not be found under other weights. A process begins with epoch 0.
2. The digests of weights and adapters have one of two sources, which their prefix names. Either the operator states
   them (`revision`, a content digest in the path), or they are fingerprints of the files' names, sizes and times.
3. An adapter's files are checked with each of its requests, and the workers report which files they have read
   (`worker.loaded_adapters`). Where the two differ, vLLM may read the new files with any step, so such a request shares
   no blocks. Once they agree again, the adapter counts as a new one. So does one that is reloaded in place.
4. Every identity is logged when it is made: a declared segment names it by its digest (`policy segment add --model`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvcustody.governance.identity.content_digest import (
    FileFacts,
    attributes_text,
    file_facts,
    named_digest,
    unique_epoch,
    weights_fingerprint,
)
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ADAPTERS_MAX = 4096
_WEIGHTS = "weight"
_READ_ONLY = ("get", "compute", "save", "check", "list")
_log = get_logger(__name__)


def changes_weights(method: object) -> bool:
    """Return whether a call to vLLM's workers, by its name, may change the base model's weights."""
    name = method if isinstance(method, str) else str(getattr(method, "__name__", ""))
    return _WEIGHTS in name.lower() and not name.lower().startswith(_READ_ONLY)


class KnownAdapter(NamedTuple):
    """An adapter with the files under which it was last seen."""

    identity: ModelIdentity
    facts: FileFacts


class Models:
    """The identities of the base model and of the adapters seen so far."""

    def __init__(self, config: VllmConfig, block_tokens: int) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._weights_epoch = self._adapter_epoch = 0
        self._adapters: dict[tuple[str, int, str], KnownAdapter] = {}
        self._read: dict[tuple[int, str], FileFacts] = {}  # by the workers
        self._is_one_machine = getattr(config.parallel_config, "nnodes", 1) == 1
        self.changes = 0  # that make an identity which was given before another one
        self._base = self._known(None, None)

    def of(self, adapter: Any) -> ModelIdentity:
        """Return the identity for a request with this `LoRARequest`, or without one."""
        if adapter is None:
            return self._base
        key = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        facts = self._facts(file_facts(str(adapter.lora_path)))
        known = self._adapters.get(key)
        if getattr(adapter, "load_inplace", False) or (known is not None and known.facts != facts):
            self._adapter_epoch = unique_epoch()
            self._adapters.pop(key, None)
            known = None
        if known is None:
            if len(self._adapters) >= _ADAPTERS_MAX:
                self._adapters.clear()
                self._adapter_epoch = unique_epoch()
            known = self._adapters[key] = KnownAdapter(self._adapter(key, self._adapter_epoch), facts)
        read = self._read.get((int(adapter.lora_int_id), str(adapter.lora_path)))
        if read is not None and read != facts:
            return self._adapter(key, unique_epoch())
        return known.identity

    def _adapter(self, key: tuple[str, int, str], epoch: int) -> ModelIdentity:
        files = weights_fingerprint(str(key[2]), "")
        return self._known(named_digest("adapter", *map(str, key), files), epoch)

    def _facts(self, facts: FileFacts) -> FileFacts:
        return facts if self._is_one_machine else facts._replace(places=())

    def read_by_worker(self, lora_int_id: int, lora_path: str, facts: FileFacts) -> None:
        """Take note that a worker read an adapter's files; keys of other files become unreachable."""
        facts, place = self._facts(facts), (lora_int_id, lora_path)
        if self._read.get(place) == facts:
            return
        if len(self._read) >= _ADAPTERS_MAX:
            self._read.clear()
        was_read = self._read.get(place) is not None
        self._read[place] = facts
        stale = [
            key
            for key, known in self._adapters.items()
            if (int(key[1]), str(key[2])) == place and (was_read or known.facts != facts)
        ]
        for key in stale:
            del self._adapters[key]
        if stale:
            self.changes += 1
            self._adapter_epoch = unique_epoch()
            _log.warning("adapter read anew", adapter=lora_int_id, path=lora_path)

    def reloaded(self) -> None:
        """Take note that the weights changed: nothing computed before can be reached any more."""
        self.changes += 1
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
