"""The pool: states and their moves, generations, hand-out, scrubbing and quarantine (I1, P1–P5, L1–L3; C4)."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.manager.check_invariants import check
from kvcustody.allocator.pool.block_state import TRANSITIONS, BlockState
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.errors import CapacityError, DeviceError, HandleError, IsolationError
from standins.allocator.world import OPTIONS, SECOND, World, run

SPEC = TensorSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=4)


def test_at_boot_every_block_is_dirty_and_none_is_handed_out():
    manager = BlockManager(UnbackedMemory(8, 0), 8, OPTIONS)
    assert manager.pool.counts == [0, 0, 0, 0, 8, 0]
    assert not check(manager)
    assert manager.pool.partitions[0].clean_count == 0
    assert manager.boot() == 8
    assert manager.pool.counts == [8, 0, 0, 0, 0, 0]
    with pytest.raises(CapacityError):
        BlockManager(UnbackedMemory(1, 0), 0, OPTIONS)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(BlockState, BlockState)))
def test_only_the_moves_of_the_table_happen(source, target):
    world = World(8)
    pool = world.m.pool
    pool.state[:] = source
    pool.counts = [8 if state == source else 0 for state in BlockState]
    blocks = np.array([1, 5])
    if (source, target) in TRANSITIONS:
        pool.move(blocks, source, target)
        assert pool.state[blocks].tolist() == [target] * 2
        assert (pool.counts[source], pool.counts[target]) == (6, 2)
    else:
        with pytest.raises(IsolationError, match="cannot move"):
            pool.move(blocks, source, target)
        assert pool.counts[source] == 8


@pytest.mark.parametrize("size", [3, 5000])
def test_a_block_that_is_not_in_the_source_state_stops_the_whole_move(size):
    pool = World(size).m.pool
    pool.move(np.array([1]), BlockState.CLEAN, BlockState.ACTIVE)
    before = pool.state.copy()
    with pytest.raises(IsolationError, match="ACTIVE"):
        pool.move(np.arange(size), BlockState.CLEAN, BlockState.ACTIVE)
    assert (pool.state == before).all()


def test_generations_rise_for_good_and_never_repeat():
    world = World(8)
    seen: set[int] = set()
    for at in range(50):
        sequence = world.start("a", run(at, 5, 1))
        generations = world.m.pool.generation[sequence.blocks].tolist()
        assert min(generations) > max(seen, default=0)
        seen.update(generations)
        world.m.release(sequence, world.now, "finished")
    assert world.m.pool.generation.dtype == np.int64
    assert world.m.pool.next_generation - 1 == 300
    world.ok()


def test_stale_handles_are_always_rejected():
    """After reuse of the block, its old (block, generation) is refused, every time."""
    world, rng = World(16), random.Random(4)
    kept: list[tuple[int, int]] = []
    rejected = 0
    for at in range(300):
        sequence = world.start("a", run(at, rng.randrange(1, 8), 1))
        pool = world.m.pool
        handles = list(zip(sequence.blocks.tolist(), pool.generation[sequence.blocks].tolist(), strict=True))
        pool.validate(sequence.blocks, pool.generation[sequence.blocks])  # live ones pass
        world.m.release(sequence, world.now, "aborted")
        world.m.tree.evict(world.m.accounts["a"], 16, world.now, "test")
        kept += handles
        for block, generation in rng.sample(kept, min(len(kept), 8)):
            with pytest.raises(HandleError, match="is stale"):
                pool.validate(np.array([block]), np.array([generation]))
            rejected += 1
        world.scrub()
    assert rejected > 2000
    for block in (-1, 16):
        with pytest.raises(HandleError, match="outside"):
            world.m.pool.validate(np.array([block]), np.array([1]))


def test_positive_control_a_bare_index_is_accepted_after_reuse():
    """Without the generation, every kept index of a reused block would be served."""
    world = World(4)
    old = world.start("a", run(1, 3, 1)).blocks.copy()
    victim = next(s for s in world.m.decode.sequences if s is not None)
    world.m.release(victim, world.now, "aborted")
    world.m.tree.evict(world.m.accounts["a"], 4, world.now, "test")
    world.scrub()
    reused = world.start("b", run(2, 3, 1))
    assert set(old.tolist()) == set(reused.blocks.tolist())
    world.m.pool.validate(old, world.m.pool.generation[old])  # generations taken now: the check cannot tell


def test_a_freed_slot_is_refused_and_leaves_no_trace():
    """C4 for decode slots: a late extend neither grows nor publishes anything for the slot's next owner."""
    world = World(16)
    old = world.start("a", run(1, 2, 1))
    slot = np.array([old.slot])
    world.m.release(old, world.now, "finished")
    with pytest.raises(HandleError, match="not running"):
        world.m.extend_many(slot, np.array([7], dtype=np.int32), world.now)
    world.m.decode.computed[slot] = 12  # whatever was left there
    fresh = world.admit("b", run(3, 3, 1))
    assert fresh.slot == slot[0]
    world.m.release(fresh, world.now, "aborted")
    assert world.hit("b", run(3, 3, 1)) == 0  # nothing was computed, so nothing is published (L10)
    world.ok()


