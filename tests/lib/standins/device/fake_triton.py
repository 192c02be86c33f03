"""Triton's driver without a device: real compilation for a named target, launches that are recorded.

    with fake_triton(target=90) as driver:      # Triton's own dispatch and cache work as on a GPU
        launch_scrub(table, entries, ...)       # a table in host memory
    driver.compiled, driver.launched            # names of kernels, in order

1. Nothing of ours is replaced: our launches, Triton's binder, cache and code generation run; what stands in is the
   driver alone, below Triton.
2. `on_launch` is given the kernel's name, grid, stream handle and arguments, as the driver would be.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvcustody.kernels import launch as launching

WARP = 32
_SHARED_BYTES = 227 << 10
OnLaunch = Callable[[str, int, int, tuple[Any, ...]], None]


class _Utils:
    """What Triton asks of a device."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        assert binary
        return object(), name, 32, 0, 1024

    def unload_module(self, module: object) -> None:
        """Nothing was loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": _SHARED_BYTES,
            "multiprocessor_count": 132,
            "warpSize": WARP,
            "max_num_regs": 65536,
        }


class FakeDriver:
    """One device of compute capability `target`."""

    def __init__(self, target: int, on_launch: OnLaunch | None) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", target, WARP)
        self.utils = _Utils()
        self.compiled: list[str] = []
        self.launched: list[str] = []
        self.stream = 7
        self._on_launch = on_launch

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Triton makes one for each compiled kernel."""
        name = source.fn.__name__

        def launch(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            assert (y, z) == (1, 1)
            self.launched.append(name)
            if self._on_launch is not None:
                self._on_launch(name, x, stream, rest[4:])  # packed metadata, launch metadata, two hooks

        return launch

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")


@contextlib.contextmanager
def fake_triton(target: int = 90, on_launch: OnLaunch | None = None) -> Iterator[FakeDriver]:
    """Triton compiles for `target` and launches into `on_launch`; host tables are served by the kernels meanwhile."""
    import triton
    from triton.runtime import driver as active

    driver = FakeDriver(target, on_launch)
    previous = active._active
    hook, uses = triton.knobs.runtime.jit_post_compile_hook, launching.uses_triton
    kernels = _kernels()

    def compiled(*_: Any, **told: Any) -> None:
        driver.compiled.append(told["fn"].name.rpartition(".")[2])

    active.set_active(driver)
    triton.knobs.runtime.jit_post_compile_hook = compiled
    places = _users_of(uses)
    for kernel in kernels:
        kernel.device_caches.clear()
    for module in places:
        module.uses_triton = lambda table: True
    try:
        yield driver
    finally:
        for module in places:
            module.uses_triton = uses
        for kernel in kernels:
            kernel.device_caches.clear()
        triton.knobs.runtime.jit_post_compile_hook = hook
        if previous is not None or torch.cuda.is_available():
            active._active = previous
        # else it stays: compiled kernels are given back to a driver when they go


def _kernels() -> list[Any]:
    from kvcustody.kernels import copy, scrub, verify

    return [copy.copy_kernel, copy.exchange_kernel, scrub.scrub_kernel, verify.verify_kernel]


def _users_of(function: Any) -> list[Any]:
    """Modules that have imported `function` by name."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith("kvcustody.") and getattr(module, "uses_triton", None) is function
    ]
