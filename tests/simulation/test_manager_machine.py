"""The block manager against a dict model, as a Hypothesis state machine and as long seeded drives (L1–L10)."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcustody.allocator.prefix.eviction_policy import POLICIES
from standins.simulation.manager_machine import DEEP, QUICK, causes, machine, some
from standins.simulation.simulation import BASES, SECOND, drive, roomy, tight


class ManagerMachine(RuleBasedStateMachine):
    make = staticmethod(roomy)

    def __init__(self) -> None:
        super().__init__()
        self.simulation = self.make()

    def pick(self, at: int) -> object:
        ids = list(self.simulation.live)
        return ids[at % len(ids)]

    @rule(
        name=st.sampled_from("abc"),
        base=st.sampled_from(BASES),
        cut=st.integers(0, 48),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        principal=st.sampled_from("mno"),
        computed=st.sampled_from((0.0, 0.5, 1.0, 1.0)),
    )
    def admit(self, name, base, cut, tail, principal, computed):
        self.simulation.admit(name, base[:cut] + tail, principal, computed)

    @precondition(lambda self: self.simulation.live)
    @rule(at=some, share=st.floats(0, 1))
    def commit(self, at, share):
        id_ = self.pick(at)
        self.simulation.commit(id_, int(share * len(self.simulation.model.running[id_].tokens)))

    @precondition(lambda self: self.simulation.live)
    @rule(at=some, many=st.booleans(), token=st.integers(0, 3), times=st.integers(1, 6))
    def extend(self, at, many, token, times):
        ids = list(self.simulation.live) if many else [self.pick(at)]
        for _ in range(times):
            self.simulation.extend(ids, token)

    @precondition(lambda self: 0 < len(self.simulation.live) < 12)
    @rule(at=some)
    def fork(self, at):
        self.simulation.fork(self.pick(at))

    @precondition(lambda self: self.simulation.live)
    @rule(at=some, cause=causes)
    def release(self, at, cause):
        self.simulation.release(self.pick(at), cause)

    @rule(at=some, cause=causes)
    def release_again(self, at, cause):
        self.simulation.release_again(at, cause)

    @precondition(lambda self: self.simulation.live)
    @rule(first=some, count=st.integers(1, 4))
    def fence(self, first, count):
        self.simulation.fence([self.pick(first + at) for at in range(count)])

    @rule(at=some)
    def retire(self, at):
        self.simulation.retire(at)

    @rule(by=st.sampled_from((1, SECOND, 7 * SECOND, 30 * SECOND, 100 * SECOND)), sweep=st.booleans())
    def wait(self, by, sweep):
        self.simulation.wait(by, sweep=sweep)

    @invariant()
    def holds(self):
        self.simulation.verify()

    def teardown(self):
        self.simulation.close()


class TightMachine(ManagerMachine):
    make = staticmethod(tight)


TestManagerExactly = machine(ManagerMachine, QUICK)
TestManagerEvicting = machine(TightMachine, QUICK)


class DeepManagerMachine(ManagerMachine):
    pass


class DeepTightMachine(TightMachine):
    pass


TestManagerExactlyDeep = pytest.mark.soak(machine(DeepManagerMachine, DEEP))
TestManagerEvictingDeep = pytest.mark.soak(machine(DeepTightMachine, DEEP))


@pytest.mark.parametrize("seed", range(2))
def test_without_eviction_every_hit_is_the_models(seed):
    assert drive(roomy(), seed, 500).hits > 100


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_with_eviction_no_hit_exceeds_the_model(policy):
    simulation = drive(tight(policy=POLICIES[policy]), 7, 400)
    assert simulation.hits > 30
    assert sum(simulation.world.m.tree.evicted.values()) > 60


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [roomy, tight])
def test_long_drives(make, seed):
    drive(make(), 100 + seed, 125_000, every=50)
