"""The most recently evicted blocks of an engine, by key: a block that is computed again was still wanted
(`EvictedKeys`).

    evicted = EvictedBlocks(pool)
    again = evicted.published(blocks, keys)     # how many of them had been evicted
    evicted.note(blocks, keys)                  # published, and not asked about: what a decode step fills
    evicted.made_room(blocks)                   # evicted: they are known by the keys that were told
    evicted.drop(blocks)                        # ended otherwise: nothing of them is kept
    evicted.forget(tenant)                      # something of it was erased

- Up to `EXACT_BLOCKS` every key is kept. In a larger pool one in eight is, by its own bits, and stands for eight: what
  the engine's thread spends on each block is then that of a comparison. Spatial sampling, after SHARDS (Waldspurger et
  al., FAST 2015): a key is always kept or never, so that what comes again is known again.
- A key that was told of another generation of its block is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.prefix.evicted_keys import EvictedKeys

EXACT_BLOCKS = 4096
_ONE_IN = 8


class EvictedBlocks:
    """The recently evicted blocks of one engine's pool, by the tenant that owned them."""

    __slots__ = ("_below", "_key_of", "_pool", "_weight", "keys")

    def __init__(self, pool: ExternalPool) -> None:
        self._pool = pool
        blocks = pool.partition.size
        self.keys = EvictedKeys(blocks)
        self._key_of: dict[int, tuple[bytes, int]] = {}  # of blocks in the engine's index
        self._weight = 1 if blocks <= EXACT_BLOCKS else _ONE_IN
        self._below = 256 // self._weight  # first bytes of the keys that are kept

    def published(self, blocks: Blocks, keys: Sequence[bytes]) -> int:
        """Note published blocks of one tenant; return about how many of them had been evicted, each counted once."""
        generation = self._pool.generation
        stored_keys = keys
        if self._weight == 1:
            named = zip(keys, generation[blocks].tolist(), strict=False)
            self._key_of.update(zip(blocks.tolist(), named, strict=False))
        else:
            stored_keys = self._note(blocks.item, keys)
            if not stored_keys:
                return 0
        owner = self._pool.domains[self._pool.tag.item(blocks.item(0))].owner.name
        return self.keys.computed_again_each(owner, stored_keys, weight=self._weight)

    def note(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Note a few single blocks that are in the engine's index under `keys`."""
        self._note(blocks.__getitem__, keys)

    def _note(self, block_at: Callable[[int], int], keys: Sequence[bytes]) -> list[bytes]:
        below, generation_of, key_of = self._below, self._pool.generation.item, self._key_of
        stored_keys = []
        for at, key in enumerate(keys):
            if key[0] < below:
                block = block_at(at)
                key_of[block] = (key, generation_of(block))
                stored_keys.append(key)
        return stored_keys

    def made_room(self, blocks: Blocks) -> None:
        """Record that these blocks were evicted, so that computing one of them again is counted."""
        key_of, pool = self._key_of, self._pool
        if not key_of:
            self.keys.pass_by(len(blocks))
            return
        generation_of, tag_of = pool.generation.item, pool.tag.item
        keys_by_tag: dict[int, list[bytes]] = {}
        for block in [each for each in blocks.tolist() if each in key_of]:
            key, then = key_of.pop(block)
            if then == generation_of(block):
                keys_by_tag.setdefault(tag_of(block), []).append(key)
        self.keys.pass_by(len(blocks) - sum(map(len, keys_by_tag.values())))
        for number, keys in keys_by_tag.items():
            self.keys.add_each(pool.domains[number].owner.name, keys, len(keys))

    def drop(self, blocks: Sequence[int]) -> None:
        """Forget blocks that ended for another reason than eviction."""
        pop = self._key_of.pop
        for block in blocks:
            pop(block, None)

    def forget(self, tenant: str | None) -> None:
        """Drop all keys of `tenant` (None: of every tenant) after an erasure."""
        self.keys.forget(tenant)
        indexed = self._pool.indexed
        self.drop([block for block in self._key_of if not indexed[block]])
