"""The most recently evicted blocks, by key: one that is computed again was wanted, and a larger pool would have kept
it.

    evicted = EvictedKeys(pool.blocks)
    evicted.add(tenant, key, length)             # a run that made room, by the key of its first block
    again = evicted.computed_again(tenant, keys)  # of a prompt's missing blocks: how many there were
    evicted.forget(tenant)                       # it has left, or something of it was erased

1. What is kept is at most twice as many blocks as the pool has, the newest: a key and two numbers for each run.
2. `distance` of a block is how many were evicted since, itself included, and what is computed with it: a pool that much
   larger had kept it, where the least recently used leaves first.
3. Keys are kept by tenant: none finds another's, and what is forgotten is a tenant's whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcustody.allocator.prefix.node import KEY_BYTES

_DISTANCES = 48  # powers of two
_Runs = dict[bytes, tuple[int, int]]  # key of the first block: its length, and how many were evicted by then
_NONE: _Runs = {}


class EvictedKeys:
    """The recently evicted keys of one pool. `evicted` counts blocks since the pool was created."""

    __slots__ = ("_kept", "_newer", "_older", "distances", "evicted", "keys_max")

    def __init__(self, keys_max: int) -> None:
        self.evicted = 0
        self.distances = [0] * _DISTANCES  # blocks computed again, by the bit length of their distance
        self.keys_max = max(1, keys_max)  # blocks of all tenants until the older half is let go
        self._kept = 0
        self._newer: dict[str, _Runs] = {}
        self._older: dict[str, _Runs] = {}

    def add(self, tenant: str, key: bytes, length: int) -> None:
        """Record that a run of `length` blocks of `tenant` was evicted; `key` is its first block's."""
        self.evicted = serial = self.evicted + length
        self._runs(tenant)[key] = (length, serial)
        self._kept = kept = self._kept + length
        if kept >= self.keys_max:
            self._turn()

    def add_each(self, tenant: str, keys: Iterable[bytes], count: int) -> None:
        """Record that `count` single blocks of `tenant` were evicted; `keys` are those of the blocks with a known
        key.
        """
        self.evicted += count
        self._runs(tenant).update(dict.fromkeys(keys, (1, self.evicted)))
        self._kept += count
        if self._kept >= self.keys_max:
            self._turn()

    def pass_by(self, count: int) -> None:
        """Record that `count` blocks without a stored key were evicted: stored keys become that much older."""
        self.evicted += count
        self._kept += count
        if self._kept >= self.keys_max:
            self._turn()

    def forget(self, tenant: str | None) -> None:
        """Drop every key of `tenant` (None: of every tenant). Counts stay."""
        if tenant is None:
            self._newer, self._older = {}, {}
        else:
            self._newer.pop(tenant, None)
            self._older.pop(tenant, None)

    def __len__(self) -> int:
        """Runs that are kept."""
        return sum(map(len, (*self._newer.values(), *self._older.values())))

    def _runs(self, tenant: str) -> _Runs:
        runs = self._newer.get(tenant)
        if runs is None:
            runs = self._newer[tenant] = {}
        return runs

    def _turn(self) -> None:
        self._older, self._newer, self._kept = self._newer, {}, 0

    def computed_again(self, tenant: str, keys: bytes) -> int:
        """Return how many leading blocks of `keys`, 32 bytes each, had been evicted. They are forgotten, so each counts
        once.
        """
        newer, older = self._newer.get(tenant, _NONE), self._older.get(tenant, _NONE)
        if not (newer or older):
            return 0
        hits, at, end = 0, 0, len(keys)
        wanted = end // KEY_BYTES
        while at < end:
            key = keys[at : at + KEY_BYTES]
            kept = newer if key in newer else older
            if key not in kept:
                break
            length, serial = kept.pop(key)
            count = min(length, (end - at) // KEY_BYTES)
            self._count(self.evicted - serial + length + wanted, count)
            hits += count
            at += length * KEY_BYTES
        return hits

    def computed_again_each(self, tenant: str, keys: Iterable[bytes], *, weight: int = 1) -> int:
        """Return how many blocks of `keys`, each standing for `weight` blocks, had been evicted; each counts once."""
        newer, older = self._newer.get(tenant, _NONE), self._older.get(tenant, _NONE)
        if not (newer or older):
            return 0
        found = [key for key in keys if key in newer or key in older]
        for key in found:
            length, serial = (newer if key in newer else older).pop(key)
            self._count(self.evicted - serial + length + len(found) * weight, weight)
        return len(found) * weight

    def _count(self, distance: int, blocks: int) -> None:
        self.distances[min(_DISTANCES - 1, distance.bit_length())] += blocks


def distance_of(distances: list[int], share: float) -> int:
    """Return the distance that `share` of the blocks computed again do not exceed, to a power of two; 0 if there were
    none.
    """
    total, seen = sum(distances), 0
    for bits, count in enumerate(distances):
        seen += count
        if total and seen >= share * total:
            return 1 << bits
    return 0
