"""The `vllm.general_plugins` entry point. vLLM calls `register` in every process, before it configures anything.

1. It changes nothing for an engine that does not name our connector: each patch asks whether the engine at hand has
   one.
2. It never raises, because vLLM would swallow that and go on: a vLLM that cannot be patched leaves the plugin
   uninstalled, and our connector then refuses to start.
3. Calling it again changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvcustody.errors import IsolationError
from kvcustody.integrations.vllm import installed
from kvcustody.logger import get_logger

NAME = "KVCustody"
_MODULE = "kvcustody.integrations.vllm.connector"
_log = get_logger(__name__)


def register() -> None:
    """Register the connector and install the patches."""
    if installed.was_tried:
        return
    installed.was_tried = True
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(NAME, _MODULE, "GovernedConnector")
        _patch()
        installed.is_installed = True
    except Exception as error:
        _log.error("plugin not installed", error=f"{type(error).__name__}: {error}")


def _patch() -> None:
    from vllm.lora import worker_manager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core

    from kvcustody.integrations.vllm.engine_patch import UTILITIES
    from kvcustody.integrations.vllm.worker.loaded_adapters import noting_loads

    core.get_request_block_hasher = _instead_of_hashes(core.get_request_block_hasher)
    Scheduler.__init__ = _after_call(Scheduler.__init__, _govern_scheduler)
    # A served engine loads plugins inside its constructor, so it is taken over when its loop begins; one in its
    # caller's process has no loop, and has loaded them before.
    core.EngineCore.__init__ = _after_call(core.EngineCore.__init__, _govern_engine)
    for served in (core.EngineCoreProc, core.DPEngineCoreProc):
        served.run_busy_loop = _before_call(served.run_busy_loop, _govern_engine)
    core.EngineCore.shutdown = _before_call(core.EngineCore.shutdown, _close)
    if hasattr(core.EngineCore, "release_kv_cache_memory"):  # since 0.32
        core.EngineCore.release_kv_cache_memory = _before_call(core.EngineCore.release_kv_cache_memory, _refuse_release)
    worker_manager.WorkerLoRAManager._load_adapter = noting_loads(worker_manager.WorkerLoRAManager._load_adapter)
    for utility in UTILITIES:
        setattr(core.EngineCore, utility.__name__, utility)


def _instead_of_hashes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_request_block_hasher(*args: Any, **kwargs: Any) -> Any:
        from kvcustody.integrations.vllm.scheduler.block_hasher import governed_block_hasher

        return governed_block_hasher() if installed.governs else original(*args, **kwargs)

    return get_request_block_hasher


def _after_call(original: Callable[..., Any], act: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        act(self)
        return result

    return patched


def _before_call(original: Callable[..., Any], act: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        act(self)
        return original(self, *args, **kwargs)

    return patched


def _govern_scheduler(scheduler: Any) -> None:
    side = _side_of(scheduler)
    installed.governs = side is not None
    if side is not None:
        side.bind_scheduler(scheduler)


def _govern_engine(engine: Any) -> None:
    side = _side_of(engine.scheduler)
    if side is not None and not hasattr(engine, "kvcustody"):
        from kvcustody.integrations.vllm.engine_patch import EngineHandle

        engine.kvcustody = EngineHandle(engine, side)


def _refuse_release(engine: Any) -> None:
    """Refuse sleep mode for a governed engine.

    Raises:
        IsolationError: the cache's memory would be unmapped as it is.
    """
    if getattr(engine, "kvcustody", None) is not None:
        raise IsolationError("a governed engine does not release its cache's memory, because it has not been zeroed")


def _close(engine: Any) -> None:
    handle = getattr(engine, "kvcustody", None)
    if handle is not None:
        handle.close()


def _side_of(scheduler: Any) -> Any:
    """Return our half of a scheduler's connector, alone or among several; None for an engine without it."""
    from kvcustody.integrations.vllm.connector import GovernedConnector

    connector = getattr(scheduler, "connector", None)
    for one in [connector, *getattr(connector, "_connectors", ())]:
        if isinstance(one, GovernedConnector):
            return one.scheduler_side
    return None
