"""Which blocks were evicted last, by key: a block that is computed again was wanted, and a larger pool had had it.

    evicted = EvictedKeys(blocks=pool.blocks)
    evicted.add(keys, length)                   # a run that made room, by the key of its first block
    again = evicted.computed_again(keys)        # of a prompt's missing blocks: how many there were, and how far back

1. What is kept is at most twice as many blocks as the pool has, the newest: a key and two numbers for each run.
2. `distance` of a block is how many were evicted since, itself included, and what is computed with it: a pool that much
   larger had kept it, where the least recently used leaves first.
3. A key is one of a tenant's: nobody learns of another's evictions from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcustody.allocator.prefix.node import KEY_BYTES

_DISTANCES = 48  # powers of two


class EvictedKeys:
    """The ghosts of one pool. `evicted` counts blocks since the pool was made."""

    __slots__ = ("_blocks", "_kept", "_newer", "_older", "distances", "evicted")

    def __init__(self, blocks: int) -> None:
        self.evicted = 0
        self.distances = [0] * _DISTANCES  # blocks computed again, by the bit length of their distance
        self._blocks = max(1, blocks)
        self._kept = 0
        self._newer: dict[bytes, tuple[int, int]] = {}
        self._older: dict[bytes, tuple[int, int]] = {}

    def add(self, key: bytes, length: int) -> None:
        """A run of `length` blocks made room; `key` is its first block's."""
        self.evicted = serial = self.evicted + length
        self._newer[key] = (length, serial)
        self._kept = kept = self._kept + length
        if kept >= self._blocks:
            self._turn()

    def add_each(self, keys: Iterable[bytes], count: int) -> None:
        """`count` blocks made room, each a run of its own; `keys`: of those that are kept."""
        self.evicted += count
        self._newer.update(dict.fromkeys(keys, (1, self.evicted)))
        self._kept += count
        if self._kept >= self._blocks:
            self._turn()

    def _turn(self) -> None:
        self._older, self._newer, self._kept = self._newer, {}, 0

    def computed_again(self, keys: bytes) -> int:
        """How many leading blocks of `keys`, 32 bytes each, had been evicted. They are forgotten: counted once."""
        found, at, end = 0, 0, len(keys)
        wanted = end // KEY_BYTES
        while at < end:
            key = keys[at : at + KEY_BYTES]
            kept = self._newer if key in self._newer else self._older
            if key not in kept:
                break
            length, serial = kept.pop(key)
            count = min(length, (end - at) // KEY_BYTES)
            self._count(self.evicted - serial + length + wanted, count)
            found += count
            at += length * KEY_BYTES
        return found

    def computed_again_each(self, keys: Iterable[bytes], *, weight: int = 1) -> int:
        """How many blocks of `keys`, each of which stands for `weight`, had been evicted; counted once."""
        if not (self._newer or self._older):
            return 0
        found = [key for key in keys if key in self._newer or key in self._older]
        for key in found:
            kept = self._newer if key in self._newer else self._older
            length, serial = kept.pop(key)
            self._count(self.evicted - serial + length + len(found) * weight, weight)
        return len(found) * weight

    def _count(self, distance: int, blocks: int) -> None:
        self.distances[min(_DISTANCES - 1, distance.bit_length())] += blocks


def distance_of(distances: list[int], share: float) -> int:
    """The distance that `share` of the blocks computed again do not exceed, to a power of two; 0 where none were."""
    total, seen = sum(distances), 0
    for bits, count in enumerate(distances):
        seen += count
        if total and seen >= share * total:
            return 1 << bits
    return 0
