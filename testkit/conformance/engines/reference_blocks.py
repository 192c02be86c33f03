"""The reference engine's allocator without governance: free list, prefix index, LRU order, reference counts.

1. free + least recently used + referenced + parked + withheld = all blocks; each is in exactly one of them.
2. A block under device work (a step in flight, a transfer) is pinned: once free it is parked, not handed out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np


class ReferenceBlocks:
    """The physical blocks 0 to `count` - 1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.refs = np.zeros(count, dtype=np.int64)
        self.free: deque[int] = deque(range(count))
        self.index: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.unused: OrderedDict[int, None] = OrderedDict()  # indexed and unreferenced, least recently used first
        self.pins: Counter[int] = Counter()
        self.parked: set[int] = set()
        self.withheld: set[int] = set()
        self.allocated = 0

    def find(self, key: bytes) -> int:
        """Return the block indexed under a key, or -1."""
        return self.index.get(key, -1)

    def room(self, keeping: Iterable[int] = ()) -> int:
        """Return how many blocks could be taken while these unreferenced ones are kept."""
        kept = set(keeping)
        return len(self.free) + sum(block not in kept and not self.pins[block] for block in self.unused)

    def oldest(self) -> int:
        """Return the least recently used block that is not pinned by device work."""
        return next(block for block in self.unused if not self.pins[block])

    def take(self, count: int) -> list[int]:
        """Take `count` blocks from the free list, which the caller has filled."""
        taken = [self.free.popleft() for _ in range(count)]
        self.refs[taken] += 1
        self.allocated += count
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these indexed blocks."""
        for block in blocks:
            self.refs[block] += 1
            self.unused.pop(block, None)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference; a block without references becomes unused (indexed) or free. Children come first, for
        LRU.
        """
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._release(block)

    def remember(self, key: bytes, block: int) -> bool:
        """Index a block under its key; return False where the key has another block."""
        if key in self.index:
            return False
        self.index[key] = block
        self.key_of[block] = key
        return True

    def forget(self, block: int) -> bytes | None:
        """Remove a block from the index and return its key."""
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.index[key]
            if self.unused.pop(block, False) is None:
                self._release(block)
        return key

    def withhold(self, block: int) -> None:
        """Never allocate this block again."""
        self.withheld.add(block)
        if block in self.free:
            self.free.remove(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """Pin these blocks while device work on them runs."""
        self.pins.update(set(blocks))

    def unpin(self, blocks: Iterable[int]) -> None:
        """Unpin these blocks after device work on them."""
        for block in set(blocks):
            self.pins[block] -= 1
            if self.pins[block] == 0 and block in self.parked:
                self.parked.discard(block)
                self._release(block)

    def _release(self, block: int) -> None:
        if block in self.withheld:
            return
        if block in self.key_of:
            self.unused[block] = None
        elif self.pins[block]:
            self.parked.add(block)
        else:
            self.free.append(block)

    def check(self) -> list[str]:
        """Check that every block is in exactly one place (rule 1)."""
        places = Counter([*self.free, *self.unused, *self.parked, *np.flatnonzero(self.refs).tolist()])
        idle_withheld = [block for block in self.withheld if not self.refs[block]]
        places.update(idle_withheld)
        wrong = {block: places[block] for block in range(self.count) if places[block] != 1}
        return [f"blocks in no place or in several: {wrong}"] if wrong else []
