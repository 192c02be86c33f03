"""Host memory as one arena for each memory node: an object lies near the processor that sealed it.

    store = open_host_arena(capacity_bytes)       # one arena where the machine has one node
    nodes = read_nodes()                          # those with memory; empty where the system does not say
    here = node_here(nodes)                       # of the processor that this thread runs on
    is_bound = prefer_node(address, size, node)   # a preference: a full node's memory comes from another

1. Each arena has an equal part of the capacity, and its memory lies on its node, where the system lets us say so.
   Where a part would be less than 1 GiB there is one arena: an object lies in one piece, and must find room.
2. An object goes to the arena of the node on which the caller runs; where that is full, to the nearest that has room.
   It is read where it lies.
3. For who uses it, it is one store: names, bytes and ends are those of all arenas together.
"""

from __future__ import annotations

import ctypes
import heapq
import platform
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvcustody.errors import StoreError
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.stores.store_protocol import Deleted, Listed, OwnPlace, TierStore
from kvcustody.logger import get_logger

_PART_BYTES_MIN = 1 << 30
_log = get_logger(__name__)


NODES = Path("/sys/devices/system/node")
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}  # mbind, get_mempolicy
_PREFERRED, _BY_ADDRESS = 1, 2  # linux/mempolicy.h
_WORD_BITS, _WORDS = 64, 16
_LIBC = ctypes.CDLL(None, use_errno=True)


class MemoryNode(NamedTuple):
    """One node: its number, its processors, and its distance to each node with memory, by number; 10 is itself."""

    number: int
    processors: frozenset[int]
    distances: dict[int, int]


def read_nodes(root: Path = NODES) -> list[MemoryNode]:
    """Return the nodes with memory, by number; empty where the system does not report them."""
    try:
        online = _listed((root / "online").read_text())
        with_memory = _listed((root / "has_memory").read_text())
        nodes = []
        for number in sorted(with_memory):
            folder = root / f"node{number}"
            apart = [int(word) for word in (folder / "distance").read_text().split()]
            distances = dict(zip(sorted(online), apart, strict=True))
            near = {other: distances[other] for other in with_memory}
            nodes.append(MemoryNode(number, _listed((folder / "cpulist").read_text()), near))
    except (OSError, ValueError, KeyError):
        return []
    return nodes


def node_here(nodes: list[MemoryNode]) -> int:
    """Return the number of the node whose processor runs this thread; the first one where none matches."""
    processor = _LIBC.sched_getcpu()
    return next((node.number for node in nodes if processor in node.processors), nodes[0].number)


def prefer_node(address: int, size: int, node: int) -> bool:
    """Prefer `node` for this memory's pages that are not yet used; False where the system refuses."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not 0 <= node < _WORD_BITS * _WORDS:
        return False
    mask = (ctypes.c_uint64 * _WORDS)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    bits = ctypes.c_ulong(_WORD_BITS * _WORDS + 1)
    where, length = ctypes.c_void_p(address), ctypes.c_ulong(size)
    return bool(_LIBC.syscall(calls[0], where, length, _PREFERRED, mask, bits, 0) == 0)


def preferred_node(address: int) -> int | None:
    """Return the node preferred for memory at this address; None without one, or where the system does not say."""
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


def open_host_arena(capacity_bytes: int, nodes: list[MemoryNode] | None = None) -> TierStore:
    """Open host memory for a tier, by the machine's nodes. Raises `ConfigError` where the system refuses it."""
    nodes = read_nodes() if nodes is None else nodes
    if len(nodes) < 2 or capacity_bytes // len(nodes) < _PART_BYTES_MIN:
        return HostArena(capacity_bytes)
    return NodeArenas(capacity_bytes, nodes)


def _distance(node: MemoryNode, other: int) -> tuple[int, int]:
    return node.distances[other], other


