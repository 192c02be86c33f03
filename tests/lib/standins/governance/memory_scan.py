"""Counts copies of a byte string in a process's writable memory, through /proc/<pid>/mem."""

from __future__ import annotations

import re
from pathlib import Path

_MAP = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw")
_PIECE_BYTES = 1 << 20


def copies(pid: int, needle: bytes) -> int:
    """How often `needle` occurs in the process's readable and writable mappings."""
    found = 0
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            matched = _MAP.match(line)
            if matched is not None:
                low, high = (int(end, 16) for end in matched.groups())
                found += _copies_between(memory, low, high, needle)
    return found


def _copies_between(memory, low: int, high: int, needle: bytes) -> int:  # type: ignore[no-untyped-def]
    found, tail = 0, b""
    while low < high:
        memory.seek(low)
        try:
            piece = memory.read(min(_PIECE_BYTES, high - low))
        except OSError:
            return found
        if not piece:
            return found
        low += len(piece)
        found += (tail + piece).count(needle)
        tail = (tail + piece)[-(len(needle) - 1) :]
    return found
