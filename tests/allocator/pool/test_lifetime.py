"""How custody ends: ceilings, deadlines, residencies, parents, release (L4, L7, L8, R1–R3; C3, E1)."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvcustody.allocator.pool.block_state import NEVER_US
from standins.allocator.world import MINUTE, SECOND, SIZE, World, run

HOUR = 60 * MINUTE


def reattach_every_minute(world: World, tokens: list[int], minutes: int) -> list[int]:
    """Hits of a new request each minute, the sweep running."""
    hits = []
    for _ in range(minutes):
        hits.append(world.cache("a", tokens))
        world.wait(MINUTE)
        world.ok()
    return hits


def test_a_block_that_is_attached_every_minute_ends_at_its_ceiling():
    world = World(64, domain={"idle_us": 5 * MINUTE, "absolute_us": HOUR})
    hits = reattach_every_minute(world, run(1, 4, 1), 121)
    assert [at for at, hit in enumerate(hits) if hit == 0] == [0, 60, 120]
    assert set(hits) == {0, 4}


def test_positive_control_a_sliding_deadline_is_immortal(monkeypatch):
    world = World(64, domain={"idle_us": 5 * MINUTE, "absolute_us": HOUR})
    inner = world.m.tree.attach

    def sliding(leaf, now_us):
        node = leaf
        while node is not None:
            node.ceiling_us = now_us + HOUR
            node = node.parent
        return inner(leaf, now_us)

    monkeypatch.setattr(world.m.tree, "attach", sliding)
    hits = reattach_every_minute(world, run(1, 4, 1), 200)
    assert hits == [0] + [4] * 199


def test_a_conversation_ends_with_its_root():
    """L8: later turns inherit the first turn's ceiling."""
    world = World(256, domain={"idle_us": HOUR, "absolute_us": HOUR})
    tokens = run(1, 2)
    for turn in range(11):
        world.cache("a", [*tokens, turn])
        tokens += [turn] * 8
        world.wait(5 * MINUTE)
    assert world.hit("a", tokens) >= 20
    world.now = SECOND + HOUR - 1
    assert world.hit("a", tokens) >= 20
    world.now += 1
    assert world.hit("a", tokens) == 0
    world.wait(SECOND)
    world.scrub()
    world.ok()
    assert world.states() == {"clean": 256}


def test_at_its_ceiling_a_running_block_takes_no_new_attach_and_ends_at_release():
    world = World(64, domain={"idle_us": HOUR, "absolute_us": MINUTE})
    running = world.start("a", run(1, 4, 1))
    world.wait(MINUTE - 1)
    assert world.hit("a", run(1, 4, 1)) == 4
    world.wait(1)
    assert world.hit("a", run(1, 4, 1)) == 0
    late = world.start("a", run(1, 4, 1))  # the keys are still taken by the running one: its own stay private
    world.ok()
    assert late.hit_blocks == 0
    world.m.release(running, world.now, "finished")
    world.m.release(late, world.now, "finished")
    world.ok()
    assert "cached" not in world.states()
    assert world.cache("a", run(1, 4, 1)) == 0
    assert world.hit("a", run(1, 4, 1)) == 4


def test_active_max_bounds_a_running_request():
    world = World(64)
    sequence = world.admit("a", run(1, 4), active_us=MINUTE)
    assert world.wait(MINUTE - 1) == []
    assert world.wait(1) == [sequence]
    assert world.wait(1) == [sequence]  # until somebody releases it
    world.m.release(sequence, world.now, "active-max")
    assert world.wait(1) == []


def test_a_lagging_sweep_serves_nothing_past_its_deadline():
    world = World(64, domain={"idle_us": MINUTE})
    world.cache("a", run(1, 4, 1))
    world.now += MINUTE - 1
    assert world.hit("a", run(1, 4, 1)) == 4
    world.now += 1
    assert world.hit("a", run(1, 4, 1)) == 0  # nothing was swept yet
    assert world.m.hold_table.overdue(world.now) == 1
    assert world.cache("a", run(1, 4, 1)) == 0  # ends the stale one, and takes its keys
    assert world.hit("a", run(1, 4, 1)) == 4
    world.ok()


def test_ends_are_due_when_policy_says_not_when_the_sweep_came():
    world = World(64, domain={"idle_us": MINUTE})
    world.cache("a", run(1, 4))
    born = world.now
    world.m.pool.ended.clear()
    world.wait(HOUR)
    assert [(c.cause, c.due_us, c.ended_us) for c in world.m.pool.ended] == [("expired", born + MINUTE, world.now)]


