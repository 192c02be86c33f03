"""Eviction policies over the prefix tree: every policy takes leaves first, then what it says of itself."""

from __future__ import annotations

import random

import pytest

from kvcustody.allocator.prefix.block_priority import disjoint
from kvcustody.allocator.prefix.eviction_policy import (
    POLICIES,
    CostAware,
    Fifo,
    Lfu,
    Lru,
    Priority,
    SegmentedLru,
)
from kvcustody.allocator.prefix.node import Node
from standins.allocator.world import MINUTE, SECOND, SIZE, World, run


def pool(policy, blocks: int = 400) -> World:
    return World(blocks, ("a", "b"), policy=policy)


def evict(world: World, count: int = 1) -> None:
    world.m.tree.evict(world.m.accounts["a"], count, world.now, "test")
    world.ok()


def cached(world: World, names: range, blocks: int = 3) -> list[int]:
    """Return which of these prompts are completely cached."""
    return [at for at in names if world.hit("a", run(at, blocks, 1)) == blocks]


def order(world: World, names: range, blocks: int = 3) -> list[int]:
    """Return the order in which these prompts are evicted."""
    gone: list[int] = []
    while len(gone) < len(names):
        before = cached(world, names, blocks)
        evict(world)
        gone += [at for at in before if at not in cached(world, names, blocks)]
    return gone


def touch(world: World, at: int, blocks: int = 3) -> None:
    world.now += 1
    world.cache("a", run(at, blocks, 1))


def test_lru_takes_the_least_recently_used():
    world = pool(Lru)
    for at in (0, 1, 2, 3, 1, 0):
        touch(world, at)
    assert order(world, range(4)) == [2, 3, 1, 0]


def test_fifo_takes_the_oldest_however_recently_used():
    world = pool(Fifo)
    for at in (0, 1, 2, 3, 1, 0):
        touch(world, at)
    assert order(world, range(4)) == [0, 1, 2, 3]


def test_lfu_takes_the_least_often_used_then_the_oldest():
    world = pool(Lfu)
    for at in (0, 0, 0, 1, 2, 2, 3):
        touch(world, at)
    assert order(world, range(4)) == [1, 3, 2, 0]


def test_slru_protects_what_was_used_again():
    world = pool(lambda: SegmentedLru(2))
    for at in (0, 0, 0, 1, 1, 2, 3):
        touch(world, at)
    assert order(world, range(4)) == [1, 2, 3, 0]  # 1 was used again once: still on probation


def test_cost_aware_prefers_deep_wanted_and_prioritised_and_ages():
    world = pool(lambda: CostAware(attention_depth=4), 2000)
    touch(world, 0, 1)
    touch(world, 1, 64)  # deep: dear to compute again
    touch(world, 2, 1)
    for _ in range(40):
        touch(world, 2, 2)
    evict(world)
    assert [world.hit("a", run(0, 1, 1)), world.hit("a", run(1, 1, 1))] == [0, 1]
    for at in range(3, 300):  # newcomers push the clock up until the once dear run goes
        touch(world, at, 1)
        evict(world)
    assert world.hit("a", run(1, 64, 1)) < 64


def with_ranges(world: World, at: int, ranges, blocks: int = 3, tail: int = 1):
    """One request whose prompt carries retention ranges (first block, last block, priority, duration us)."""
    sequence = world.admit("a", run(at, blocks, tail))
    sequence.priorities = disjoint(ranges)
    world.m.commit(sequence, SIZE * blocks + tail, world.now)
    world.ok()
    world.m.release(sequence, world.now, "finished")
    world.ok()


def priorities(world: World, blocks: int) -> list[int]:
    got = {}
    for node in world.nodes():
        for depth in range(node.depth, node.depth + node.length):
            got[depth] = node.priority
    return [got[depth] for depth in range(blocks)]


def test_priority_takes_the_lowest_first_then_the_least_recently_used():
    world = pool(Priority)
    for at, priority in ((0, 90), (1, 10), (2, 35), (3, 10), (4, 100), (5, 0)):
        with_ranges(world, at, [(0, 99, priority, 0)])
    assert order(world, range(6)) == [5, 1, 3, 2, 0, 4]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0, 99, 80, 0)], [80] * 8),
        ([(2, 4, 80, 0)], [35, 35, 80, 80, 35, 35, 35, 35]),
        ([(0, 2, 80, 0), (5, 7, 20, 0)], [80, 80, 35, 35, 35, 20, 20, 35]),
        ([(0, 3, 80, 0), (2, 6, 20, 0)], [80, 80, 80, 20, 20, 20, 35, 35]),  # the earlier wins a shared block
        ([(2, 6, 20, 0), (0, 3, 80, 0)], [80, 80, 80, 20, 20, 20, 35, 35]),
        ([(0, 8, 80, 0), (2, 4, 20, 0)], [80] * 8),
        ([(0, 1, 1, 0), (1, 2, 2, 0), (2, 3, 3, 0), (7, 8, 7, 0)], [1, 2, 3, 35, 35, 35, 35, 7]),
        ([(20, 30, 80, 0)], [35] * 8),
    ],
)
def test_token_ranges_cut_nodes_where_the_priority_changes(ranges, expected):
    world = pool(Priority)
    with_ranges(world, 1, ranges, blocks=8)
    assert priorities(world, 8) == expected
    assert world.hit("a", run(1, 8, 1)) == 8


