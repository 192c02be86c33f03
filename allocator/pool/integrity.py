"""A pool's knowledge of its blocks' contents: a checksum from publication, compared before an attach.

`SumBooks` is what any pool notes of that. `BlockSums` are those of a pool that reads its memory itself:

    sums = pool.keep_sums()                  # from now on; without a memory that has bytes there is nothing to sum
    sums.record(blocks)                      # published: each is whole, and computed
    bad = sums.differing(blocks, shares)     # of those that were drawn, the ones that changed since

- A checksum is of one (block, generation): what is handed out anew has none.
- Which blocks are compared is drawn one by one with the operating system's randomness; a share of 1 compares all.
- A block that has changed under its holders is read back in full at every later scrub. One that does so a second time
  is withheld there: it is quarantined like a block that did not become zero, whatever its read-back shows.
- It finds corruption, and is no defence against somebody who writes to the device (`kernels.checksum`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.memory_protocol import Memory, ScrubResult

WITHHELD_AT = 2  # from here on a block is withheld


@runtime_checkable
class SummedMemory(Memory, Protocol):
    """A memory that can checksum blocks in place and stores the sums."""

    def keep_sums(self) -> None:
        """Allocate a checksum for every block and compile the kernels; calling it again does nothing."""

    def record_sums(self, blocks: Blocks) -> None:
        """Sum `blocks` on every shard, after the work of the current stream; does not wait."""

    def differing(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Return by block whether its sum differs from the recorded one on any shard. Waits for the answer."""


class MismatchedBlocks(NamedTuple):
    """Blocks whose content changed after publication: evidence for governance to write.

    `requests`: running ones that refer to them, and go on.
    """

    domain: Domain
    blocks: Blocks
    generations: NDArray[np.int64]
    requests: int
    at_us: int


class SumBooks:
    """Which blocks have a checksum, and which had changed. `generation` is the pool's own array."""

    def __init__(self, generation: NDArray[np.int64]) -> None:
        self._generation = generation
        self._summed: NDArray[np.int64] = np.full(len(generation), -1, dtype=np.int64)
        self._random = np.random.default_rng()  # seeded by the operating system
        self._strikes: dict[int, int] = {}
        self.found: list[MismatchedBlocks] = []
        self.summed_blocks = 0
        self.checked_blocks = 0
        self.mismatched_blocks = 0

    def note_sums(self, blocks: Blocks) -> None:
        """Record that `blocks` have a checksum of their present generation."""
        self._summed[blocks] = self._generation[blocks]
        self.summed_blocks += len(blocks)

    def missing(self, blocks: Blocks) -> Blocks:
        """Return the blocks without a checksum of their present generation."""
        found: Blocks = blocks[self._summed[blocks] != self._generation[blocks]]
        return found

    def draw(self, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Draw the blocks to compare, each with its probability in `shares`."""
        drawn: NDArray[np.bool_] = shares >= 1.0
        if not drawn.all():
            drawn |= self._random.random(len(shares)) < shares
        return drawn

    def strike(self, blocks: Blocks) -> None:
        """Record that these blocks had changed."""
        self.mismatched_blocks += len(blocks)
        for block in blocks.tolist():
            self._strikes[block] = self._strikes.get(block, 0) + 1

    def is_suspect(self, blocks: Blocks) -> bool:
        """Return whether any of `blocks` had ever changed."""
        return bool(self._strikes) and not self._strikes.keys().isdisjoint(blocks.tolist())

    def withheld(self, blocks: Blocks) -> list[int]:
        """Return those of `blocks` that had changed too often to be handed out again."""
        strikes = self._strikes
        return [block for block in blocks.tolist() if strikes.get(block, 0) >= WITHHELD_AT] if strikes else []

    def withhold(self, result: ScrubResult, blocks: Blocks) -> ScrubResult:
        """Return the result of a scrub of `blocks` in which blocks that had changed too often fail."""
        withheld = self.withheld(blocks)
        if not withheld:
            return result
        return result._replace(failed=np.union1d(result.failed, np.array(withheld, dtype=np.int64)))


class BlockSums(SumBooks):
    """The checksums of one pool over `memory`."""

    def __init__(self, memory: SummedMemory, generation: NDArray[np.int64]) -> None:
        super().__init__(generation)
        memory.keep_sums()
        self._memory = memory

    def record(self, blocks: Blocks) -> None:
        """Sum `blocks`, in one launch for each shard."""
        self._memory.record_sums(blocks)
        self.note_sums(blocks)

    def differing(self, blocks: Blocks, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return by block whether it was drawn, with its probability in `shares`, and differs from its published
        content.

        One that ought to have a checksum and has none counts as changed: nobody can say that it has not.
        """
        places = np.flatnonzero(self.draw(shares))
        bad: NDArray[np.bool_] = np.zeros(len(blocks), dtype=np.bool_)
        if not len(places):
            return bad
        chosen = blocks[places]
        self.checked_blocks += len(chosen)
        bad[places] = self._memory.differing(chosen) | (self._summed[chosen] != self._generation[chosen])
        return bad