def test_sweeps_run_in_slices_and_lose_nothing():
    world = World(512, domain={"idle_us": MINUTE}, options={"sweep_batch": 10})
    for at in range(64):
        world.cache("a", run(at, 4))
    world.now += HOUR
    assert [world.m.sweep(world.now) for _ in range(8)] == [10] * 6 + [4, 0]
    assert world.m.expired_residencies == 64
    world.ok()
    assert len(world.m.hold_table) == world.m.tree.node_count == 0


@pytest.mark.parametrize("seed", range(3))
def test_when_a_block_ends_its_descendants_end_with_it(seed):
    """L7: after any node ends, nothing below it can be reached, held or counted."""
    rng = random.Random(seed)
    world = World(2048)
    base = run(1, 20)
    for _ in range(30):
        world.cache("a", base[: rng.randrange(len(base))] + [rng.randrange(4) for _ in range(12)])
    world.ok()
    while world.nodes():
        node = rng.choice(world.nodes())
        below = set(node.blocks.tolist())
        stack = [node]
        while stack:
            at = stack.pop()
            below.update(at.blocks.tolist())
            child = at.first_child
            while child is not None:
                stack.append(child)
                child = child.next_sibling
        cached = world.states()["cached"]
        world.m.tree.end_subtree(node, "erased", world.now, world.now)
        world.m.tree.flush(world.now)
        world.ok()
        assert world.states().get("cached", 0) == cached - len(below)
        assert (world.m.pool.state[sorted(below)] == 3).all()
    assert len(world.m.tree.index) == len(world.m.hold_table) == 0


def test_a_readers_continuation_ends_with_the_owners_blocks():
    world = World(64, ("a", "b"))
    world.cache("a", run(1, 4, 1))
    world.cache("b", run(1, 8, 1), grants=("a",))
    assert world.hit("b", run(1, 8, 1), grants=("a",)) == 8
    for hold in list(world.m.hold_table.of(world.m.accounts["a"])):
        world.m.tree.lapse(hold, "erased", world.now)
    world.m.tree.flush(world.now)
    world.ok()
    assert "cached" not in world.states()
    assert not world.m.hold_table.of(world.m.accounts["b"])


def test_a_hold_whose_leaf_ends_keeps_the_nearest_block_it_may_hold():
    """Own blocks under a granted run under a segment: when the own ones go, the hold is on the segment alone."""
    world = World(64, ("o", "a", "b"))
    world.domain("seg", "o", is_segment=True)
    tokens = run(1, 10, 1)
    world.cache("a", tokens[: SIZE * 6 + 1], segment="seg", segment_blocks=3)
    assert world.cache("b", tokens, segment="seg", segment_blocks=3, grants=("a",)) == 6
    for count in (1, 10):
        world.m.tree.evict(world.m.accounts["b"], count, world.now, "test")
        world.ok()
    (hold,) = world.m.hold_table.of(world.m.accounts["b"])
    assert hold.leaf.domain is world.chains["seg"].domain
    world.m.tree.lapse(hold, "erased", world.now)
    world.m.tree.flush(world.now)
    world.ok()


def test_the_same_principal_extends_its_residency_others_add_one():
    world = World(256)
    tokens = run(1, 2)
    for turn in range(6):
        tokens += [turn] * SIZE
        world.cache("a", [*tokens, 0], principal="mia")
        assert len(world.m.hold_table.of(world.m.accounts["a"])) == 1
    world.cache("a", [*tokens, 0], principal="noa")
    assert len(world.m.hold_table.of(world.m.accounts["a"])) == 2
    world.cache("a", [*tokens[:16], 99, 99, 99, 99, 0], principal="mia")  # a branch does not extend the whole
    assert len(world.m.hold_table.of(world.m.accounts["a"])) == 3
    world.ok()


def test_one_holder_lapses_the_others_blocks_stay():
    world = World(64, domain={"idle_us": HOUR})
    world.cache("a", run(1, 6, 1), principal="mia")
    world.cache("a", run(1, 4, 1), principal="noa")
    mia = next(r for r in world.m.hold_table.of(world.m.accounts["a"]) if r.principal == "mia")
    world.m.tree.lapse(mia, "erased", world.now)
    world.m.tree.flush(world.now)
    world.ok()
    assert world.hit("a", run(1, 6, 1)) == 4


def test_live_residencies_are_capped_oldest_first():
    world = World(256, {"a": {"residencies": 5}, "b": {}})
    for at in range(12):
        world.cache("a", run(at, 2, 1))
        world.ok()
        assert len(world.m.hold_table.of(world.m.accounts["a"])) <= 5
    assert [at for at in range(12) if world.hit("a", run(at, 2, 1))] == [7, 8, 9, 10, 11]


