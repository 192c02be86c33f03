"""Several batches zeroed as one: each has its own result, and a remaining byte only fails its own batch."""

from __future__ import annotations

import numpy as np
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.kernels.host import HostRows


def _memory() -> TensorMemory:
    return TensorMemory.wrap([[torch.ones(16, 1, 2, 8) for _ in range(2)]], layout="blocks")


def _batches(*blocks: list[int]) -> list[tuple[float, np.ndarray]]:
    return [(1.0, np.array(each, dtype=np.int64)) for each in blocks]


def test_all_of_it_is_zero_and_nothing_else():
    memory = _memory()
    results = memory.scrub_each(0, _batches([3, 1], [7]))
    assert [one.verified for one in results] == [2, 1]
    assert [one.bytes for one in results] == [2 * memory.bytes_per_block, memory.bytes_per_block]
    assert memory.nonzero_bytes(np.array([1, 3, 7])) == 0
    assert memory.nonzero_bytes(np.array([0, 2, 4])) > 0
    assert memory.scrubbed(0) == 3


def test_what_stays_is_named_in_its_own_batch(monkeypatch):
    memory, zero = _memory(), HostRows.zero
    monkeypatch.setattr(HostRows, "zero", lambda rows, blocks: zero(rows, blocks[blocks != 7]))
    first, second = memory.scrub_each(0, _batches([3, 1], [7, 8]))
    assert not len(first.failed)
    assert second.failed.tolist() == [7]


def test_a_block_of_two_batches_is_zeroed_for_both():
    memory = _memory()
    results = memory.scrub_each(0, _batches([3, 1], [3]))
    assert [len(one.failed) for one in results] == [0, 0]
    assert memory.scrubbed(0) == 3
