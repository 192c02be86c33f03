"""An external pool's victims in the policy's order: each kind, compared with the queues of our own tree."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from kvcustody.allocator.pool.block_state import CACHED
from kvcustody.allocator.prefix.block_priority import END, BlockPriority, disjoint
from kvcustody.allocator.prefix.eviction_policy import (
    SIGNALS,
    CostAware,
    EvictionPolicy,
    Fifo,
    Lfu,
    Lru,
    Priority,
    SegmentedLru,
    ValueAware,
)
from standins.allocator.ranked_engine import Engine, Key
from standins.allocator.world import World, run

KINDS: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "slru": lambda: SegmentedLru(1),
    "slru-bounded": lambda: SegmentedLru(1, Fraction(1, 2)),
    "priority": Priority,
    "priority-base": lambda: Priority(60),
    "priority-lapse": Priority,
    "cost": lambda: CostAware(attention_depth=4),
    "value": lambda: ValueAware(frozenset(SIGNALS) - {"pressure", "next-turn"}),
}
KEEPS_HOT = ("lfu", "slru", "slru-bounded", "cost", "value")


def scanned(cache: Callable[[list[int]], int], advance: Callable[[], None]) -> int:
    """A prefix that is used five times, then a scan of more than the pool; what is hit of it afterwards, in blocks."""
    for _ in range(5):
        cache(run(0, 8, 1))
    for at in range(1, 19):
        advance()
        cache(run(at, 4, 1))
    return cache(run(0, 8, 1))


def own_pool(policy: Callable[[], EvictionPolicy], ranges: tuple[BlockPriority, ...], first: int) -> int:
    world = World(64, ("a",), policy=policy)

    def cache(tokens: list[int]) -> int:
        sequence = world.admit("a", tokens)
        assert not isinstance(sequence, str)
        sequence.priorities = ranges if tokens[0] == first else ()
        world.m.commit(sequence, len(tokens), world.now)
        hit = sequence.hit_blocks
        world.m.release(sequence, world.now, "finished")
        world.ok()
        return hit

    return scanned(cache, lambda: world.wait(1))


def external_pool(policy: Callable[[], EvictionPolicy], ranges: tuple[BlockPriority, ...], first: int) -> int:
    engine = Engine(64, policy)

    def advance() -> None:
        engine.now += 1

    return scanned(lambda tokens: engine.cache("a", tokens, ranges if tokens[0] == first else ()), advance)


@pytest.mark.parametrize("pool", [own_pool, external_pool])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_hot_prefix_survives_a_scan_where_the_policy_says_so(kind: str, pool: Callable[..., int]) -> None:
    """The control: with the least recently used, and the first in, nothing of it is left."""
    assert pool(KINDS[kind], (), 0) == (8 if kind in KEEPS_HOT else 0)


@pytest.mark.parametrize("pool", [own_pool, external_pool])
def test_a_range_of_high_priority_survives_a_scan(pool: Callable[..., int]) -> None:
    ranges = disjoint([(0, 5, 90, 0)])
    assert pool(Priority, ranges, 0) == 5
    assert pool(Lru, ranges, 0) == 0, "the control"


@pytest.mark.parametrize("pool", [own_pool, external_pool])
def test_what_no_range_names_has_the_base_priority(pool: Callable[..., int]) -> None:
    """A range of 50 is above the default, and below a base of 60 that everything else of its prompt has."""
    above, below = disjoint([(0, 5, 50, 0)]), disjoint([(0, 5, 50, 0)], base=60)
    assert [each[:3] for each in below] == [(0, 5, 50), (5, END, 60)]
    assert pool(Priority, above, 0) == 5
    assert pool(lambda: Priority(60), below, 0) == 8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_both_pools_give_up_the_same_blocks_in_the_same_order(kind: str, seed: int) -> None:
    """Prompts of shared and own parts, at random; some evictions between, and at the end all, one by one."""
    choose = random.Random(seed)
    policy = KINDS[kind]
    world, engine = World(400, ("a",), policy=policy), Engine(400, policy)
    base = policy().base if kind.startswith("priority") else 35  # type: ignore[attr-defined]
    falling = [[], [(0, 2, 80, 0), (2, 4, 50, 0), (4, END, 10, 0)], [(1, 2, 30, 0), (2, END, 20, 0)]]
    plans = [disjoint(ranges, base) for ranges in falling]
    prompts: dict[Key, list[Key]] = {}  # of whole blocks, with their prefixes

    def left() -> set[Key]:
        return {prefix for prefixes in prompts.values() for prefix in prefixes[: hit(prefixes)]}

    def hit(prefixes: list[Key]) -> int:
        return world.hit("a", [*prefixes[-1][1], 7])

    def evict(count: int) -> None:
        before = left()
        for _ in range(count):
            world.m.tree.evict(world.m.accounts["a"], 1, world.now, "test")
            world.ok()
            engine.evict(1)
            after = left()
            assert before - after == set(engine.victims[-1:])
            before = after

    for _ in range(60):
        world.now = engine.now = world.now + choose.choice((1, 20))
        stem, blocks = choose.randrange(5), choose.randint(1, 4)
        tokens = run(stem, blocks) + run(10 + choose.randrange(12), choose.randint(0, 3))
        if kind == "slru-bounded":  # whole nodes lose their protection in the tree: here each is of one block
            tokens = run(stem + 5 * blocks, 1)
        priorities = plans[stem % 3] if kind.startswith("priority") else ()
        if kind == "priority-lapse":  # the tree lets what lapsed sink when it comes to it
            tokens = run(30 + stem + 5 * blocks, 1)
            priorities = disjoint([(0, 4, 90, 50)]) if stem % 2 else ()
        prefixes = engine.keys("a", tokens)
        prompts[prefixes[-1]] = prefixes
        sequence = world.admit("a", [*tokens, 7])
        assert not isinstance(sequence, str)
        sequence.priorities = priorities
        world.m.commit(sequence, len(tokens) + 1, world.now)
        world.m.release(sequence, world.now, "finished")
        engine.cache("a", [*tokens, 7], priorities)
        assert left() == set(engine.index)
        evict(min(len(engine.index), choose.choice((0, 0, 0, 1, 5))))
    evict(len(engine.index))
    assert not engine.index
    assert not left()


@pytest.mark.parametrize("pool", ["own", "external"])
def test_what_high_blocks_stand_on_stays_and_sinks_when_they_are_gone(pool: str) -> None:
    """A low range before a high one, and a prompt of the default beside it."""
    low_then_high = disjoint([(0, 2, 5, 0), (2, 4, 90, 0)])
    world, engine = World(60, ("a",), policy=Priority), Engine(60, Priority)
    for tokens, priorities in ((run(0, 4, 1), low_then_high), (run(1, 4, 1), ()), (run(0, 2, 1), ())):
        sequence = world.admit("a", tokens)
        assert not isinstance(sequence, str)
        sequence.priorities = priorities
        world.m.commit(sequence, len(tokens), world.now)
        world.m.release(sequence, world.now, "finished")
        engine.cache("a", tokens, priorities)

    def left(at: int) -> int:
        return world.hit("a", run(at, 4, 1)) if pool == "own" else engine.hit("a", run(at, 4, 1))

    def evict(count: int) -> None:
        world.m.tree.evict(world.m.accounts["a"], count, world.now, "test")
        engine.evict(count)

    evict(4)
    assert (left(0), left(1)) == (4, 0)
    evict(2)
    engine.cache("a", run(2, 4, 1))
    world.cache("a", run(2, 4, 1))
    evict(2)
    assert (left(0), left(2)) == (0, 4)


def test_a_batch_of_victims_is_what_single_ones_would_be() -> None:
    whole, single = Engine(200, lambda: CostAware(4)), Engine(200, lambda: CostAware(4))
    choose = random.Random(1)
    for _ in range(60):
        tokens = run(choose.randrange(6), choose.randint(1, 4)) + run(10 + choose.randrange(9), 2)
        for engine in (whole, single):
            engine.now += 1
            engine.cache("a", [*tokens, 7])
    levels = single.pool.ranking
    assert levels is not None and len(set(levels.level[single.pool.state == CACHED].tolist())) > 3
    count = len(whole.index)
    whole.evict(count)
    for _ in range(count):
        single.evict(1)
    assert whole.victims == single.victims


def test_a_policy_is_asked_by_the_run_and_not_by_the_block() -> None:
    asked: list[tuple[int, int]] = []

    class Counting(Lfu):
        def level(self, node) -> int:  # type: ignore[no-untyped-def]
            asked.append((node.depth, node.length))
            return super().level(node)

    engine = Engine(2000, Counting)
    engine.cache("a", run(1, 900, 1))
    engine.cache("a", [*run(1, 400), *run(2, 300, 1)])
    assert asked == [(0, 900), (0, 400), (400, 300)]


@pytest.mark.parametrize("kind", ["lfu", "priority"])
def test_what_one_tenant_marks_moves_none_of_anothers_blocks(kind: str) -> None:
    """Tenant a marks everything high, or nothing: the same of b's blocks remain."""

    def left(marks: tuple[BlockPriority, ...]) -> set[Key]:
        engine = Engine(96, KINDS[kind], ("a", "b"))
        choose = random.Random(3)
        for _ in range(120):
            engine.now += 1
            engine.cache("a", run(choose.randrange(40), 3, 1), marks)
            engine.cache("b", run(choose.randrange(14), 3, 1))
        assert engine.victims
        return {key for key in engine.index if key[0] == "b"}

    assert left(disjoint([(0, END, 90, 0)])) == left(()) != set()


