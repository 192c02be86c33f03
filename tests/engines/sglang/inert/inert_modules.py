"""Stands in for the CUDA-only packages that SGLang imports, where they are not installed: SGLang runs on the CPU then.

- Nothing in them computes: a name is a class without content, so that decorators, annotations and bases work.
- Whoever asks whether one is installed is told that it is not; only an import statement finds it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = frozenset(
    (
        "av",
        "cuda",
        "cupy",
        "cutlass",
        "datasets",
        "decord",
        "deep_ep",
        "deep_gemm",
        "flash_attn",
        "flash_mla",
        "flashinfer",
        "kernels",
        "mistral_common",
        "modelscope",
        "nvshmem",
        "sgl_kernel",
        "soundfile",
        "tilelang",
        "timm",
        "torch_memory_saver",
        "torchaudio",
        "torchvision",
    )
)
_ASKS = {"_is_package_available", "is_torchvision_available"}


class _Inert(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _inert(name)

    def __call__(cls, *given: Any, **named: Any) -> Any:
        decorates = len(given) == 1 and callable(given[0]) and not named
        return given[0] if decorates else cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


def _inert(name: str) -> Any:
    return _Inert(name, (), {"__module__": "inert"})


class _InertModule(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _inert(name)
        setattr(self, name, value)
        return value


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in NAMES or _somebody_only_asks():
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _InertModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _somebody_only_asks() -> bool:
    frame, depth = sys._getframe(2), 0
    while frame is not None and depth < 8:
        code = frame.f_code
        if code.co_name in _ASKS or (code.co_name == "find_spec" and code.co_filename.endswith("importlib/util.py")):
            return True
        frame, depth = frame.f_back, depth + 1
    return False


sys.meta_path.append(_Finder())
