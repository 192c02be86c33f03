"""Connectors, tiers and stores that an installed engine has, and which of them somebody tried.

A part is tried where a target of `kvcustody known-bugs` or a kept run of the conformance kit has it; every other one is
named as untested.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from kvcustody.errors import ConfigError

SCRIPT: Final = Path(__file__).resolve().parent / "scripts" / "engines" / "registries.py"
_SECONDS: Final = 300.0
# By registry and name: what tried it.
TRIED: Final = {
    ("vllm-connector", "ExampleConnector"): "known-bugs --target vllm-example",
    ("vllm-connector", "NixlConnector"): "known-bugs --target vllm-transfer",
    ("vllm-connector", "LMCacheMPConnector"): "the conformance kit, with a record",
    ("vllm-connector", "OffloadingConnector"): "known-bugs --target vllm-tiers",
    ("vllm-offload", "CPUOffloadingSpec"): "known-bugs --target vllm-tiers",
    ("vllm-offload", "TieringOffloadingSpec"): "known-bugs --target vllm-tiers",
    ("vllm-tier", "fs"): "known-bugs --target vllm-tiers",
    (
        "vllm-tier",
        "kvcr",
    ): "known-bugs --target kvcr",  # vLLM's part gives it memory and keys, and changes neither
    ("sglang-store", "file"): "known-bugs --target sglang-hicache",
    ("vllm-connector", "LMCacheConnectorV1"): "known-bugs --target lmcache-in-process",
    ("lmcache-adapter", "fs_l2_adapter"): "known-bugs --target lmcache-files",
    ("lmcache-serde", "aesgcm"): "known-bugs --target lmcache-aesgcm",
}


class InstalledPart(NamedTuple):
    """One name of a registry. `tried`: by what; empty: by nobody. `problem`: why a registry could not be read."""

    registry: str
    name: str
    tried: str
    problem: str = ""


def installed_parts(python: str) -> list[InstalledPart]:
    """Every registered part of what this interpreter has; raises `ConfigError` where it does not run."""
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that was named
            [python, str(SCRIPT)], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(f"{python} lists nothing: {type(error).__name__}", python=python) from None
    return parts_of(found)


def parts_of(found: dict[str, list[str] | str]) -> list[InstalledPart]:
    """What the script said, with what tried each."""
    parts = []
    for registry, names in sorted(found.items()):
        if isinstance(names, str):
            parts.append(InstalledPart(registry, "", "", names))
            continue
        parts += [InstalledPart(registry, name, TRIED.get((registry, name), "")) for name in names]
    return parts
