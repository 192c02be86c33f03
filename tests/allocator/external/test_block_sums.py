"""Checksums of an engine's pool: the orders to its workers, and the meaning of their answers."""

from __future__ import annotations

import numpy as np
import pytest

from kvcustody.allocator.external.block_sums import FRESH_US, Comparison, ExternalSums
from kvcustody.allocator.pool.block_state import CACHED, DIRTY
from kvcustody.errors import HandleError

BLOCKS, NOW_US = 16, 1_000


class Books:
    """Blocks that are CACHED, each of a generation of its own."""

    def __init__(self, shards: int = 1) -> None:
        self.generation = np.arange(1, BLOCKS + 1)
        self.state = np.full(BLOCKS, CACHED, dtype=np.uint8)
        self.sums = ExternalSums(self.generation, self.state, shards)

    def summed(self, *blocks: int) -> Books:
        """These have a checksum on every shard."""
        self.sums.publish(np.array(blocks))
        self.sums.settle()
        assert self.sums.order().record.tolist() == sorted(blocks)
        return self

    def ask(self, *blocks: int, owed: bool = True, share: float = 1.0) -> Comparison:
        """Return the comparison of a look-up that would read these blocks."""
        which = np.array(blocks)
        return self.sums.ask(which, np.full(len(which), owed), np.full(len(which), share), NOW_US)

    def hand_out(self, block: int) -> None:
        """It ended, and is somebody else's."""
        self.generation[block] = self.generation.max() + 1


def empty() -> np.ndarray:
    """No block differs."""
    return np.empty(0, dtype=np.int64)


def test_a_block_is_summed_when_the_step_that_fills_it_has_left() -> None:
    books = Books()
    books.sums.publish(np.array([3, 4]))
    assert books.sums.order() is None, "the step that leaves now fills them"
    assert books.sums.has_work
    books.sums.settle()
    order = books.sums.order()
    assert (order.record.tolist(), order.compare.tolist()) == ([3, 4], [])
    assert not books.sums.has_work and books.sums.order() is None
    assert books.sums.summed_blocks == 2


def test_what_ended_before_its_order_left_is_neither_summed_nor_compared() -> None:
    books = Books().summed(1, 2, 5)
    books.sums.publish(np.array([3, 4, 6]))
    books.sums.settle()
    books.hand_out(3)
    books.state[4] = DIRTY
    asked = books.ask(1, 2, 5)
    books.hand_out(2)
    books.hand_out(6)
    books.sums.publish(np.array([6]))  # the coming step fills it again
    order = books.sums.order()
    assert (order.record.tolist(), order.compare.tolist()) == ([], [1, 5])
    books.sums.answer(order.number, 0, empty(), NOW_US)
    assert asked.may_read(np.array([1, 2, 5])).tolist() == [True, False, True]


def test_without_a_checksum_a_block_is_whole_only_while_it_awaits_one_or_owes_none() -> None:
    books = Books().summed(1)
    books.sums.publish(np.array([2]))
    assert books.ask(2, 3).may_read(np.array([2, 3])).tolist() == [True, False]
    assert books.ask(2, 3, owed=False).is_answered
    assert books.ask(2, 3, owed=False).may_read(np.array([2, 3])).tolist() == [True, True]
    assert books.ask(1, share=0.0).is_answered, "not drawn"
    assert not books.ask(1).is_answered


def test_every_shard_must_answer_and_one_that_differs_is_enough() -> None:
    books = Books(shards=2).summed(1, 2, 3)
    asked = books.ask(1, 2, 3)
    number = books.sums.order().number
    assert books.sums.answer(number, 1, np.array([2]), NOW_US).tolist() == []
    assert not asked.is_answered and books.sums.checked_blocks == 0
    with pytest.raises(HandleError, match="shard `1` has no comparison"):
        books.sums.answer(number, 1, empty(), NOW_US)
    assert books.sums.answer(number, 0, empty(), NOW_US).tolist() == [2]
    assert asked.is_answered and asked.until_us == NOW_US + FRESH_US
    assert asked.may_read(np.array([1, 2, 3, 4])).tolist() == [True, False, True, False]
    assert (books.sums.checked_blocks, asked.compared(np.array([1, 3, 4]))) == (3, 2)
    with pytest.raises(HandleError, match="no comparison"):
        books.sums.answer(number, 0, empty(), NOW_US)


def test_an_answer_is_of_the_generation_that_was_asked_about() -> None:
    books = Books().summed(1, 2)
    asked = books.ask(1, 2)
    number = books.sums.order().number
    books.hand_out(1)
    books.hand_out(2)
    assert books.sums.answer(number, 0, np.array([1]), NOW_US).tolist() == [], "it ended meanwhile"
    assert not asked.may_read(np.array([1, 2])).any()


def test_one_order_answers_all_who_asked_for_a_block() -> None:
    books = Books().summed(1, 2, 3)
    first, second = books.ask(1, 2), books.ask(2, 3)
    order = books.sums.order()
    assert order.compare.tolist() == [1, 2, 3]
    books.sums.answer(order.number, 0, np.array([2]), NOW_US)
    assert first.may_read(np.array([1, 2])).tolist() == [True, False]
    assert second.may_read(np.array([2, 3])).tolist() == [False, True]


def test_it_is_drawn_block_by_block() -> None:
    """2,000 draws of 1/4: fewer than 350 or more than 650 come once in 10^12 runs."""
    books = Books().summed(*range(10))
    drawn = sum(int(books.ask(*range(10), share=0.25).drawn.sum()) for _ in range(200))
    assert 350 < drawn < 650
