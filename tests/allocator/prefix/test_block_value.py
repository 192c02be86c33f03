"""Eviction by value: each signal changes the order; whose pauses move whose order; what is bounded.

Every case is run in our own tree and in a pool that an engine allocates by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from kvcustody.allocator.prefix.eviction_policy import SIGNALS, EvictionPolicy, Lru, ValueAware
from kvcustody.allocator.prefix.think_times import EVIDENCE_MAX, PAUSES, ThinkTimes
from kvcustody.governance.decisions.eviction_order import eviction_orders
from kvcustody.policies.document.model import EvictionSignal
from kvcustody.policies.reading.load_policy import load_policy
from standins.allocator.ranked_engine import Engine
from standins.allocator.world import MINUTE, SECOND, World, run

Make = Callable[[], EvictionPolicy]
BASE = (Path(__file__).parents[2] / "policies" / "strict.yaml").read_text()
POOLS = ("own", "external")


class Cache(Protocol):
    """The interface to either pool that the cases need."""

    def use(self, at: int, *, of: str = "a", blocks: int = 2, after_us: int = 1) -> int:
        """Run a request for prompt `at`; return its hit in blocks."""

    def evict(self, count: int, of: str = "a") -> None:
        """Evict so many of the tenant's blocks."""

    def hit(self, at: int, *, of: str = "a", blocks: int = 2) -> int:
        """Return what a request would find."""

    def domain(self, name: str, owner: str, **facts: int) -> None:
        """One more domain of a tenant."""


class OwnPool:
    def __init__(self, policy: Make, blocks: int = 4000) -> None:
        self.world = World(blocks, ("a", "b"), policy=policy)

    def use(self, at: int, *, of: str = "a", blocks: int = 2, after_us: int = 1) -> int:
        self.world.now += after_us
        return self.world.cache(of, run(at, blocks, 1))

    def evict(self, count: int, of: str = "a") -> None:
        self.world.m.tree.evict(self.world.m.accounts[of], count, self.world.now, "test")
        self.world.ok()

    def hit(self, at: int, *, of: str = "a", blocks: int = 2) -> int:
        return self.world.hit(of, run(at, blocks, 1))

    def domain(self, name: str, owner: str, **facts: int) -> None:
        self.world.domain(name, owner, **facts)


class EnginesPool:
    def __init__(self, policy: Make, blocks: int = 4000) -> None:
        self.engine = Engine(blocks, policy, ("a", "b"))

    def use(self, at: int, *, of: str = "a", blocks: int = 2, after_us: int = 1) -> int:
        self.engine.now += after_us
        return self.engine.cache(of, run(at, blocks, 1))

    def evict(self, count: int, of: str = "a") -> None:
        account = self.engine.pool.accounts[of]
        names = {block: key for key, block in self.engine.index.items()}
        victims = self.engine.pool.victims(count, self.engine.now, account)
        self.engine.victims += [names[block] for block in victims]
        ended = self.engine.pool.evict(_blocks(victims), "evicted", self.engine.now)
        self.engine.forget(ended)
        self.engine.check()

    def hit(self, at: int, *, of: str = "a", blocks: int = 2) -> int:
        return self.engine.hit(of, run(at, blocks, 1))

    def domain(self, name: str, owner: str, **facts: int) -> None:
        account = self.engine.pool.account(owner)
        self.engine.domains[name] = self.engine.pool.domain(account, **facts)


def _blocks(found: Sequence[int]):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.array(found, dtype=np.int64)


def opened(pool: str, policy: Make) -> Cache:
    return OwnPool(policy) if pool == "own" else EnginesPool(policy)


def by_value(*signals: str, attention_depth: int = 512) -> Make:
    return lambda: ValueAware(frozenset(signals), attention_depth=attention_depth)


