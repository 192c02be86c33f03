"""Checksums of a pool whose bytes lie in an engine's workers: orders to sum and compare, and the answers.

    sums.publish(blocks)                       # whole; computed by a step that has not begun, or has left
    sums.settle()                              # everything published so far is computed by steps that have left
    asked = sums.ask(blocks, owed, shares)     # before an attach: a request waits until `asked.is_answered`
    order = sums.order()                       # leaves with the coming step, done before anything that it writes
    bad = sums.answer(order.number, shard, differing, now_us)   # the blocks that had changed, with the last shard

- A block is summed at the beginning of the first step after the one that filled it. Until that order leaves there is
  nothing to compare it with, and it counts as whole: the step that reads it follows the one that wrote it.
- One of a domain that asks for checksums which has none and awaits none counts as changed.
- An answer is of one (block, generation), and holds for `FRESH_US`.
- An answer to an order that does not exist, or a second one of a shard, raises.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, Blocks
from kvcustody.allocator.pool.integrity import SumBooks
from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS
from kvcustody.errors import HandleError

FRESH_US = 1_000_000  # a request that was answered may wait for room meanwhile


class SumOrder(NamedTuple):
    """Sum `record` and compare `compare` before anything else is written. Every shard answers if `compare` is not
    empty.
    """

    number: int
    record: Blocks
    compare: Blocks


class Comparison:
    """The blocks that one look-up would read, and whether their content is what was published."""

    __slots__ = ("_books", "blocks", "drawn", "fine", "generations", "is_answered", "until_us")

    def __init__(
        self,
        books: ExternalSums,
        blocks: Blocks,
        generations: NDArray[np.int64],
        fine: NDArray[np.bool_],
        drawn: NDArray[np.bool_],
    ) -> None:
        self._books = books
        self.blocks = blocks
        self.generations = generations
        self.fine = fine
        self.drawn = drawn
        self.is_answered = False
        self.until_us = 0

    def may_read(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Return by block whether it was asked about, has the same custody, and has its published content."""
        good = self.blocks[self.fine & self._books.are_still(self.blocks, self.generations)]
        return np.isin(blocks, good)

    def compared(self, blocks: Blocks) -> int:
        """Return how many of `blocks` were actually read again."""
        return int(np.isin(blocks, self.blocks[self.drawn]).sum())


class _Published(NamedTuple):
    """Blocks as they were, by generation."""

    blocks: Blocks
    generations: NDArray[np.int64]


class _Open:
    """An order on its way: who asked, and the shards that have yet to answer."""

    __slots__ = ("asked", "blocks", "differing", "generations", "waiting")

    def __init__(self, asked: list[Comparison], blocks: Blocks, generations: NDArray[np.int64], shards: int) -> None:
        self.asked = asked
        self.blocks = blocks
        self.generations = generations
        self.waiting = set(range(shards))
        self.differing: list[Blocks] = []


class ExternalSums(SumBooks):
    """The checksums of one engine's pool. `generation` and `state` are the pool's own arrays."""

    def __init__(self, generation: NDArray[np.int64], state: NDArray[np.uint8], shards: int) -> None:
        super().__init__(generation)
        self._state = state
        self._shards = shards
        self._queued: NDArray[np.int64] = np.full(len(generation), -1, dtype=np.int64)  # will be summed
        self._fresh: list[_Published] = []
        self._settled: list[_Published] = []
        self._asked: list[Comparison] = []
        self._orders: dict[int, _Open] = {}
        self._last = 0

    def publish(self, blocks: Blocks) -> None:
        """Queue these blocks to be summed once the step that fills them has been sent."""
        if not len(blocks):
            return
        generations = self._generation[blocks]
        self._queued[blocks] = generations
        self._fresh.append(_Published(blocks, generations))

    def settle(self) -> None:
        """Mark everything published so far as filled by steps that were sent, so that the next order may sum it."""
        if self._fresh:
            self._settled += self._fresh
            self._fresh = []

    def ask(self, blocks: Blocks, owed: NDArray[np.bool_], shares: NDArray[np.float64], now_us: int) -> Comparison:
        """Draw the blocks to compare before a look-up reads `blocks`. `owed`: their own domains ask for checksums."""
        generations = self._generation[blocks]
        summed = self._summed[blocks] == generations
        fine = summed | ~owed | (self._queued[blocks] == generations)
        asked = Comparison(self, blocks, generations, fine, self.draw(shares) & summed)
        if asked.drawn.any():
            self._asked.append(asked)
        else:
            asked.is_answered, asked.until_us = True, now_us + FRESH_US
        return asked

    def order(self) -> SumOrder | None:
        """Return the checksum work of the coming step, which must be sent with it."""
        if not self._settled and not self._asked:
            return None
        settled, self._settled = self._settled, []
        record = self._live(settled)
        self.note_sums(record)
        comparisons, self._asked = self._asked, []
        compare = self._live([_Published(one.blocks[one.drawn], one.generations[one.drawn]) for one in comparisons])
        self._last += 1
        if len(compare):
            self._orders[self._last] = _Open(comparisons, compare, self._generation[compare], self._shards)
        else:
            self._settle_answers(comparisons, NO_BLOCKS, 0)
        return SumOrder(self._last, record, compare) if len(record) or len(compare) else None

    def answer(self, number: int, shard: int, differing: Blocks, now_us: int) -> Blocks:
        """Take one shard's answer; with the last one, return the blocks that are still live and have changed."""
        order = self._orders.get(number)
        if order is None or shard not in order.waiting:
            raise HandleError(f"shard `{shard}` has no comparison `{number}` to answer", order=number, shard=shard)
        order.waiting.discard(shard)
        order.differing.append(differing)
        if order.waiting:
            return NO_BLOCKS
        del self._orders[number]
        self.checked_blocks += len(order.blocks)
        bad = np.unique(np.concatenate(order.differing))
        self._settle_answers(order.asked, bad, now_us + FRESH_US)
        chosen = np.isin(order.blocks, bad)
        blocks = order.blocks[chosen]
        return blocks[self._are_live(blocks, order.generations[chosen])]

    def _settle_answers(self, asked: list[Comparison], bad: Blocks, until_us: int) -> None:
        for one in asked:
            one.fine &= ~np.isin(one.blocks, bad)
            one.is_answered, one.until_us = True, until_us

    @property
    def has_work(self) -> bool:
        """Whether any checksum work waits to be ordered."""
        return bool(self._settled or self._fresh or self._asked)

    def are_still(self, blocks: Blocks, generations: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return by block whether it still has the given generation."""
        same: NDArray[np.bool_] = self._generation[blocks] == generations
        return same

    def _live(self, parts: list[_Published]) -> Blocks:
        """Those that are in custody still, each once."""
        if not parts:
            return NO_BLOCKS
        blocks, generations = (np.concatenate(each) for each in zip(*parts, strict=True))
        return np.unique(blocks[self._are_live(blocks, generations)])

    def _are_live(self, blocks: Blocks, generations: NDArray[np.int64]) -> NDArray[np.bool_]:
        states = self._state[blocks]
        live: NDArray[np.bool_] = (states == ACTIVE) | (states == CACHED)
        return live & self.are_still(blocks, generations)
