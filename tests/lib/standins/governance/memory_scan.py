"""Counts copies of a byte string in a process's writable memory, through /proc/<pid>/mem."""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

_MAP = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw")
_PIECE_BYTES = 1 << 20
_PAGE_BYTES = 4096
_IN_SWAP = 1 << 6  # of the last byte of a page's entry in the page map; above it: in memory


def copies(pid: int, needle: bytes) -> int:
    """How often `needle` occurs in the process's readable and writable mappings."""
    process, count = Path(f"/proc/{pid}"), 0
    maps = [_MAP.match(line) for line in (process / "maps").read_text().splitlines()]
    bounds = [(int(found[1], 16), int(found[2], 16)) for found in maps if found is not None]
    with (process / "mem").open("rb", buffering=0) as memory, (process / "pagemap").open("rb", 0) as pages:
        for low, high in bounds:
            count += _copies_between(memory, pages, low, high, needle)
    return count


def _copies_between(memory: BinaryIO, pages: BinaryIO, low: int, high: int, needle: bytes) -> int:
    count, kept = 0, len(needle) - 1
    buffer = bytearray(kept + _PIECE_BYTES)  # the end of the piece before, then this one
    for start in range(low, high, _PIECE_BYTES):
        size = min(_PIECE_BYTES, high - start)
        if not _has_pages(pages, start, size):
            buffer[:kept] = bytes(kept)
            continue
        memory.seek(start)
        try:
            size = memory.readinto(memoryview(buffer)[kept : kept + size])  # type: ignore[attr-defined]
        except OSError:
            return count
        hits = buffer.count(needle, 0, kept + size)
        count += hits
        buffer[:kept] = buffer[size : size + kept]
        if hits:
            buffer[kept:] = bytes(_PIECE_BYTES)  # where this process scans itself, it is no copy
    return count


def _has_pages(pages: BinaryIO, start: int, size: int) -> bool:
    """Whether anything was ever written there: only then is there a page, in memory or in swap."""
    pages.seek(start // _PAGE_BYTES * 8)
    entries = pages.read(size // _PAGE_BYTES * 8)
    return not entries or max(entries[7::8]) >= _IN_SWAP
