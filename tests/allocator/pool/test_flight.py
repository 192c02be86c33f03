"""A pool whose scrubs run on a separate device stream, in any interleaving (G1 G2 G3 of flight, M1 M2 M3, L2)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcustody.allocator.pool.block_state import DIRTY, QUARANTINED
from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.clock import VirtualClock
from kvcustody.kernels.segment import SegmentTable
from standins.allocator.world import SECOND, World, run
from standins.device.fake_cuda import FakeCuda

BLOCKS = 24


class Engine:
    """A World over stream memory, and a model runner that writes later, on its own stream."""

    def __init__(self, seed=0, *, verify=0.0, ordered=True, shards=1):
        self.shards = [[torch.full((BLOCKS, 32), 0xFF, dtype=torch.uint8)] for _ in range(shards)]
        self.streams = FakeCuda(seed)
        tables = [SegmentTable.from_tensors(one) for one in self.shards]
        self.memory = StreamTensorMemory(tables, clock=VirtualClock(), streams=[self.streams] * shards)
        self.world = World(BLOCKS, ("a", "b"), memory=self.memory, domain={"verify_share": verify})
        self.ordered = ordered
        self.found: list[int] = []

    def serve(self, tenant, tokens):
        """Admit, write every fresh block, and compute the prompt; None where it was deferred."""
        sequence = self.world.admit(tenant, tokens)
        if not isinstance(sequence, RunningSequence):
            return None
        fresh = sequence.table[sequence.hit_blocks : sequence.block_count].tolist()
        if self.ordered:
            self.memory.order_before()
        self.streams.run(0, lambda: self._first_write(fresh))
        self.memory.used()
        self.world.m.commit(sequence, len(tokens), self.world.now)
        return sequence

    def _first_write(self, blocks):
        for (tensor,) in self.shards:
            self.found.append(int(torch.count_nonzero(tensor[blocks])))
            tensor[blocks] = 0xAB

    def live(self, generator, requests=60):
        """Run requests while the device lags behind by a random amount."""
        running = []
        for number in range(requests):
            tenant = "ab"[int(generator.integers(2))]
            sequence = self.serve(tenant, run(number, int(generator.integers(1, 6))))
            running += [sequence] if sequence is not None else []
            while len(running) > 2:
                self.world.m.release(running.pop(0), self.world.now, "finished")
            for _ in range(int(generator.integers(0, 9))):
                self.streams.advance()
            self.world.wait(SECOND)
            self.world.ok()
        for sequence in running:
            self.world.m.release(sequence, self.world.now, "finished")


@pytest.mark.parametrize("verify", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_every_hand_out_finds_zeros_however_late_the_device_is(seed, verify):
    engine = Engine(seed, verify=verify, shards=2 if seed % 2 else 1)
    engine.live(np.random.default_rng(seed))
    engine.streams.drain()
    assert len(engine.found) >= 60 and set(engine.found) == {0}


def test_positive_control_without_the_wait_before_a_step_a_hand_out_finds_bytes():
    violations = []
    for seed in range(8):
        engine = Engine(seed, ordered=False)
        engine.live(np.random.default_rng(seed))
        engine.streams.drain()
        violations += engine.found
    assert any(violations)


def test_an_unread_block_is_clean_at_once_and_its_receipt_follows_its_end():
    engine = Engine()
    world = engine.world
    world.m.pool.receipts.clear()
    sequence = engine.serve("a", run(1, 3))
    world.m.release(sequence, world.now, "finished")
    (residency,) = world.m.hold_table.of(world.m.accounts["a"])
    world.m.tree.lapse(residency, "erased", world.now)
    world.m.tree.flush(world.now)
    world.scrub()
    assert world.states() == {"clean": BLOCKS}
    assert world.m.accounts["a"].used_blocks == 0
    assert world.m.pool.receipts == [] and len(world.m.pool.flight) == 1
    world.wait(1)
    assert world.m.pool.receipts == []  # the device has not begun: nothing is said
    engine.streams.drain()
    world.wait(1)
    (receipt,) = world.m.pool.receipts
    assert receipt.result.level == "retired" and receipt.result.method == "torch-stream"
    assert engine.streams.host_waits == 1  # the boot's


def test_a_read_back_block_waits_for_its_answer_and_a_bad_one_is_never_handed_out():
    engine = Engine(verify=1.0)
    world, pool = engine.world, engine.world.m.pool
    sequence = engine.serve("a", run(1, 3))
    bad = int(sequence.table[1])
    engine.memory.stuck.add((0, bad))
    world.m.release(sequence, world.now, "finished")
    (residency,) = world.m.hold_table.of(world.m.accounts["a"])
    world.m.tree.lapse(residency, "erased", world.now)
    world.m.tree.flush(world.now)
    world.scrub()
    assert world.states() == {"clean": BLOCKS - 3, "dirty": 3}
    assert world.m.accounts["a"].used_blocks == 3  # charged until it is CLEAN
    world.ok()
    engine.streams.drain()
    world.wait(1)
    assert pool.state[bad] == QUARANTINED
    assert world.states()["quarantined"] >= 1 and pool.counts[DIRTY] == 0
    assert world.m.accounts["a"].used_blocks == 0
    assert pool.receipts[-1].result.failed.tolist() == [bad]
    world.ok()
    handed = []
    for number in range(8):
        other = engine.serve("b", run(50 + number, 5))
        handed += other.table[: other.block_count].tolist()
        world.m.release(other, world.now, "finished")
    assert bad not in handed and len(handed) == 40


def test_an_allocation_waits_only_where_nothing_but_read_backs_is_left():
    unread, read = Engine(verify=0.0), Engine(verify=1.0)
    for engine in (unread, read):
        boot = engine.world.m.pool.flight.waits
        for number in range(12):  # four requests fill the pool; nothing on the device has run
            sequence = engine.serve("a", run(number, 5))
            engine.world.m.release(sequence, engine.world.now, "finished")
        waits = engine.world.m.pool.flight.waits - boot
        assert waits == 0 if engine is unread else waits > 0