def later_ones_first(pool: str, signal: str, fill: Callable[[Cache], None], *, of: str = "a", depth: int = 512) -> None:
    """`fill` caches the dearer prompt 0 and then a plain prompt 1: with the signal the later one goes first."""
    for signals, gone in (
        ((signal,), 1),
        ((), 0),
        ((s for s in SIGNALS if s not in (signal, "pressure")), 0),
    ):
        cache = opened(pool, by_value(*signals, attention_depth=depth))
        fill(cache)
        cache.evict(1)
        left = [cache.hit(0, of=of), cache.hit(1, of="a")]
        assert left[gone] == 1 and left[1 - gone] == 2, (signal, signals, left)


def test_the_names_are_the_policys() -> None:
    assert set(SIGNALS) == {each.value for each in EvictionSignal}


@pytest.mark.parametrize("pool", POOLS)
def test_reuse(pool: str) -> None:
    def fill(cache: Cache) -> None:
        for at in (0, 0, 1):
            cache.use(at)

    later_ones_first(pool, "reuse", fill)


@pytest.mark.parametrize("pool", POOLS)
def test_scope(pool: str) -> None:
    """What a whole tenant may reuse outlasts what one subject may."""

    def fill(cache: Cache) -> None:
        cache.domain("wide", "a", reach=2, idle_us=60 * MINUTE, absolute_us=60 * MINUTE)
        cache.use(0, of="wide")
        cache.use(1)

    later_ones_first(pool, "scope", fill, of="wide")


@pytest.mark.parametrize("pool", POOLS)
def test_freshness(pool: str) -> None:
    """What is near its ceiling goes before what is older by its use, and new."""

    def fill(cache: Cache) -> None:
        cache.domain("brief", "a", idle_us=10 * SECOND, absolute_us=10 * SECOND)
        cache.use(1, of="brief")
        cache.use(0, after_us=4 * SECOND)
        cache.use(1, of="brief", after_us=4 * SECOND)

    for signals, left in ((("freshness",), (2, 1)), ((), (1, 2))):
        cache = opened(pool, by_value(*signals))
        fill(cache)
        cache.evict(1)
        assert (cache.hit(0), cache.hit(1, of="brief")) == left


@pytest.mark.parametrize("pool", POOLS)
def test_position(pool: str) -> None:
    """The end of a long prompt is dearer than a short one that was used after it."""
    for signals, left in ((("position",), (64, 1)), ((), (63, 2))):
        cache = opened(pool, by_value(*signals, attention_depth=8))
        cache.use(0, blocks=60)
        cache.use(0, blocks=64)  # the last four are a run of their own, deep down
        cache.use(1)
        cache.evict(1)
        assert (cache.hit(0, blocks=64), cache.hit(1)) == left


def returns(cache: Cache, of: str, first: int, rounds: int = 40) -> None:
    """Prompts that came back after a second come again, and those that waited a minute never do."""
    for at in range(first, first + rounds):
        cache.use(at, of=of)
        cache.use(at, of=of, after_us=SECOND)
        cache.use(at, of=of, after_us=SECOND)
        cache.use(1000 + at, of=of)
        cache.use(1000 + at, of=of, after_us=MINUTE)
    cache.evict(2, of)  # so that something is known of how long things last


@pytest.mark.parametrize("pool", POOLS)
def test_next_turn(pool: str) -> None:
    def order(*signals: str) -> tuple[int, int]:
        cache = opened(pool, by_value(*signals))
        returns(cache, "a", 100)
        cache.use(0)
        cache.use(0, after_us=SECOND)
        cache.use(1)
        cache.use(1, after_us=MINUTE)
        while cache.hit(0) == cache.hit(1) == 2:
            cache.evict(1)
        return cache.hit(0), cache.hit(1)

    assert order("next-turn") == (2, 1), "what paused for a second is expected again, what paused for a minute is not"
    assert order() == (1, 2), "the control"


@pytest.mark.parametrize("pool", POOLS)
def test_pressure(pool: str) -> None:
    """Signals rank while what is given up is young; when it is old, the least recently used goes first."""

    def order(pause_us: int, *signals: str) -> tuple[int, int]:
        cache = opened(pool, by_value("reuse", *signals))
        for at in range(100, 120):
            cache.use(at, after_us=pause_us)
        for _ in range(40):
            cache.evict(1)  # the lifetime of the cache follows
        for at in (0, 0, 1):
            cache.use(at)
        cache.evict(1)
        return cache.hit(0), cache.hit(1)

    assert order(10 * MINUTE, "pressure") == (1, 2)
    assert order(SECOND, "pressure") == (2, 1)
    assert order(10 * MINUTE) == order(SECOND) == (2, 1), "the control: without the signal it always ranks"


