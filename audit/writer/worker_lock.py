"""A worker's name on this machine: one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from urllib.parse import quote

from kvcustody.errors import LedgerError


def lock_worker_name(directory: Path, worker: str) -> int:
    """Hold the worker's name on this machine for the life of the process."""
    path = directory / f"worker-{quote(worker, safe='')}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as problem:
        raise LedgerError(f"spill directory `{directory}`: {problem.strerror}", path=directory) from problem
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(descriptor)
        raise LedgerError(f"worker `{worker}` is already running", worker=worker) from problem
    return descriptor
