"""Which memory of the machine is near which processors, and memory that is to lie on one of these nodes.

    nodes = read_nodes()                          # those with memory; empty where the system does not say
    here = node_here(nodes)                       # of the processor that this thread runs on
    is_bound = prefer_node(address, size, node)   # before the memory is touched

Preferred, not demanded: where a node is full, the system gives memory of another, and nothing fails.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import NamedTuple

NODES = Path("/sys/devices/system/node")
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}  # mbind, get_mempolicy
_PREFERRED, _BY_ADDRESS = 1, 2  # linux/mempolicy.h
_WORD_BITS, _WORDS = 64, 16
_LIBC = ctypes.CDLL(None, use_errno=True)


class MemoryNode(NamedTuple):
    """One node: its number, its processors, and how far each node that has memory is, by number; 10 is itself."""

    number: int
    processors: frozenset[int]
    distances: dict[int, int]


def read_nodes(root: Path = NODES) -> list[MemoryNode]:
    """The nodes that have memory, by number. A system that does not say has none."""
    try:
        online = _listed((root / "online").read_text())
        with_memory = _listed((root / "has_memory").read_text())
        found = []
        for number in sorted(with_memory):
            folder = root / f"node{number}"
            apart = [int(word) for word in (folder / "distance").read_text().split()]
            distances = dict(zip(sorted(online), apart, strict=True))
            near = {other: distances[other] for other in with_memory}
            found.append(MemoryNode(number, _listed((folder / "cpulist").read_text()), near))
    except (OSError, ValueError, KeyError):
        return []
    return found


def node_here(nodes: list[MemoryNode]) -> int:
    """The number of the node whose processor this thread runs on now; the first where that is none of them."""
    processor = _LIBC.sched_getcpu()
    return next((node.number for node in nodes if processor in node.processors), nodes[0].number)


def prefer_node(address: int, size: int, node: int) -> bool:
    """Have what is touched of this memory from now on lie on `node`; False where the system does not let us."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not 0 <= node < _WORD_BITS * _WORDS:
        return False
    mask = (ctypes.c_uint64 * _WORDS)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    bits = ctypes.c_ulong(_WORD_BITS * _WORDS + 1)
    where, length = ctypes.c_void_p(address), ctypes.c_ulong(size)
    return bool(_LIBC.syscall(calls[0], where, length, _PREFERRED, mask, bits, 0) == 0)


def preferred_node(address: int) -> int | None:
    """The node that memory at this address was bound to; None where none was, or the system does not say."""
    calls = _CALLS.get(platform.machine())
    mode, mask = ctypes.c_int(-1), (ctypes.c_uint64 * _WORDS)()
    bits, where = ctypes.c_ulong(_WORD_BITS * _WORDS + 1), ctypes.c_void_p(address)
    if calls is None or _LIBC.syscall(calls[1], ctypes.byref(mode), mask, bits, where, _BY_ADDRESS):
        return None
    if mode.value != _PREFERRED:
        return None
    return next((at * _WORD_BITS + word.bit_length() - 1 for at, word in enumerate(map(int, mask)) if word), None)


def _listed(text: str) -> frozenset[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
