"""HiCache's copies between device and host where there is no device: an SGLang plugin, for tests only.

SGLang's own are CUDA's: its kernels, its streams, its pinned memory. Here torch copies, at once. All that decides what
is copied, when, and under which name is SGLang's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


class _Done:
    """An event or a stream of a device that has always finished."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def record(self, *_: Any) -> None:
        pass

    synchronize = wait = wait_event = wait_stream = record


class _Device:
    Event = Stream = _Done

    @staticmethod
    def current_stream(*_: Any) -> _Done:
        return _Done()

    @staticmethod
    def stream(_: Any) -> Any:
        return nullcontext()

    @staticmethod
    def synchronize(*_: Any) -> None:
        pass


def copy_rows(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def register() -> None:
    """SGLang's plugin hook, called in every process."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
    from sglang.srt.mem_cache.pool_host import common, mha

    common._cuda_host_register = common._cuda_host_unregister = lambda *_: None
    mha.transfer_kv_direct = copy_rows
    makes = mha.MHATokenToKVPoolHost.__init__

    def unpinned(pool: Any, *given: Any, **named: Any) -> None:
        makes(pool, *given, **named)
        pool.pin_memory = False

    mha.MHATokenToKVPoolHost.__init__ = unpinned
    for module in (cache_controller, hybrid_cache_controller):
        if hasattr(module, "device_module"):
            module.device_module = _Device
