"""Ended custodies of an external pool on their way to CLEAN: waiting for fences, ordered, answered by every shard.

    queue.add(run)                              # ended; it waits for its fence
    queue.reclaim(fences, now_us)               # fences have retired
    order = queue.order()                       # what the coming step must zero first
    queue.answer(order.number, shard, results)  # one shard's receipts

- Every ended custody is ordered exactly once, and is done only with every shard's answer.
- An answer to an order that does not exist, or a second one of a shard, raises: a lost or doubled receipt is seen.
- A fence past its bound does not hold a scrub back for good here: the engine's stream orders it, and `stuck` says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import EndedRun
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.fence import Fences
from kvcustody.allocator.pool.integrity import SumBooks
from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS, ScrubResult
from kvcustody.allocator.pool.records import Scrubbed
from kvcustody.errors import HandleError


class ScrubOrder(NamedTuple):
    """Zero these blocks before any other write of the step: (share to read back, block indices), each with one
    answer.
    """

    number: int
    batches: tuple[tuple[float, Blocks], ...]

    @property
    def blocks(self) -> int:
        """The number of blocks in the order."""
        return sum(len(blocks) for _, blocks in self.batches)


class _Open:
    """An order on its way: its custodies by batch, and the shards that have yet to answer."""

    __slots__ = ("blocks", "custodies", "failed", "generations", "shares", "waiting")

    def __init__(
        self,
        shares: list[float],
        custodies: list[tuple[EndedRun, ...]],
        blocks: Blocks,
        generations: NDArray[np.int64],
        shards: int,
    ) -> None:
        self.shares = shares
        self.custodies = custodies
        self.blocks = blocks
        self.generations = generations
        self.waiting = set(range(shards))
        self.failed: list[Blocks] = []


class ScrubQueue:
    """Custodies that ended and whose blocks are not CLEAN yet."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.ended: list[EndedRun] = []  # evidence of ends, for governance to write
        self.device_blocks = [0] * shards  # as each shard's device counted them, last told
        self.repeats = 0  # custodies that share a block of one order: zeroed once for both
        self.may_repeat = False  # a block that was not CLEAN yet was handed out: it may end again before the order
        self.sums: SumBooks | None = None  # where blocks are compared: what was found changed is read back in full
        self._fenced: deque[EndedRun] = deque()
        self._dirty: list[EndedRun] = []
        self._orders: dict[int, _Open] = {}
        self._last = 0
        self._evidence: list[Scrubbed] = []

    def add_boot(self, blocks: Blocks) -> None:
        """Add memory that was never in custody: the first order zeroes all of it, read back in full."""
        self._dirty.append(EndedRun(blocks, np.zeros(len(blocks), dtype=np.int64), None, None, "boot", 0, 0, 0))

    def add(self, custody: EndedRun) -> None:
        """Add a custody that ended; it waits for its fence, if it has one."""
        self._fenced.append(custody)

    def release_fence(self, blocks: Blocks, now_us: int) -> None:
        """Stop waiting for fences of `blocks` that the engine has already handed out again; this step orders their
        scrub.
        """
        waiting: deque[EndedRun] = deque()
        for custody in self._fenced:
            if custody.fence and (taken := np.isin(custody.blocks, blocks)).any():
                again = _part(custody, taken)
                again.fence, again.retired_us = 0, now_us
                waiting.append(again)
                if not taken.all():
                    waiting.append(_part(custody, ~taken))
            else:
                waiting.append(custody)
        self._fenced = waiting

    def reclaim(self, fences: Fences, now_us: int) -> None:
        """Move custodies whose fences have retired into the next order."""
        oldest = fences.oldest_open
        waiting: deque[EndedRun] = deque()
        ready: list[EndedRun] = []
        for custody in self._fenced:
            if custody.fence < oldest:
                if custody.fence:
                    custody.retired_us = now_us
                ready.append(custody)
            else:
                waiting.append(custody)
        self._fenced = waiting
        self._dirty += ready
        self.ended += ready

    def order(self) -> ScrubOrder | None:
        """Order everything DIRTY: one batch for each verify share, and one for each owner if the share is sampled."""
        if not self._dirty:
            return None
        dirty, self._dirty = self._dirty, []
        batches: dict[tuple[float, object], list[EndedRun]] = {}
        for custody in dirty:
            share = custody.domain.verify_share if custody.domain is not None else 1.0
            if self.sums is not None and self.sums.is_suspect(custody.blocks):
                share = 1.0
            owner = custody.account if 0.0 < share < 1.0 else None
            batches.setdefault((share, owner), []).append(custody)
        lists = [_joined([custody.blocks for custody in batch]) for batch in batches.values()]
        blocks = _joined(lists)
        generations = _joined([custody.generations for batch in batches.values() for custody in batch])
        if self.may_repeat:
            lists = [np.unique(each) for each in lists]
            self.repeats += len(blocks) - sum(map(len, lists))
            self.may_repeat = False
        self._last += 1
        shares = [share for share, _ in batches]
        self._orders[self._last] = _Open(
            shares, [tuple(batch) for batch in batches.values()], blocks, generations, self.shards
        )
        return ScrubOrder(self._last, tuple(zip(shares, lists, strict=True)))

    def withdraw(self, order: ScrubOrder) -> None:
        """Put the blocks of an order that was never sent into the next one. Raises `HandleError` if it was answered."""
        open_ = self._orders.pop(order.number, None)
        if open_ is None or len(open_.waiting) != self.shards:
            raise HandleError(f"scrub order `{order.number}` was answered already", order=order.number)
        self._dirty = [custody for batch in open_.custodies for custody in batch] + self._dirty
        self.may_repeat = True

    def answer(
        self, number: int, shard: int, results: Sequence[ScrubResult]
    ) -> tuple[tuple[Blocks, NDArray[np.int64]] | None, Blocks]:
        """Take one shard's results for an order, one for each batch.

        Returns the blocks and generations that are done, with the last shard's answer, and what failed.
        """
        order = self._orders.get(number)
        if order is None or shard not in order.waiting:
            raise HandleError(f"shard `{shard}` has no scrub order `{number}` to answer", order=number, shard=shard)
        if len(results) != len(order.custodies):
            raise HandleError(
                f"order `{number}` has `{len(order.custodies)}` batches, shard `{shard}` answers `{len(results)}`",
                order=number,
            )
        order.waiting.discard(shard)
        for share, custodies, each in zip(order.shares, order.custodies, results, strict=True):
            result = each
            if self.sums is not None:
                result = self.sums.withhold(each, _joined([custody.blocks for custody in custodies]))
            self._evidence.append(Scrubbed(shard, result, share, custodies))
            if len(result.failed):
                order.failed.append(result.failed)
        if order.waiting:
            return None, NO_BLOCKS
        del self._orders[number]
        if not order.failed:
            return (order.blocks, order.generations), NO_BLOCKS
        failed = np.unique(np.concatenate(order.failed))
        fine = ~np.isin(order.blocks, failed)
        return (order.blocks[fine], order.generations[fine]), failed

    def take_scrubbed(self) -> list[Scrubbed]:
        """Return the evidence since the last call."""
        evidence, self._evidence = self._evidence, []
        return evidence

    def take_ended(self) -> list[EndedRun]:
        """Return the ends since the last call."""
        ended, self.ended = self.ended, []
        return ended

    @property
    def has_dirty(self) -> bool:
        """Whether any custody waits to be ordered."""
        return bool(self._dirty)

    @property
    def has_work(self) -> bool:
        """Whether any custody waits for its fence, or to be ordered."""
        return bool(self._dirty or self._fenced)

    @property
    def has_fenced(self) -> bool:
        """Whether any custody waits for its fence."""
        return bool(self._fenced)

    def pending_blocks(self) -> int:
        """Return the number of blocks whose end is on record and that are not CLEAN yet."""
        waiting = [custody for custody in self._dirty if custody.domain is not None]
        for order in self._orders.values():
            waiting += [custody for batch in order.custodies for custody in batch if custody.domain is not None]
        return sum(len(custody.blocks) for custody in waiting)

    def fenced(self) -> list[tuple[Blocks, NDArray[np.int64]]]:
        """Return the blocks that wait for a fence, with their generations."""
        return [(custody.blocks, custody.generations) for custody in self._fenced]

    def fenced_blocks(self) -> int:
        """Return the number of blocks that ended and wait for a fence; their end is not on record yet."""
        return sum(len(custody.blocks) for custody in self._fenced)

    def custodies(self) -> list[EndedRun]:
        """Return every custody that is not CLEAN yet, for scans."""
        ordered = [custody for order in self._orders.values() for batch in order.custodies for custody in batch]
        return [*self._fenced, *self._dirty, *ordered]


def _part(custody: EndedRun, chosen: NDArray[np.bool_]) -> EndedRun:
    """Return the chosen blocks of a custody, as a custody of their own."""
    return EndedRun(
        custody.blocks[chosen],
        custody.generations[chosen],
        custody.account,
        custody.domain,
        custody.cause,
        custody.due_us,
        custody.ended_us,
        custody.fence,
        custody.ceiling_us,
    )


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
