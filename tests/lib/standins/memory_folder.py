"""The folder whose files lie in memory: tests that may lose everything wait for no disk there."""

from __future__ import annotations

import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")


def has_room(free_bytes: int) -> bool:
    """Whether files of so many bytes fit there."""
    return MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= free_bytes