@pytest.mark.parametrize("limits", [{"idle_us": 0}, {"absolute_us": 0}])
def test_with_a_retention_of_zero_nothing_is_ever_cached(limits):
    world = World(64, domain=limits)
    for _ in range(5):
        sequence = world.start("a", run(1, 4, 1))
        assert sequence.hit_blocks == 0
        assert world.hit("a", run(1, 4, 1)) == 0  # not even while it runs
        world.extend(sequence, 1, 2, 3, 4)
        world.m.release(sequence, world.now, "finished")
        assert "cached" not in world.states()
        world.ok()
    world.scrub()
    assert world.states() == {"clean": 64}


def test_preemption_by_recompute_keeps_what_was_computed():
    world = World(64)
    sequence = world.admit("a", run(1, 8, 2), principal="mia")
    world.m.commit(sequence, 22, world.now)
    world.m.release(sequence, world.now, "preempted")
    world.ok()
    assert world.states() == {"clean": 64 - 9, "cached": 5, "fenced": 4}
    again = world.admit("a", run(1, 8, 2), principal="mia")
    assert again.hit_blocks == 5
    world.m.release(again, world.now, "finished")
    assert len(world.m.hold_table.of(world.m.accounts["a"])) == 1
    world.ok()


CAUSES = ("finished", "aborted", "timeout", "disconnected", "preempted")


def test_release_is_idempotent_in_every_order():
    """Five ways to end, in all 120 orders, each told twice; the first one counts and the rest change nothing."""
    for orders in itertools.permutations(CAUSES):
        world = World(16)
        other = world.start("b", run(2, 2, 1))
        sequence = world.start("a", run(1, 3, 1))
        answers = [world.m.release(sequence, world.now, cause) for cause in orders for _ in range(2)]
        assert answers == [True] + [False] * 9
        assert (world.m.pool.counts[1], sum(world.m.pool.counts)) == (3, 16)
        world.m.commit(sequence, 13, world.now)  # late news about an ended request changes nothing
        world.ok()
        world.m.release(other, world.now, "finished")
        world.ok()


@pytest.mark.parametrize("seed", range(2))
def test_random_duplicate_releases_keep_every_invariant(seed):
    rng = random.Random(seed)
    world = World(128)
    every = []
    for _ in range(600):
        world.now += 1
        if rng.random() < 0.4:
            got = world.admit(rng.choice("ab"), run(rng.randrange(5), rng.randrange(1, 9), 1))
            if not isinstance(got, str):
                every.append(got)
        elif every:
            sequence = rng.choice(every)
            was = sequence.slot >= 0
            if was and rng.random() < 0.5:
                world.m.commit(sequence, int(world.m.decode.length[sequence.slot]), world.now)
            assert world.m.release(sequence, world.now, rng.choice(CAUSES)) == was
        world.ok()


def test_positive_control_a_release_that_counts_twice_is_caught():
    world = World(64)
    sequence = world.start("a", run(1, 4, 1))
    slot = sequence.slot
    world.m.release(sequence, world.now, "finished")
    sequence.slot = slot  # as if nobody had noted the first one
    world.m.decode.sequences[slot] = sequence
    with pytest.raises(Exception):  # noqa: B017 - whichever guard is met first
        world.m.release(sequence, world.now, "finished")


def test_a_closed_domain_serves_nothing_and_is_not_held():
    world = World(64)
    running = world.start("a", run(1, 4, 1))
    world.chains["a"].domain.is_open = False
    assert world.hit("a", run(1, 4, 1)) == 0
    world.m.release(running, world.now, "erased")
    world.ok()
    assert "cached" not in world.states()


def test_a_ceiling_is_never_later_than_the_parents_nor_ever_grows():
    world = World(1024, domain={"idle_us": 10 * MINUTE, "absolute_us": HOUR})
    rng, seen = random.Random(1), {}
    base = run(1, 20)
    for _ in range(200):
        world.now += rng.randrange(2 * MINUTE)
        world.cache("a", base[: rng.randrange(len(base))] + [rng.randrange(3)] * 5)
        for node in world.nodes():
            assert node.born_us < node.ceiling_us <= node.born_us + HOUR < NEVER_US
            key = tuple(world.m.pool.generation[np.atleast_1d(node.blocks[:1])].tolist())
            assert node.ceiling_us <= seen.setdefault(key, node.ceiling_us)
        world.m.step(world.now)
        world.ok()
