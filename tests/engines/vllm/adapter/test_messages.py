"""What travels between the scheduler's side and the workers arrives as it left."""

from __future__ import annotations

import pickle

import numpy as np

from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.integrations.vllm.step_messages import StepOrder


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


def test_idleness_travels_with_and_without_scrubs() -> None:
    order = ScrubOrder(1, ((1.0, np.array([2], dtype=np.int64)),))
    assert not pickle.loads(pickle.dumps(StepOrder(3, order, must_follow=False))).must_follow
    assert not pickle.loads(pickle.dumps(StepOrder(3, must_follow=False))).must_follow
    for sent in (StepOrder(3, is_idle=True), StepOrder(3, order, is_idle=True)):
        assert pickle.loads(pickle.dumps(sent)).is_idle
    assert not pickle.loads(pickle.dumps(StepOrder(3, order))).is_idle
