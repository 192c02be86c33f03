"""Everything on record and nothing left, on a device that is late: scrubs in stream order under a whole Governor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sqlalchemy import Engine

from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.clock import Clock
from kvcustody.kernels.segment import Layout, SegmentTable
from standins.device.fake_cuda import FakeCuda
from standins.robust.custody_world import SHARDS, SPEC, CustodyWorld


class LateMemory(StreamTensorMemory):
    """The engine writes on stream 0, later; what each first write finds is kept."""

    def __init__(self, blocks: int, clock: Clock, seed: int) -> None:
        self.streams = FakeCuda(seed)
        self.found: list[int] = []
        shards = [[torch.full(SPEC.shape(blocks), 7.0, dtype=SPEC.dtype)] for _ in range(SHARDS)]
        tables = [SegmentTable.from_tensors(one, layout=Layout.KV_BLOCKS) for one in shards]
        super().__init__(tables, clock=clock, streams=[self.streams] * SHARDS)

    def fill(self, blocks: np.ndarray, byte: int) -> None:
        """The step that writes fresh blocks: behind their scrubs, and ahead of the next ones."""
        listed = np.array(blocks)
        self.order_before()
        self.streams.run(0, lambda: self.found.append(self.nonzero_bytes(self._sound(listed))))
        self.streams.run(0, lambda: super(LateMemory, self).fill(listed, byte))
        self.used()

    def _sound(self, blocks: np.ndarray) -> np.ndarray:
        """Without those that the workload broke: a sample may not have read them."""
        return blocks[~np.isin(blocks, [block for _, block in self.stuck])]

    def answered(self, *, wait: bool) -> list:
        """The device comes along by some pieces of work between two questions."""
        for _ in range(60):
            self.streams.advance()
        return super().answered(wait=wait)


@pytest.fixture
def world(store: Engine, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CustodyWorld]:
    seed = request.param
    made = CustodyWorld(store, tmp_path, seed=seed, memory=lambda blocks, at: LateMemory(blocks, at, seed))
    yield made
    made.writer.close(5.0)


@pytest.mark.parametrize("world", range(1, 5), indirect=True)
def test_every_identity_holds_and_all_custody_is_covered(world: CustodyWorld) -> None:
    world.run(120)
    assert world.governor.check() == []
    assert world.broken() == set()
    world.run(80)
    assert world.broken() == set()
    assert world.governor.managers[0].pool.flight is not None
    world.close()
    memory = world.memory
    assert isinstance(memory, LateMemory)
    memory.streams.drain()
    assert len(memory.found) > 20 and set(memory.found) == {0}
    assert [item for item in world.identities() if item.difference] == []
    with world.engine.connect() as connection:
        found = coverage(connection).total
    assert found.missing == found.disputed == found.late == 0
    assert found.due > 100
    assert found.in_time + found.failed == found.due
    assert found.sampled_bytes and found.full_bytes
