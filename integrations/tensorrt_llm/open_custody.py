"""One custody per engine process: its thread, both halves of the connector, and the check of the engine's options.

    custody = shared_custody(llm_args)         # the same for the scheduler, the worker and the door

Never run on TensorRT-LLM itself.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.governance.identity.content_digest import attributes_text, named_digest, weights_fingerprint
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.integrations.tensorrt_llm.kv_events import EventScopes
from kvcustody.integrations.tensorrt_llm.scheduler_half import SchedulerHalf
from kvcustody.integrations.tensorrt_llm.transfer_thread import TransferThread
from kvcustody.integrations.tensorrt_llm.worker_half import WorkerHalf

_lock = threading.Lock()
_shared: list[EngineCustody] = []


class EngineCustody:
    """The shared part of the two halves and the door."""

    def __init__(self, settings: Settings, llm_args: object) -> None:
        """Open the custody.

        Raises:
            ConfigError: names an option of the engine or a setting.
        """
        self.block_tokens = check_options(llm_args)
        self.thread = TransferThread(settings)
        self.thread.model = model_identity(llm_args, self.block_tokens)
        self.scopes = EventScopes(self.block_tokens)
        self.scheduler = SchedulerHalf(self.thread, self.block_tokens, self.scopes.learn)
        self.worker = WorkerHalf(self.thread, self.block_tokens, self.scheduler.take_run)

    def close(self) -> None:
        """Stop in order; a second call does nothing."""
        self.thread.close()


def shared_custody(llm_args: object | None = None) -> EngineCustody:
    """Return this process's custody.

    Raises:
        ConfigError: the door asks before an engine is in this process.
    """
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
    """End this process's custody, so that another may be opened."""
    with _lock:
        while _shared:
            _shared.pop().close()


def model_identity(llm_args: object, block_tokens: int) -> ModelIdentity:
    """Return the identity that conditions the engine's K and V, from its arguments."""
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


# The parts of TensorRT-LLM that can be governed, and the options refused at start. Never run on TensorRT-LLM itself.
#
# Rules of this section:
# 1. An option that keeps KV outside the device and our tiers, or hands it to another process, is refused.
# 2. What the connector's interface cannot express is refused: a worker that could not load cannot tell the scheduler,
#    so there is one worker, and it is in the door's process.
# 3. The engine owns the device's blocks. It must keep tenants apart by salts (`cache_salt`) and reuse only whole
#    blocks; every request checks both.

MODULE = "kvcustody.integrations.tensorrt_llm.connector"
SCHEDULER_CLASS, WORKER_CLASS = "CustodyConnectorScheduler", "CustodyConnectorWorker"
_OFF: tuple[object, ...] = (None, False, 0, "")


class RefusedOption(NamedTuple):
    """An option, by its dotted name, that must have one of these values, with the reason and the fix."""

    option: str
    allowed: tuple[object, ...]
    why: str


REFUSED = (
    RefusedOption("tensor_parallel_size", (1,), "a rank that cannot load has no way to say so"),
    RefusedOption("pipeline_parallel_size", (1, None), "a rank that cannot load has no way to say so"),
    RefusedOption("context_parallel_size", (1, None), "a prompt's blocks lie on several ranks"),
    RefusedOption("enable_attention_dp", _OFF, "each rank would have a scheduler and a worker of its own"),
    RefusedOption("max_beam_width", (1, None), "beams share blocks that a connector is not told of"),
    RefusedOption("disable_overlap_scheduler", (True,), "steps overlap, which has not been verified"),
    RefusedOption("speculative_config", _OFF, "rejected drafts would be kept as if they were the prompt's"),
    RefusedOption("enable_lora", _OFF, "an adapter's identity does not reach the connector's keys"),
    RefusedOption("lora_config", _OFF, "an adapter's identity does not reach the connector's keys"),
    RefusedOption("cache_transceiver_config", _OFF, "KV leaves for another engine, or comes from one"),
    RefusedOption("kv_cache_config.host_cache_size", _OFF, "the engine's host pool stores KV unencrypted and without "
        "a deadline"),
    RefusedOption("kv_cache_config.disk_cache_size", _OFF, "the engine's disk tier keeps KV in clear, without end"),
    RefusedOption("kv_cache_config.disk_cache_path", _OFF, "the engine's disk tier keeps KV in clear, without end"),
    RefusedOption("kv_cache_config.secondary_offload_min_priority", (None,), "it configures the engine's host pool"),
    RefusedOption("kv_cache_config.enable_partial_reuse", (False,), "part of a block would be reused"),
    RefusedOption("kv_cache_config.enable_block_reuse", (True, None), "without it the engine calls no connector"),
    RefusedOption(
        "kv_cache_config.use_kv_cache_manager_v2", (False, None),
        "it may use less than was promised without reporting it",
    ),
    RefusedOption("kv_cache_config.use_uvm", _OFF, "blocks would move to host memory outside custody"),
    RefusedOption("kv_cache_config.max_attention_window", _OFF, "blocks that a window has passed have no page"),
    RefusedOption("kv_cache_config.sink_token_length", _OFF, "blocks that a window has passed have no page"),
    RefusedOption(
        "kv_cache_config.kv_events_config", _OFF, "it streams prompts to every client, without salts"
    ),
)  # fmt: skip
_CONNECTOR = (
    ("connector", None),
    ("connector_module", MODULE),
    ("connector_scheduler_class", SCHEDULER_CLASS),
    ("connector_worker_class", WORKER_CLASS),
)


def check_options(llm_args: object) -> int:
    """Return the block size in tokens.

    Raises:
        ConfigError: names the first option that prevents governance.
    """
    for option, allowed, why in REFUSED:
        value = _value(llm_args, option)
        if not any(value is one or (value == one and type(value) is type(one)) for one in allowed):
            raise ConfigError(
                f"TensorRT-LLM's `{option}` is `{value}`: {why}; set it to `{allowed[0]}`",
                option=option,
                value=str(value),
            )
    config = getattr(llm_args, "kv_connector_config", None)
    for field, ours in _CONNECTOR:
        configured = getattr(config, field, None)
        if configured != ours:
            raise ConfigError(
                f"TensorRT-LLM's `kv_connector_config.{field}` is `{configured}`: blocks would go to another "
                f"connector, out of custody; set it to `{ours}`",
                option=f"kv_connector_config.{field}",
                value=str(configured),
            )
    tokens = _value(llm_args, "kv_cache_config.tokens_per_block")
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"TensorRT-LLM's `kv_cache_config.tokens_per_block` is `{tokens}`: say how many")
    return tokens


def _value(llm_args: object, option: str) -> object:
    found: object = llm_args
    for name in option.split("."):
        found = getattr(found, name, None)
    return found