def test_who_is_furthest_over_its_guarantee_gives_first() -> None:
    engine = Engine(60, Lfu, ("a", "b"))
    engine.pool.account("a", guaranteed=20)
    for at in range(8):
        engine.cache("b", run(at, 4, 1))
    for at in range(5):
        engine.cache("a", run(at, 4, 1))
    engine.evict(30)
    assert [tenant for tenant, _ in engine.victims] == ["b"] * 30
    engine.evict(4)
    assert [tenant for tenant, _ in engine.victims[30:]] == ["b"] * 2 + ["a"] * 2, "what is within it goes last"


def test_a_range_lapses_to_the_base_priority() -> None:
    engine = Engine(60, lambda: Priority(50))
    engine.cache("a", run(0, 4, 1), disjoint([(0, END, 90, 100)], 50))
    engine.now += 1
    engine.cache("a", run(1, 4, 1), disjoint([], 50))
    engine.evict(2)
    assert {key[1][0] for key in engine.victims} == {1000}
    engine.now += 200
    engine.evict(4)
    assert [key[1][0] for key in engine.victims[2:]] == [1000] * 2 + [0] * 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_block_stands_above_what_it_continues(kind: str, seed: int) -> None:
    """Priorities that rise and lapse along prompts of shared parts, in a pool that holds few; children always first."""
    choose = random.Random(seed)
    engine = Engine(40, KINDS[kind], ("a", "b"))
    for _ in range(300):
        engine.now += choose.choice((1, 30))
        tokens = run(choose.randrange(3), choose.randint(1, 4)) + run(10 + choose.randrange(6), choose.randint(0, 3))
        ranges = [
            (first, first + choose.randint(1, 4), choose.randrange(101), choose.choice((0, 50)))
            for first in choose.sample(range(7), choose.randint(0, 3))
        ]
        engine.cache(choose.choice("ab"), [*tokens, 7], disjoint(ranges, choose.choice((35, 60))))
    assert len(engine.victims) > 100


def test_a_head_start_counts_a_use_as_later_and_no_more() -> None:
    """What was used again leaves after what was used once up to 100 us later, and before what was used later still."""

    class HeadStart(Lfu):
        head_start_us = 100

        def level(self, node) -> int:  # type: ignore[no-untyped-def]
            return int(node.hits > 0)

    engine = Engine(60, HeadStart)
    engine.cache("a", run(0, 2, 1))
    engine.cache("a", run(0, 2, 1))
    for at, after in ((1, 50), (2, 100)):
        engine.now += after
        engine.cache("a", run(at, 2, 1))
    engine.evict(6)
    assert [key[1][0] for key in engine.victims] == [1000] * 2 + [0] * 2 + [2000] * 2
    strict = Engine(60, lambda: SegmentedLru(1))
    for at in (0, 0, 1, 2):
        strict.now += 1
        strict.cache("a", run(at, 2, 1))
    strict.evict(6)
    assert [key[1][0] for key in strict.victims] == [1000] * 2 + [2000] * 2 + [0] * 2, "the control"
