"""Which of an engine's blocks were evicted last, by key: what is computed again was wanted (`EvictedKeys`).

    evicted = EvictedBlocks(pool.partition.size, pool.generation)
    again = evicted.published(blocks, keys)     # how many of them had been evicted
    evicted.note(blocks, keys)                  # published, and not asked about: what a decode step fills
    evicted.made_room(blocks)                   # evicted: they are known by the keys that were told

- Up to `EXACT_BLOCKS` every key is kept. In a larger pool one in eight is, by its own bits, and stands for eight: what
  the engine's thread spends on each block is then that of a comparison. Spatial sampling, after SHARDS (Waldspurger et
  al., FAST 2015): a key is always kept or never, so that what comes again is known again.
- A key that was told of another generation of its block is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.prefix.evicted_keys import EvictedKeys

EXACT_BLOCKS = 4096
_ONE_IN = 8


class EvictedBlocks:
    """The ghosts of one engine's pool of `blocks`. `generation` is the pool's own array."""

    __slots__ = ("_below", "_generation", "_key_of", "_weight", "keys")

    def __init__(self, blocks: int, generation: NDArray[np.int64]) -> None:
        self.keys = EvictedKeys(blocks)
        self._generation = generation
        self._key_of: dict[int, tuple[bytes, int]] = {}  # of blocks in the engine's index
        self._weight = 1 if blocks <= EXACT_BLOCKS else _ONE_IN
        self._below = 256 // self._weight  # first bytes of the keys that are kept

    def published(self, blocks: Sequence[int], keys: Sequence[bytes]) -> int:
        """Note these; about how many of them had been evicted, each counted once."""
        kept = self.note(blocks, keys)
        return self.keys.computed_again_each(kept, weight=self._weight) if kept else 0

    def note(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        """These are in the engine's index under `keys`; those that are kept."""
        below, generation, key_of = self._below, self._generation, self._key_of
        kept = []
        for at, key in enumerate(keys):
            if key[0] < below:
                block = blocks[at]
                key_of[block] = (key, int(generation[block]))
                kept.append(key)
        return kept

    def made_room(self, blocks: Sequence[int]) -> None:
        """These were evicted: whoever computes one of them again is counted."""
        key_of, generation = self._key_of, self._generation
        told = [(block, *key_of.pop(block)) for block in blocks if block in key_of]
        self.keys.add_each([key for block, key, then in told if then == generation[block]], len(blocks))
