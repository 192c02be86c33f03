"""What a figure was measured on: processor, memory, accelerator, versions and commit.

1. Every result file carries these facts, so that two files can be told apart or compared.
2. No host name, user, path or address is recorded.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
NOTABLE_FLAGS = ("sha_ni", "avx2", "avx512f", "vaes")


def facts(*distributions: str) -> dict[str, Any]:
    """The facts of this run; `distributions` are the packages whose versions matter to it."""
    return {
        "processor": processor(),
        "accelerators": accelerators(),
        "memory_gib": memory_gib(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in distributions},
        "commit": commit(),
    }


def processor() -> dict[str, Any]:
    """Model name, usable cores and the instruction sets that decide hashing speed."""
    model, flags = platform.processor() or "unknown", set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags" and not flags:
                flags = set(value.split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model, "cores": cores, "flags": [flag for flag in NOTABLE_FLAGS if flag in flags]}


def accelerators() -> list[str]:
    """Name and memory of each NVIDIA device; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []


def memory_gib() -> float:
    """Physical memory in GiB."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checked-out commit, with `+` when a tracked file differs from it; None outside a checkout.

    `KVCUSTODY_COMMIT` says it of a tree that was copied without its history.
    """
    if told := os.environ.get("KVCUSTODY_COMMIT"):
        return told
    git = shutil.which("git")
    if git is None:
        return None
    head = subprocess.run([git, "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if head.returncode:
        return None
    changed = subprocess.run([git, "diff", "--quiet", "HEAD"], cwd=REPOSITORY, capture_output=True, check=False)
    return head.stdout.strip() + ("+" if changed.returncode else "")
