"""One custody for each engine process: its thread, and both halves of the connector over it.

    custody = shared_custody(llm_args)         # the same for the scheduler, the worker and the door

Never run on TensorRT-LLM itself.
"""

from __future__ import annotations

import threading

from kvcustody.errors import ConfigError
from kvcustody.governance.identity.content_digest import attributes_text, named_digest, weights_fingerprint
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.integrations.tensorrt_llm.check_engine import check_options
from kvcustody.integrations.tensorrt_llm.kv_events import EventScopes
from kvcustody.integrations.tensorrt_llm.scheduler_half import SchedulerHalf
from kvcustody.integrations.tensorrt_llm.transfer_thread import TransferThread
from kvcustody.integrations.tensorrt_llm.worker_half import WorkerHalf

_lock = threading.Lock()
_shared: list[EngineCustody] = []


class EngineCustody:
    """What the two halves and the door have in common."""

    def __init__(self, settings: Settings, llm_args: object) -> None:
        """Raises `ConfigError` that names an option of the engine or a setting."""
        self.block_tokens = check_options(llm_args)
        self.thread = TransferThread(settings)
        self.thread.model = model_identity(llm_args, self.block_tokens)
        self.scopes = EventScopes(self.block_tokens)
        self.scheduler = SchedulerHalf(self.thread, self.block_tokens, self.scopes.learn)
        self.worker = WorkerHalf(self.thread, self.block_tokens, self.scheduler.take_run)

    def close(self) -> None:
        """Stop in order; twice changes nothing."""
        self.thread.close()


def shared_custody(llm_args: object | None = None) -> EngineCustody:
    """This process's. Raises `ConfigError` where the door asks before an engine is in this process."""
    with _lock:
        if not _shared:
            if llm_args is None:
                raise ConfigError(
                    "TensorRT-LLM's engine is not in this process: start it with `TLLM_WORKER_USE_SINGLE_PROCESS=1` "
                    "and our connector, before the first request"
                )
            settings = load_settings()
            configure(settings.log_level, settings.log_format)
            _shared.append(EngineCustody(settings, llm_args))
        return _shared[0]


def close_shared() -> None:
    """End this process's custody; another may be opened then."""
    with _lock:
        while _shared:
            _shared.pop().close()


def model_identity(llm_args: object, block_tokens: int) -> ModelIdentity:
    """What conditions the engine's K and V, as its arguments say."""
    cache = getattr(llm_args, "kv_cache_config", None)
    model, revision = (str(getattr(llm_args, name, None)) for name in ("model", "revision"))
    return ModelIdentity(
        weights_digest=weights_fingerprint(model, revision),
        weights_epoch=0,
        tokenizer_digest=named_digest("tokenizer", str(getattr(llm_args, "tokenizer", None)), revision),
        chat_template="engine: prompts arrive as token ids",
        quantization=str(getattr(llm_args, "quant_config", None)),
        kv_dtype=f"{getattr(llm_args, 'dtype', None)}/{getattr(cache, 'dtype', None)}",
        kv_layout=f"tensorrt_llm v2={getattr(cache, 'use_kv_cache_manager_v2', None)}",
        block_tokens=block_tokens,
        rope={"config": attributes_text(llm_args, "model_kwargs")},
        attention={"config": attributes_text(llm_args, "attn_backend")},
        adapter_digest=None,
        adapter_epoch=None,
    )
