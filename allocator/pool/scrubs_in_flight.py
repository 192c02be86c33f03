"""Scrubs in flight: launched in the device's own order and answered later, without any allocation waiting for them.

The pool launches a batch and learns which of its blocks will be read back; later it asks which batches have retired.
Every move of a block's state is the pool's.

- A block that is not read back is CLEAN from its launch on. The device orders its next writer behind the launch, so it
  reads as zero to everything that may ever see it.
- A block that is read back stays DIRTY, and charged, until its answer; one that did not verify is quarantined and never
  handed out.
- A receipt is written when its launch has retired on the device, never before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import EndedRun, PoolPartition
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.memory_protocol import Memory, ScrubResult


class Launched(NamedTuple):
    """A scrub given to the device: its number, and the blocks that it will read back."""

    number: int
    read_back: NDArray[np.bool_]


@runtime_checkable
class StreamMemory(Memory, Protocol):
    """A memory whose scrubs are ordered on the device and answered when they have retired."""

    def launch(self, shard: int, blocks: Blocks, verify_share: float) -> Launched:
        """Zero `blocks` on `shard` in stream order, after every use so far; does not wait."""

    def hand_out(self, blocks: Blocks) -> None:
        """Order later writes of handed-out `blocks` after the scrubs that zero them."""

    def answered(self, *, wait: bool) -> list[tuple[int, ScrubResult]]:
        """Return the launches that have retired, by number; with `wait`, all of them."""


class ScrubInFlight:
    """One batch in flight: the runs it ends, the answers so far, and the blocks that wait for them."""

    __slots__ = ("answers", "batch", "held", "partition", "share")

    def __init__(
        self,
        partition: PoolPartition,
        share: float,
        batch: tuple[EndedRun, ...],
        held: Blocks,
        launches: Sequence[int],
    ) -> None:
        self.partition, self.share, self.batch, self.held = partition, share, batch, held
        self.answers: dict[int, ScrubResult | None] = dict.fromkeys(launches)

    def results(self) -> list[ScrubResult]:
        """Return the answers so far, by shard."""
        return [result for result in self.answers.values() if result is not None]


class ScrubsInFlight:
    """The scrubs of one pool that the device has not answered yet."""

    def __init__(self, memory: StreamMemory) -> None:
        self._memory = memory
        self._open: list[ScrubInFlight] = []
        self._by_launch: dict[int, ScrubInFlight] = {}
        self.waits = 0  # how often an allocation had to wait for an answer

    def __len__(self) -> int:
        return len(self._open)

    def hand_out(self, blocks: Blocks) -> None:
        """Hand blocks out, some of which may only be CLEAN after a launch that has not retired."""
        if self._open:
            self._memory.hand_out(blocks)

    def held(self) -> list[Blocks]:
        """Return the blocks that stay DIRTY until their read-back is answered."""
        return [scrub.held for scrub in self._open]

    def launch(
        self, partition: PoolPartition, share: float, batch: list[EndedRun], blocks: Blocks
    ) -> NDArray[np.bool_]:
        """Launch on every shard; return which of `blocks` will be read back. The others are zero for every reader."""
        launches = [self._memory.launch(shard, blocks, share) for shard in range(self._memory.shards)]
        read_back: NDArray[np.bool_] = np.logical_or.reduce([launched.read_back for launched in launches])
        scrub = ScrubInFlight(partition, share, tuple(batch), blocks[read_back], [one.number for one in launches])
        self._open.append(scrub)
        self._by_launch.update(dict.fromkeys(scrub.answers, scrub))
        return read_back

    def retired(self, *, wait: bool = False) -> Iterator[ScrubInFlight]:
        """Take the answers; return the batches that every shard has answered, in launch order."""
        if wait and self._open:
            self.waits += 1
        for number, result in self._memory.answered(wait=wait):
            # None: its launch failed on another shard, and is launched anew.
            scrub = self._by_launch.pop(number, None)
            if scrub is not None:
                scrub.answers[number] = result
        while self._open and None not in self._open[0].answers.values():
            yield self._open.pop(0)
