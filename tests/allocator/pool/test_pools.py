"""Pools by profile: shared, strict partitions, dedicated pools, and fences over several of them (L1–L3 of pools)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcustody.allocator.manager.check_invariants import check
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.allocator.prefix.longest_prefix import Chain, Prompt, ReadPlan
from kvcustody.errors import CapacityError, HandleError
from kvcustody.governance.governor.pools import Pools
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.allocator.world import SECOND, SIZE, run, state_of

POLICY = """
schema: kvcustody/policy@1
name: pools
profile: {profile}
classifications: [low]
tenants:
  a: {{quota: {{guaranteed: 25%, cap: {cap}{borrow}}}}}
  b: {{quota: {{guaranteed: 50%, cap: {cap2}{borrow}}}}}
{more}
retention: {{low: {{idle: 1h, absolute: 8h, active_max: 1h}}}}
scrub: {{default: {{within: 1s, verify: all}}}}
offload: {{low: never}}
audit: {{on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}}}
eviction: {{policy: lru}}
"""


def table(profile: str, more: str = "", revision: int = 1, cap: str = "25%", cap2: str = "50%"):
    text = POLICY.format(
        profile=profile, more=more, cap=cap, cap2=cap2, borrow=", borrow: true" if profile == "shared" else ""
    )
    return compile_policy(load_policy(text, name="pools.yaml"), revision=revision)


class Engine:
    def __init__(self, profile: str, more: str = "", **caps: str) -> None:
        self.memories: list[UnbackedMemory] = []
        self.table = table(profile, more, **caps)
        options = PoolOptions(block_tokens=SIZE, evict_ahead=4, scrub_batch=4, reserve_low=8, reserve_high=16)
        self.pools = Pools(self.memory, 64, options)
        self.pools.boot(self.table)
        self.domains: dict[str, Chain] = {}
        self.now = SECOND

    def memory(self, blocks: int) -> UnbackedMemory:
        self.memories.append(UnbackedMemory(blocks, 0))
        return self.memories[-1]

    def admit(self, name: str, tokens: list[int]):
        account, manager = self.pools.account(name, self.table)
        chain = self.domains.get(name)
        if chain is None:
            chain = self.domains[name] = Chain(manager.domain(account), state_of(name))
        count = len(tokens)
        data = np.array(tokens, dtype=np.int32).tobytes()
        prompt = Prompt(data, count, count // SIZE, (count - 1) // SIZE, 4 * SIZE, {})
        residency = manager.residency(account, chain.domain, object(), None, self.now)
        found = manager.match_prefix(ReadPlan(chain), prompt, self.now)
        return manager, manager.allocate(object(), found, prompt, residency, self.now)

    def request(self, name: str, tokens: list[int]) -> tuple[object, ...]:
        """Run one whole request; return everything that its tenant can observe."""
        manager, sequence = self.admit(name, tokens)
        if isinstance(sequence, str):
            return (sequence,)
        manager.commit(sequence, len(tokens), self.now)
        seen = (sequence.hit_blocks, tuple(sequence.blocks.tolist()))
        manager.release(sequence, self.now, "finished")
        return seen

    def step(self) -> None:
        self.now += SECOND
        for manager in self.pools.managers:
            manager.step(self.now)
            assert not check(manager)


def test_shared_is_one_pool_with_guarantees_and_caps():
    engine = Engine("shared", cap="100%", cap2="60%")
    assert [memory.blocks for memory in engine.memories] == [64]
    accounts = engine.pools.managers[0].accounts
    assert [(a.guaranteed_blocks, a.cap_blocks) for a in accounts.values()] == [(16, 64), (32, 38)]


def test_strict_gives_each_tenant_its_own_range_reserve_and_queue():
    engine = Engine("strict")
    assert [memory.blocks for memory in engine.memories] == [64]
    partitions = engine.pools.managers[0].pool.partitions
    assert [(p.first, p.size, p.reserve_low, p.reserve_high) for p in partitions] == [
        (0, 16, 2, 4),
        (16, 32, 4, 8),
    ]
    for at in range(20):
        for name, first, last in (("a", 0, 16), ("b", 16, 48)):
            _, blocks = engine.request(name, run(at, 10, 1))
            assert all(first <= block < last for block in blocks)
        engine.step()


def transcript(profile: str, seed: int, other: float) -> list[object]:
    """Return what b observes while a is idle (`other` 0) or busy."""
    engine = Engine(profile, cap="100%", cap2="100%") if profile == "shared" else Engine(profile)
    rng, noise = random.Random(seed), random.Random(99)
    seen = []
    for _ in range(200):
        if noise.random() < other:
            engine.request("a", run(noise.randrange(5), noise.randrange(1, 15), 1))
        seen.append(engine.request("b", run(rng.randrange(9), rng.randrange(1, 31), 1)))
        engine.step()
    return seen


@pytest.mark.parametrize("profile", ["strict", "dedicated"])
def test_two_worlds_a_neighbours_load_changes_nothing(profile):
    assert transcript(profile, 5, 0.0) == transcript(profile, 5, 0.9)


def test_positive_control_in_a_shared_pool_the_neighbour_is_visible():
    assert transcript("shared", 5, 0.0) != transcript("shared", 5, 0.9)


def test_dedicated_gives_each_tenant_a_pool_and_memory_of_its_own():
    engine = Engine("dedicated")
    assert [memory.blocks for memory in engine.memories] == [16, 32]
    assert engine.admit("a", run(1, 4))[0] is not engine.admit("b", run(1, 4))[0]
    assert engine.admit("a", run(2, 13))[1] == "over-quota"
    assert all(
        manager.pool.memory is memory for manager, memory in zip(engine.pools.managers, engine.memories, strict=True)
    )


@pytest.mark.parametrize("profile", ["strict", "dedicated"])
def test_an_unlisted_tenant_gets_its_share_while_there_is_room(profile):
    engine = Engine(profile, "  default: {tenants_max: 2, quota: {guaranteed: 12.5%, cap: 12.5%}}")
    for name in ("x", "y"):
        assert engine.request(name, run(1, 8)) != ("over-quota",)
    engine.step()
    with pytest.raises(CapacityError, match="`z`"):
        engine.request("z", run(1, 1))
    with pytest.raises(CapacityError, match="not in the policy"):
        Engine(profile).request("x", run(1, 1))
    total = sum(sum(p.size for p in manager.pool.partitions) for manager in engine.pools.managers)
    assert total == 64


def test_a_new_revision_changes_limits_at_once():
    engine = Engine("shared", cap="50%", cap2="50%")
    assert engine.request("a", run(1, 20, 1))[0] == 0
    engine.table = table("shared", cap="25%", cap2="50%", revision=2)
    engine.pools.limit(engine.table)
    assert engine.request("a", run(2, 20, 1)) == ("over-quota",)
    engine.step()


def test_one_fence_spans_pools_and_retires_once():
    engine = Engine("dedicated")
    one = engine.pools.open_fence({0, 1}, engine.now)
    two = engine.pools.open_fence({1}, engine.now)
    assert (one.number, sorted(one.by_pool), sorted(two.by_pool)) == (1, [0, 1], [1])
    engine.pools.retire_fence(one.number)
    engine.pools.retire_fence(one.number)
    assert [len(manager.pool.fences) for manager in engine.pools.managers] == [0, 1]
    for wrong in (0, 3):
        with pytest.raises(HandleError, match="never opened"):
            engine.pools.retire_fence(wrong)