def test_dirty_blocks_are_scrubbed_in_batches_oldest_first():
    world = World(32, options={"scrub_batch": 6})
    partition = world.m.pool.partitions[0]
    for at in range(4):
        world.m.release(world.admit("a", run(at, 4)), world.now + at, "aborted")
    world.m.pool.reclaim(partition, world.now, SECOND)
    assert partition.dirty_blocks == 16
    launches = len(world.m.pool.receipts)
    assert world.m.pool.scrub(partition, 6) == 8  # whole custodies, at least what was asked
    assert [c.ended_us for c in partition.dirty] == [world.now + 2, world.now + 3]
    assert len(world.m.pool.receipts) == launches + 1
    world.ok()


def test_one_launch_per_verify_share_and_owner_of_a_sample():
    world = World(64, ("a", "b", "c"))
    world.domain("full", "a", verify_share=1.0)
    world.domain("some-a", "a", verify_share=0.25)
    world.domain("some-b", "b", verify_share=0.25)
    for at, name in enumerate(("a", "full", "some-a", "some-b", "b", "some-a")):
        world.m.release(world.admit(name, run(at, 3)), world.now, "aborted")
    world.m.pool.receipts.clear()
    world.scrub()
    got = [(r.share, {c.domain.owner.name for c in r.custodies}) for r in world.m.pool.receipts]
    assert got == [(0.0, {"a", "b"}), (1.0, {"a"}), (0.25, {"a"}), (0.25, {"b"})]
    world.ok()


def test_every_shard_gives_a_receipt_before_a_block_is_clean():
    memory = UnbackedMemory(16, 0, shards=3)
    world = World(16, memory=memory)
    world.m.pool.receipts.clear()
    world.m.release(world.admit("a", run(1, 4)), world.now, "aborted")
    world.scrub()
    assert [(r.shard, sum(len(c.blocks) for c in r.custodies)) for r in world.m.pool.receipts] == [
        (0, 4),
        (1, 4),
        (2, 4),
    ]
    assert [memory.scrubbed(shard) for shard in range(3)] == [20, 20, 20]


class Failing(UnbackedMemory):
    broken = False

    def scrub(self, shard, blocks, verify_share):
        if self.broken and shard == self.shards - 1:
            raise DeviceError("the device is gone")
        return super().scrub(shard, blocks, verify_share)


def test_a_failed_launch_loses_no_block():
    memory = Failing(16, 0, shards=2)
    world = World(16, memory=memory)
    world.domain("full", "a", verify_share=1.0)
    for name in ("a", "full", "b"):
        world.m.release(world.admit(name, run(1, 3)), world.now, "aborted")
    memory.broken = True
    for _ in range(3):
        with pytest.raises(DeviceError):
            world.scrub()
        world.ok()
        assert world.states() == {"clean": 7, "dirty": 9}
    memory.broken = False
    for _ in range(3):  # due at once: a batch each step
        world.wait(0)
        world.ok()
    assert world.states() == {"clean": 16}
    assert all(account.used_blocks == 0 for account in world.m.accounts.values())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_block_that_does_not_verify_is_quarantined_for_good(shards):
    memory = TensorMemory.allocate(16, SPEC, shards=shards)
    memory.stuck |= {(0, 3), (shards - 1, 11)}
    world = World(16, memory=memory, domain={"verify_share": 1.0})
    assert world.states() == {"clean": 14, "quarantined": 2}  # boot verifies everything
    handed: set[int] = set()
    for at in range(40):
        sequence = world.start("a", run(at, 13, 1))
        handed.update(sequence.blocks.tolist())
        world.m.release(sequence, world.now, "finished")
        world.wait(SECOND)
        world.ok()
    assert handed == set(range(16)) - {3, 11}
    assert isinstance(world.admit("b", run(99, 14, 1)), str)  # they are capacity no more
    assert world.m.pool.state[[3, 11]].tolist() == [BlockState.QUARANTINED] * 2


def test_positive_control_without_verification_the_bad_block_is_handed_out():
    memory = TensorMemory.allocate(16, SPEC)
    world = World(16, memory=memory, domain={"verify_share": 0.0})
    memory.stuck.add((0, 3))
    world.m.release(world.admit("a", run(1, 16)), world.now, "aborted")
    world.scrub()
    assert memory.nonzero_bytes(world.admit("b", run(2, 16)).blocks) == 1


def test_the_clean_ring_wraps_without_losing_order():
    world, rng = World(7), random.Random(7)
    handed = 0
    for at in range(200):
        sequence = world.admit("a", run(at, rng.randrange(1, 8)))
        handed += sequence.block_count
        world.m.release(sequence, world.now, "aborted")
        world.scrub()
        world.ok()
    assert handed == world.m.pool.next_generation - 1 == world.memory.scrubbed(0) - 7


def test_teardown_leaves_every_block_clean():
    world = World(32)
    world.cache("a", run(1, 6, 1))
    late = world.start("b", run(2, 6, 1))
    late.fence = world.m.pool.fences.open(world.now)
    world.m.release(late, world.now, "shutdown")
    world.m.teardown(world.now)
    world.ok()
    assert world.states() == {"clean": 32}
    assert len(world.m.hold_table) == len(world.m.tree.index) == world.m.tree.node_count == 0