class NodeArenas(OwnPlace):
    """`capacity_bytes` over several nodes. Raises `ConfigError` where the system refuses them."""

    kind, ends_by, outlives, is_shared, in_flight = "host", "zeroed", False, False, 1

    def __init__(
        self,
        capacity_bytes: int,
        nodes: list[MemoryNode],
        *,
        here: Callable[[list[MemoryNode]], int] = node_here,
        prefer: Callable[[int, int, int], bool] = prefer_node,
    ) -> None:
        """`here`: on which node the caller runs; `prefer`: has memory lie on a node."""
        self._nodes, self._here, self._prefer = nodes, here, prefer
        each = capacity_bytes // len(nodes)
        self.arenas = {node.number: HostArena(each, place=partial(self._place, node.number)) for node in nodes}
        self._nearest = {node.number: sorted(self.arenas, key=partial(_distance, node)) for node in nodes}
        self.capacity_bytes = sum(arena.capacity_bytes for arena in self.arenas.values())
        self._preparing: dict[bytes, HostArena] = {}
        self._lies_in: dict[bytes, HostArena] = {}
        self._reading: dict[bytes, list[HostArena]] = {}

    def _place(self, node: int, address: int, size: int) -> None:
        if not self._prefer(address, size, node):
            _log.warning("host memory is not bound to its node", node=node)

    @property
    def used_bytes(self) -> int:
        """Of all arenas."""
        return sum(arena.used_bytes for arena in self.arenas.values())

    def taken(self, size: int) -> int:
        """As one arena's."""
        return next(iter(self.arenas.values())).taken(size)

    def prepare_store(self, name: bytes, size: int, until_us: int = 0) -> memoryview | None:
        """Lend memory near the caller, or the nearest free."""
        self.abandon_store(name)
        for number in self._nearest[self._here(self._nodes)]:
            arena = self.arenas[number]
            into = arena.prepare_store(name, size)
            if into is not None:
                self._preparing[name] = arena
                return into
        return None

    def start_store(self, name: bytes) -> None:
        """Nothing: it is there already."""

    def complete_store(self, name: bytes) -> bool:
        """Publish the object, and end an older one of its name, in whichever arena."""
        arena = self._preparing.pop(name, None)
        if arena is None:
            raise StoreError(f"host tier: object `{name.hex()[:16]}` was not prepared")
        older = self._lies_in.get(name)
        arena.complete_store(name)
        self._lies_in[name] = arena
        if older is not None and older is not arena:
            older.delete([name])
        return True

    def abandon_store(self, name: bytes) -> None:
        """The extent is zeroed and free."""
        arena = self._preparing.pop(name, None)
        if arena is not None:
            arena.abandon_store(name)

    def start_load(self, name: bytes) -> None:
        """Nothing."""

    def abandon_load(self, name: bytes) -> None:
        """Nothing was started."""

    def prepare_load(self, name: bytes) -> memoryview | None:
        """The object where it lies."""
        arena = self._lies_in.get(name)
        found = None if arena is None else arena.prepare_load(name)
        if arena is not None and found is not None:
            self._reading.setdefault(name, []).append(arena)
        return found

    def complete_load(self, name: bytes) -> None:
        """The last reader of an object that has ended frees it."""
        reading = self._reading[name]
        reading.pop().complete_load(name)
        if not reading:
            del self._reading[name]

    def peek(self, name: bytes, size: int) -> bytes | None:
        """Its beginning, copied."""
        arena = self._lies_in.get(name)
        return None if arena is None else arena.peek(name, size)

    def delete(self, names: Iterable[bytes]) -> Deleted:
        """Zero these extents, those that are being read when that is over."""
        absent: list[bytes] = []
        by_arena: dict[int, list[bytes]] = {}
        for name in names:
            arena = self._lies_in.pop(name, None)
            if arena is None:
                absent.append(name)
                continue
            number = next(number for number, other in self.arenas.items() if other is arena)
            by_arena.setdefault(number, []).append(name)
        done = [self.arenas[number].delete(theirs) for number, theirs in by_arena.items()]
        objects, size = sum(one.objects for one in done), sum(one.size for one in done)
        return Deleted(objects, size, tuple(absent))

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """By name, behind `after`, of all arenas."""
        pages = [arena.page(after, limit) for arena in self.arenas.values()]
        return list(islice(heapq.merge(*pages), limit))

    def close(self) -> None:
        """Zero everything that is there, and let the memory go."""
        for arena in self.arenas.values():
            arena.close()
        for kept in (self._preparing, self._lies_in, self._reading):
            kept.clear()
