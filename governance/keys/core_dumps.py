"""Core dumps: a crash would write tenants' blocks to a disk that no policy governs.

A GPU core dump holds device memory, a host one the pools on the CPU and the domain keys. Both are off unless
somebody switched them on, so a switch that is on is named, and refused where the profile is strict.

- In strict, no process holds custody while a device core dump is switched on.
- In strict, the soft limit of host core dumps is 0 before the first key is read.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

from kvcustody.errors import ConfigError
from kvcustody.logger import get_logger

_log = get_logger(__name__)

# CUDA-GDB documentation, "GPU core dump support"; ROCm runtime, "GPU core dumps".
SWITCHES = (
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
    "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP",
    "HSA_COREDUMP_PATTERN",
)
_OFF = frozenset({"", "0"})


def switched_on(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the switches of device core dumps that are on."""
    return tuple(name for name in SWITCHES if environment.get(name, "") not in _OFF)


def disable_core_dumps(*, strict: bool, environment: Mapping[str, str] | None = None) -> None:
    """Refuse (strict) or report device core dumps; in strict, host core dumps are disabled too.

    Raises `ConfigError` with the switches that are on.
    """
    switches = switched_on(os.environ if environment is None else environment)
    if switches and strict:
        raise ConfigError(
            f"`{'`, `'.join(switches)}` would write device memory to a file when a kernel fails; "
            "the strict profile refuses to start: unset it",
            switches=switches,
        )
    if switches:
        _log.warning("a failing kernel would write device memory to a file", switches=switches)
    if strict:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
