"""Scrubs in flight: launched in the device's own order, answered later, waited for on no allocation's way.

G1 A block that is not read back is CLEAN from its launch on: the device orders its next writer behind the
   launch, so it reads as zero to all that may ever see it.
G2 A block that is read back stays DIRTY, and charged, until its answer; one that did not verify is
   quarantined and never handed out.
G3 A receipt is written when its launch has retired on the device, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.block_state import CLEAN, DIRTY, QUARANTINED, Blocks
from kvcustody.allocator.pool.memory_protocol import Memory, ScrubResult

if TYPE_CHECKING:
    from kvcustody.allocator.pool.pool import EndedRun, Pool, PoolPartition


class Launched(NamedTuple):
    """A scrub that the device was given: its number, and which of the blocks it will read back."""

    number: int
    read_back: NDArray[np.bool_]


@runtime_checkable
class StreamMemory(Memory, Protocol):
    """A memory whose scrubs are ordered on the device, and answered when they have retired."""

    def launch(self, shard: int, blocks: Blocks, verify_share: float) -> Launched:
        """Zero `blocks` on `shard` in stream order, behind every use so far; does not wait."""

    def answered(self, *, wait: bool) -> list[tuple[int, ScrubResult]]:
        """The launches that have retired, by number; with `wait`, all of them."""


class _Open:
    """One batch in flight: what it ends, the answers so far, and the blocks that wait for them."""

    __slots__ = ("answers", "batch", "held", "partition", "share")

    def __init__(
        self,
        partition: PoolPartition,
        share: float,
        batch: tuple[EndedRun, ...],
        held: Blocks,
        shards: Sequence[int],
    ) -> None:
        self.partition, self.share, self.batch, self.held = partition, share, batch, held
        self.answers: dict[int, ScrubResult | None] = dict.fromkeys(shards)


class Flight:
    """The scrubs of one pool that the device has not answered yet."""

    def __init__(self, pool: Pool, memory: StreamMemory) -> None:
        self._pool, self._memory = pool, memory
        self._open: list[_Open] = []
        self._of: dict[int, _Open] = {}
        self.waits = 0  # how often an allocation had to wait for an answer

    def __len__(self) -> int:
        return len(self._open)

    def held(self) -> list[Blocks]:
        """Blocks that are DIRTY until their read-back is answered."""
        return [open_.held for open_ in self._open]

    def begin(self, partition: PoolPartition, share: float, batch: list[EndedRun], blocks: Blocks) -> int:
        """Launch on every shard; returns how many blocks are CLEAN already (G1)."""
        launches = [self._memory.launch(shard, blocks, share) for shard in range(self._memory.shards)]
        read_back = np.logical_or.reduce([launched.read_back for launched in launches])
        _discharge(batch, ~read_back)
        open_ = _Open(partition, share, tuple(batch), blocks[read_back], [one.number for one in launches])
        self._open.append(open_)
        self._of.update(dict.fromkeys(open_.answers, open_))
        self._clean(partition, blocks[~read_back])
        return len(blocks) - len(open_.held)

    def collect(self, *, wait: bool = False) -> int:
        """Take in the answers; returns how many blocks became CLEAN by them."""
        if wait and self._open:
            self.waits += 1
        for number, result in self._memory.answered(wait=wait):
            open_ = self._of.pop(
                number, None
            )  # none: its launch failed on another shard, and is launched anew
            if open_ is not None:
                open_.answers[number] = result
        cleaned = 0
        while self._open and None not in self._open[0].answers.values():
            cleaned += self._finish(self._open.pop(0))
        return cleaned

    def _finish(self, open_: _Open) -> int:
        """Every shard has answered: receipts, and the blocks that were read back become CLEAN or QUARANTINED."""
        results = [result for result in open_.answers.values() if result is not None]
        for shard, result in enumerate(results):
            self._pool.receive(shard, result, open_.share, open_.batch)
        for custody in open_.batch:
            if custody.account is not None:
                held = int(np.count_nonzero(np.isin(custody.blocks, open_.held)))
                custody.account.charge(-held)
        failed = np.unique(np.concatenate([result.failed for result in results]))
        bad = open_.held[np.isin(open_.held, failed)]
        good = open_.held[~np.isin(open_.held, failed)]
        self._pool.move(bad, DIRTY, QUARANTINED)
        self._clean(open_.partition, good)
        return len(good)

    def _clean(self, partition: PoolPartition, blocks: Blocks) -> None:
        self._pool.move(blocks, DIRTY, CLEAN)
        self._pool.push_clean(partition, blocks)


def _discharge(batch: list[EndedRun], clean: NDArray[np.bool_]) -> None:
    """Blocks that are CLEAN by their launch are charged to nobody any more."""
    at = 0
    for custody in batch:
        to = at + len(custody.blocks)
        if custody.account is not None:
            custody.account.charge(-int(np.count_nonzero(clean[at:to])))
        at = to