def test_a_parent_is_as_high_as_its_highest_child():
    """A low range above a high one: the low blocks cannot go first, because the high ones need them."""
    world = pool(Priority)
    with_ranges(world, 0, [(0, 2, 5, 0), (2, 4, 90, 0)], blocks=4)
    with_ranges(world, 1, [(0, 9, 35, 0)], blocks=4)
    with_ranges(world, 0, [], blocks=3)  # a later visit to the low part alone does not lower it
    evict(world, 4)
    assert world.hit("a", run(0, 4, 1)) == 4
    assert world.hit("a", run(1, 4, 1)) == 0
    evict(world, 2)  # now the high part goes, and the low part sinks to its own level
    with_ranges(world, 2, [(0, 9, 35, 0)], blocks=4)
    evict(world, 2)
    assert world.hit("a", run(0, 4, 1)) == 0
    assert world.hit("a", run(2, 4, 1)) == 4


def test_a_duration_demotes_when_it_lapses_and_not_before():
    for waited, survivor in ((9 * SECOND, 0), (10 * SECOND, 1)):
        world = pool(Priority)
        with_ranges(world, 0, [(0, 99, 90, 10 * SECOND)])
        world.now += 1
        with_ranges(world, 1, [(0, 99, 60, 0)])
        world.now += waited - 1
        evict(world, 3)
        assert cached(world, range(2)) == [survivor]


def test_a_duration_starts_at_the_release_and_starts_again_at_the_next():
    world = pool(Priority)
    with_ranges(world, 0, [(0, 99, 90, 10 * SECOND)])
    with_ranges(world, 1, [(0, 99, 60, 0)])
    world.now += 9 * SECOND
    running = world.start("a", run(0, 3, 1))
    world.now += MINUTE  # running: not CACHED, so nothing lapses
    world.m.release(running, world.now, "finished")
    world.now += 9 * SECOND
    evict(world, 3)
    assert cached(world, range(2)) == [0]
    world.now += SECOND
    with_ranges(world, 2, [(0, 99, 60, 0)])
    evict(world, 3)
    assert cached(world, range(3)) == [2]


@pytest.mark.parametrize("priority", [0, 10, 35])
def test_a_duration_never_promotes(priority):
    world = pool(Priority)
    with_ranges(world, 0, [(0, 99, priority, SECOND)])
    world.now += MINUTE
    with_ranges(world, 1, [(0, 99, 36, 0)])
    evict(world, 3)
    assert cached(world, range(2)) == [1]


def test_a_duration_never_extends_a_deadline():
    world = World(64, ("a",), policy=Priority, domain={"idle_us": SECOND})
    with_ranges(world, 0, [(0, 99, 100, 1000 * MINUTE)])
    world.now += SECOND
    assert world.hit("a", run(0, 3, 1)) == 0
    world.wait(SECOND)
    assert world.states().get("cached", 0) == 0


def test_a_demoted_parent_waits_for_its_child():
    world = pool(Priority)
    with_ranges(world, 0, [(0, 2, 90, SECOND), (2, 4, 90, MINUTE)], blocks=4)
    with_ranges(world, 1, [(0, 99, 60, 0)])
    world.now += 2 * SECOND
    evict(world, 3)
    assert world.hit("a", run(0, 4, 1)) == 4  # its child is worth more than 60, so it stays with it
    world.now += MINUTE
    with_ranges(world, 2, [(0, 99, 60, 0)])
    evict(world, 4)
    assert world.hit("a", run(0, 4, 1)) == 0
    assert cached(world, range(1, 3)) == [2]


def test_the_demotion_heap_is_bounded_and_forgets_what_has_ended():
    world = pool(Priority, 64)
    queue = world.m.tree.queues[world.m.accounts["a"]]
    for at in range(2000):
        with_ranges(world, at % 30, [(0, 99, 90, 1000 * MINUTE)])
        assert queue._waiting <= 64
        assert len(queue._demotions) <= 2 * 64 + 66
    evict(world, 64)
    assert queue._waiting == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(2))
def test_leaf_order_holds_under_every_policy(name, seed, monkeypatch):
    """Random sharing prompts, random evictions: whatever goes has no child left, and all invariants hold."""
    rng = random.Random(seed)
    world = pool(POLICIES[name], 300)
    base = [run(at, 12) for at in range(2)]
    ended: list[Node] = []
    inner = world.m.tree._end_cached

    def watched(node, cause, due_us, now_us):
        assert node.first_child is None
        assert node.refs == 0
        ended.append(node)
        inner(node, cause, due_us, now_us)

    monkeypatch.setattr(world.m.tree, "_end_cached", watched)
    for at in range(120):
        world.now += 1
        tokens = rng.choice(base)[: rng.randrange(1, 49)] + [rng.randrange(9) for _ in range(rng.randrange(9))]
        ranges = [(0, rng.randrange(1, 9), rng.randrange(101), rng.choice((0, 40)))]
        sequence = world.admit("a", tokens)
        if isinstance(sequence, str):
            continue
        sequence.priorities = ranges
        world.m.commit(sequence, len(tokens), world.now)
        world.m.release(sequence, world.now, "finished")
        if at % 3 == 0:
            evict(world, rng.randrange(1, 20))
    world.ok()
    assert len(ended) > 10


def test_eviction_trims_a_run_from_its_tail():
    world = pool(Lru)
    world.cache("a", run(1, 20, 1))
    for left in range(19, 0, -1):
        evict(world)
        assert world.hit("a", run(1, 20, 1)) == left
    evict(world)
    assert world.m.tree.node_count == 0


def test_what_a_grants_reader_added_goes_with_the_owners_blocks_and_does_not_count():
    world = pool(Lru)
    tokens = run(1, 10, 1)
    world.cache("a", tokens[: SIZE * 5 + 1])
    world.cache("b", tokens, grants=("a",))
    assert (world.m.accounts["a"].cached_blocks, world.m.accounts["b"].cached_blocks) == (5, 5)
    evict(world, 3)
    assert (world.m.accounts["a"].cached_blocks, world.m.accounts["b"].cached_blocks) == (2, 0)
