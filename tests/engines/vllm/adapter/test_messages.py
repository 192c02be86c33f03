"""What travels between the scheduler's side and the workers arrives as it left."""

from __future__ import annotations

import pickle

import numpy as np

from kvcustody.allocator.external.block_sums import SumOrder
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.integrations.vllm.step_messages import StepOrder, StepReceipt, SumReply


def test_an_order_arrives_whole() -> None:
    batches = ((0.5, np.arange(100, dtype=np.int64)), (1.0, np.array([7], dtype=np.int64)))
    there = pickle.loads(pickle.dumps(StepOrder(5, ScrubOrder(3, batches))))
    assert (there.step, there.order.number, there.order.blocks) == (5, 3, 101)
    for (share, blocks), (expected_share, expected) in zip(there.order.batches, batches, strict=True):
        assert share == expected_share
        assert blocks.dtype == np.int64
        assert np.array_equal(blocks, expected)
        blocks[:1] = 0  # a worker may hand it to a kernel that wants memory of its own


def test_a_step_without_scrubs() -> None:
    assert pickle.loads(pickle.dumps(StepOrder(9))) == StepOrder(9)


def test_sums_travel_with_and_without_scrubs() -> None:
    order = ScrubOrder(1, ((1.0, np.array([2], dtype=np.int64)),))
    sums = SumOrder(7, np.arange(3, dtype=np.int64), np.array([9], dtype=np.int64))
    for sent in (StepOrder(3, sums=sums), StepOrder(3, order, sums=sums)):
        there = pickle.loads(pickle.dumps(sent)).sums
        assert (there.number, there.record.tolist(), there.compare.tolist()) == (7, [0, 1, 2], [9])
        there.record[:1] = 5


def test_of_two_workers_all_that_differs_arrives() -> None:
    first, second = (
        StepReceipt(3, compared=[SumReply(7, 0, [])]),
        StepReceipt(3, compared=[SumReply(7, 1, [9])]),
    )
    assert [one.differing for one in first.aggregate(second).compared] == [[], [9]]


def test_idleness_travels_with_and_without_scrubs() -> None:
    order = ScrubOrder(1, ((1.0, np.array([2], dtype=np.int64)),))
    assert not pickle.loads(pickle.dumps(StepOrder(3, order, must_follow=False))).must_follow
    assert not pickle.loads(pickle.dumps(StepOrder(3, must_follow=False))).must_follow
    for sent in (StepOrder(3, is_idle=True), StepOrder(3, order, is_idle=True)):
        assert pickle.loads(pickle.dumps(sent)).is_idle
    assert not pickle.loads(pickle.dumps(StepOrder(3, order))).is_idle