@pytest.mark.parametrize("pool", POOLS)
def test_without_pressure_it_is_the_least_recently_used(pool: str) -> None:
    hits = []
    for policy in (Lru, by_value(*SIGNALS)):
        cache = OwnPool(policy) if pool == "own" else EnginesPool(policy)
        for at in (0, 1, 2, 1, 0, 3):
            cache.use(at)
        cache.evict(2)
        hits.append([cache.hit(at) for at in range(4)])
    assert hits[0] == hits[1] == [2, 2, 0, 2]


# -- whose pauses ---------------------------------------------------------------------------------------------------


def order_of_b(pool: str, policy: str, *, busy: bool) -> tuple[int, int]:
    """Which of b's two prompts goes first, after tenant a has shown its own pauses, or nothing."""
    rules = load_policy(policy, name="p.yaml").eviction
    cache = opened(pool, eviction_orders(rules))
    for at in range(3):  # b gives something up, so that it knows how long things last
        cache.use(2000 + at, of="b", after_us=10 * MINUTE)
    cache.evict(1, "b")
    if busy:
        returns(cache, "a", 100)
    else:
        cache.use(100, after_us=40 * (MINUTE + 2 * SECOND))
    cache.use(0, of="b")
    cache.use(0, of="b", after_us=SECOND)
    cache.use(1, of="b")
    cache.use(1, of="b", after_us=MINUTE)
    while cache.hit(0, of="b") == cache.hit(1, of="b") == 2:
        cache.evict(1, "b")
    return cache.hit(0, of="b"), cache.hit(1, of="b")


def policy_of(text: str) -> str:
    labs = "labs: {quota: {guaranteed: 10%, cap: 10%}}"
    return BASE.replace("labs: {}", labs) + f"\neviction: {{policy: value, signals: [next-turn]{text}}}\n"


@pytest.mark.parametrize("pool", POOLS)
def test_one_tenants_pauses_do_not_move_anothers_order_in_strict(pool: str) -> None:
    """The control: where the policy lets everybody learn from everybody, which no isolating profile may, they do."""
    strict = policy_of("")
    assert "profile: strict" in strict
    assert order_of_b(pool, strict, busy=True) == order_of_b(pool, strict, busy=False) == (1, 2)
    shared = policy_of(", learned: pool").replace("profile: strict", "profile: shared")
    assert order_of_b(pool, shared, busy=False) == (1, 2)
    assert order_of_b(pool, shared, busy=True) == (2, 1)


# -- bounds ---------------------------------------------------------------------------------------------------------


def test_what_is_learned_is_bounded_and_forgets() -> None:
    learned = ThinkTimes()
    for at in range(3000):
        learned.kept(1 << (at % 60), 1 << 12)
        learned.returned(1 << (at % 60), 1 << 12, 1 << ((at * 7) % 60))
    assert max(learned._kept) < EVIDENCE_MAX + (1 << 12)
    assert len(learned._kept) == PAUSES + 1 == len(learned._returned)
    assert {len(row) for row in learned._returned} == {PAUSES}
    assert max(map(max, learned._returned)) < 2 * EVIDENCE_MAX


def test_levels_stay_few_however_long_it_runs() -> None:
    """A heap of levels, not of nodes: 3,000 evictions leave no more levels than points there are."""
    pool = OwnPool(by_value(*(each for each in SIGNALS if each != "pressure")), blocks=60)
    for at in range(3000):
        pool.use(at % 97 if at % 3 else 7, blocks=3)
    queue = pool.world.m.tree.queues[pool.world.m.accounts["a"]]
    assert sum(pool.world.m.tree.evicted.values()) > 2000
    assert len(queue._levels) < 128
