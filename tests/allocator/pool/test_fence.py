"""Fences: epochs, stuck ones, and what waits for them (F1, F2, L6)."""

from __future__ import annotations

import pytest

from kvcustody.allocator.pool.fence import Fences
from kvcustody.errors import HandleError
from standins.allocator.world import SECOND, World, run

BOUND = 30 * SECOND


def test_fences_are_epochs_and_retire_in_any_order():
    fences = Fences()
    assert fences.oldest_open == 1
    first, second, third = (fences.open(now) for now in (10, 20, 30))
    assert (first, second, third, len(fences)) == (1, 2, 3, 3)
    fences.retire(second)
    fences.retire(second)
    assert fences.oldest_open == first
    fences.retire(first)
    assert fences.oldest_open == third
    fences.retire(third)
    assert fences.oldest_open == 4
    for wrong in (0, -1, 4):
        with pytest.raises(HandleError, match="never opened"):
            fences.retire(wrong)


def test_stuck_before_counts_only_those_past_the_bound():
    fences = Fences()
    for now in (0, 10, 20):
        fences.open(now)
    assert [fences.stuck_before(15, now) for now in (15, 16, 26, 36)] == [0, 2, 3, 4]


def test_a_block_in_flight_waits_for_its_fence():
    world = World(16)
    sequence = world.admit("a", run(1, 3, 1))
    fence = sequence.fence = world.m.pool.fences.open(world.now)
    world.m.release(sequence, world.now, "aborted")
    for _ in range(3):
        world.wait(SECOND)
        assert world.states() == {"clean": 12, "fenced": 4}
    world.m.pool.fences.retire(fence)
    world.wait(SECOND)
    assert world.states() == {"clean": 16}
    assert world.m.pool.ended[-1].retired_us == world.now
    world.ok()


def test_an_older_fence_that_is_open_holds_what_a_younger_one_covered():
    world = World(16)
    older, younger = (world.m.pool.fences.open(world.now) for _ in range(2))
    sequence = world.admit("a", run(1, 3))
    sequence.fence = younger
    world.m.release(sequence, world.now, "aborted")
    world.m.pool.fences.retire(younger)
    world.wait(SECOND)
    assert world.states() == {"clean": 13, "fenced": 3}
    world.m.pool.fences.retire(older)
    world.wait(SECOND)
    assert world.states() == {"clean": 16}


def test_cached_blocks_remember_the_fence_until_they_end():
    world = World(16)
    sequence = world.start("a", run(1, 4, 1))
    fence = sequence.fence = world.m.pool.fences.open(world.now)
    world.m.release(sequence, world.now, "finished")
    assert world.hit("a", run(1, 4, 1)) == 4  # reading while the write is in flight is ordered by the device's stream
    reader = world.start("a", run(1, 2, 1))  # splits the run; both halves remember
    world.m.release(reader, world.now, "finished")
    world.m.tree.evict(world.m.accounts["a"], 16, world.now, "test")
    world.scrub()
    assert world.states()["fenced"] == 5
    world.m.pool.fences.retire(fence)
    world.scrub()
    assert world.states() == {"clean": 16}
    world.ok()


def test_a_stuck_fence_quarantines_and_a_late_retirement_gives_back():
    world = World(16)
    sequence = world.admit("a", run(1, 3))
    fence = sequence.fence = world.m.pool.fences.open(world.now)
    world.m.release(sequence, world.now, "aborted")
    world.wait(BOUND)
    assert world.states() == {"clean": 13, "fenced": 3}
    world.wait(1)
    assert world.states() == {"clean": 13, "quarantined": 3}
    assert [custody.fence for custody in world.m.pool.stuck_findings] == [fence]
    assert world.m.accounts["a"].used_blocks == 3  # charged until CLEAN
    assert isinstance(world.admit("b", run(2, 14)), str)  # never handed out
    world.ok()
    for _ in range(3):
        world.wait(10 * BOUND)
    assert world.states() == {"clean": 13, "quarantined": 3}
    world.m.pool.fences.retire(fence)
    world.wait(1)
    world.ok()
    assert world.states() == {"clean": 16}
    assert world.m.accounts["a"].used_blocks == 0


def test_a_shared_tail_carries_the_fence_of_each_side():
    """The reader of a fork's old tail is still in flight when the other side gives it up: it waits."""
    for who in ("child", "parent"):
        world = World(16)
        parent = world.start("a", run(1, 2, 2))
        residency = world.m.residency(parent.account, parent.domain, "p", None, world.now)
        child = world.m.fork(parent, "child", residency, world.now)
        tail = int(parent.blocks[-1])
        reader, other = (child, parent) if who == "child" else (parent, child)
        fence = reader.fence = world.m.pool.fences.open(world.now)
        world.extend(reader, 7)  # copies the tail; the step in flight still reads the old one
        assert int(reader.blocks[-1]) != tail
        world.m.release(other, world.now, "aborted")
        world.scrub()
        assert world.m.pool.state[tail] == 3, who
        world.m.pool.fences.retire(fence)
        world.scrub()
        assert world.m.pool.state[tail] == 0
        world.ok()


def test_a_tail_that_is_taken_back_carries_the_fence_of_the_one_that_left():
    world = World(16)
    parent = world.start("a", run(1, 2, 2))
    child = world.m.fork(
        parent, "child", world.m.residency(parent.account, parent.domain, "p", None, world.now), world.now
    )
    tail = int(parent.blocks[-1])
    world.m.pool.fences.open(world.now)
    parent.fence = world.m.pool.fences.last
    world.m.release(parent, world.now, "aborted")
    world.extend(child, 7)
    assert int(child.blocks[-1]) == tail
    world.m.release(child, world.now, "aborted")
    world.scrub()
    assert world.m.pool.state[tail] == 3
    world.ok()
