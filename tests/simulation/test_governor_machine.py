"""The Governor against the same dict model: who hits what, under policy, time and erasure (L4, L8)."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcustody.clock import VirtualClock
from kvcustody.errors import HandleError
from kvcustody.governance.admission_outcome import Admission, Deferred
from kvcustody.governance.erasure.selector import Selector
from standins.simulation.governed import LOW_ABSOLUTE_US, LOW_IDLE_US, MODEL, governor, person
from standins.simulation.manager_machine import DEEP, QUICK, causes, machine, some
from standins.simulation.model import SIZE, Limits, Model
from standins.simulation.simulation import BASES, SECOND

PEOPLE = [("a", "mia"), ("a", "noa"), ("b", "mia")]
LOW, HIGH = Limits(LOW_IDLE_US, LOW_ABSOLUTE_US), Limits(0, 0)


class GovernorMachine(RuleBasedStateMachine):
    blocks = 4096
    exact = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.governor = governor(self.blocks, self.clock)
        names = [f"{tenant}/{subject}" for tenant, subject in PEOPLE]
        self.model = Model(
            {f"{name}/{level}": LOW if level == "low" else HIGH for name in names for level in ("low", "high")}
        )
        self.live: list[object] = []
        self.ended: list[object] = []
        self.fences: list[int] = []
        self.opened = self.released = self.hits = 0
        self.retired = False

    def pick(self, at: int) -> object:
        return self.live[at % len(self.live)]

    @rule(
        who=st.sampled_from(PEOPLE),
        base=st.sampled_from(BASES),
        cut=st.integers(0, 48),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        high=st.sampled_from((False, False, False, True)),
    )
    def admit(self, who, base, cut, tail, high):
        tokens = base[:cut] + tail
        name = f"{who[0]}/{who[1]}/{'high' if high else 'low'}"
        expected = self.model.hit(name, tokens, self.clock.now_us())
        got = self.governor.admit(person(*who), MODEL, tokens, route="/v1/high" if high else None)
        if isinstance(got, Deferred):
            assert not self.exact
            return
        assert isinstance(got, Admission)
        assert got.hit_tokens == expected * SIZE or (not self.exact and got.hit_tokens < expected * SIZE)
        self.hits += got.hit_tokens
        self.opened += 1
        self.live.append(got.request_id)
        if self.exact:
            self.model.admit(got.request_id, name, tokens, expected)
        else:  # an upper bound needs no more than what was ever computed, and when
            self.model.admit(got.request_id, name, tokens, 0)
        self.compute(got.request_id, len(tokens))

    def compute(self, id_: object, computed: int) -> None:
        self.governor.commit([id_], [computed])
        if self.exact:
            pool = self.governor.managers[0].pool
            handles = [(block, int(pool.generation[block])) for block in self.governor.blocks(id_).tolist()]
            self.model.commit(id_, computed, self.clock.now_us(), handles)

    @precondition(lambda self: self.live)
    @rule(at=some, count=st.integers(1, 5), token=st.integers(0, 3))
    def extend(self, at, count, token):
        ids = list(dict.fromkeys(self.pick(at + step) for step in range(count)))
        stalled = self.governor.extend_many(ids, [token] * len(ids))
        assert not (stalled and self.exact)
        for id_ in ids:
            if id_ not in stalled:
                request = self.model.running[id_]
                request.tokens.append(token)
                request.computed = len(request.tokens) - 1

    @precondition(lambda self: 0 < len(self.live) < 12)
    @rule(at=some)
    def fork(self, at):
        parent, child = self.pick(at), f"child-{self.opened}"
        before = self.model.running[parent].computed
        got = self.governor.fork(parent, child)
        if self.exact:
            self.compute(parent, before)
        self.model.fork(parent, got.request_id)
        self.opened += 1
        self.live.append(got.request_id)

    @precondition(lambda self: self.live)
    @rule(at=some, cause=causes)
    def release(self, at, cause):
        id_ = self.pick(at)
        self.finish(id_, lambda: self.governor.release(id_, cause))

    @precondition(lambda self: self.live)
    @rule(at=some)
    def abort_or_preempt(self, at):
        id_ = self.pick(at)
        self.finish(id_, lambda: (self.governor.abort if at % 2 else self.governor.preempt)(id_))

    def finish(self, id_: object, end) -> None:
        self.live.remove(id_)
        if self.exact:
            request, pool = self.model.running[id_], self.governor.managers[0].pool
            handles = [(block, int(pool.generation[block])) for block in self.governor.blocks(id_).tolist()]
            self.model.commit(id_, request.computed, self.clock.now_us(), handles)
        assert end() is not False
        self.model.release(id_, self.clock.now_us())
        self.released += 1
        self.ended.append(id_)

    @precondition(lambda self: self.ended)
    @rule(at=some)
    def an_ended_request_is_over(self, at):
        id_ = self.ended[at % len(self.ended)]
        assert not self.governor.release(id_)
        assert not self.governor.abort(id_)
        for call in (
            lambda: self.governor.commit([id_], [1]),
            lambda: self.governor.extend_many([id_], [1]),
            lambda: self.governor.blocks(id_),
            lambda: self.governor.fork(id_, "again"),
            lambda: self.governor.fence([id_]),
        ):
            with pytest.raises(HandleError):
                call()

    @precondition(lambda self: self.live)
    @rule(at=some)
    def fence(self, at):
        if len(self.fences) > 3:
            self.retire(0)
        self.fences.append(self.governor.fence([self.pick(at), self.pick(at + 1)]))

    @precondition(lambda self: self.fences)
    @rule(at=some)
    def retire(self, at):
        fence = self.fences.pop(at % len(self.fences))
        self.governor.retire(fence)
        self.governor.retire(fence)
        self.retired = True  # what was stuck on it stays a finding until the next step

    @rule(by=st.sampled_from((1, SECOND, 7 * SECOND, 30 * SECOND)), back=st.booleans())
    def wait(self, by, back):
        self.clock.advance(by)
        if back:
            self.clock.step_utc(-86_400 * SECOND)  # dates may jump; deadlines do not care

    @rule()
    def step(self):
        for id_ in self.governor.managers[0].decode.overrunning(self.clock.now_us()):
            request = self.model.running[id_.id]
            if self.exact:
                pool = self.governor.managers[0].pool
                handles = [(block, int(pool.generation[block])) for block in id_.blocks.tolist()]
                self.model.commit(id_.id, request.computed, self.clock.now_us(), handles)
        self.retired = False
        for id_ in self.governor.step():
            self.live.remove(id_)
            self.model.release(id_, self.clock.now_us())
            self.released += 1
            self.ended.append(id_)

    @rule(who=st.sampled_from(PEOPLE))
    def erase(self, who):
        name = f"{who[0]}/{who[1]}"
        mine = [id_ for id_ in self.live if self.model.running[id_].name.startswith(f"{name}/")]
        result = self.governor.erase(Selector(tenant=who[0], subject=who[1]))
        assert result.aborted_requests == len(mine)
        for id_ in mine:
            self.live.remove(id_)
            del self.model.running[id_]
            self.released += 1
            self.ended.append(id_)
        for level in ("low", "high"):
            self.model.forget(f"{name}/{level}")
        for node in _nodes(self.governor):
            assert (node.domain.label.tenant, node.domain.label.subject) != who

    @invariant()
    def holds(self):
        assert self.governor.check() == []
        found = {finding.orphan for finding in self.governor.scan()}
        assert found <= ({"stuck fence"} if self.fences or self.retired else set())
        assert self.governor.stats().running == len(self.live)

    def teardown(self):
        for fence in self.fences:
            self.governor.retire(fence)
        self.governor.close()
        counts = self.governor._ledger.counts
        assert counts["ResidencyOpened"] == counts["ResidencyReleased"] == self.opened
        stats = self.governor.stats().pools[0]
        assert stats.by_state["clean"] == stats.total
        assert stats.scrubbed[0] == stats.total + stats.allocated  # at boot, and once for each hand-out
        assert self.governor.check() == []


def _nodes(of) -> list:
    return list(of.managers[0].tree.nodes())


class TightGovernorMachine(GovernorMachine):
    """A pool that evicts: invariants, erasure and conservation only; its hits are bounded by what was ever computed."""

    blocks = 48
    exact = False

    @rule(
        who=st.sampled_from(PEOPLE),
        base=st.sampled_from(BASES),
        cut=st.integers(0, 48),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        high=st.booleans(),
    )
    def admit(self, who, base, cut, tail, high):
        tokens = base[:cut] + tail
        got = self.governor.admit(person(*who), MODEL, tokens, route="/v1/high" if high else None)
        if isinstance(got, Deferred):
            return
        assert not (high and got.hit_tokens)
        name = f"{who[0]}/{who[1]}/{'high' if high else 'low'}"
        self.opened += 1
        self.live.append(got.request_id)
        self.model.admit(got.request_id, name, tokens, 0)
        self.governor.commit([got.request_id], [len(tokens)])


TestGovernorExactly = machine(GovernorMachine, QUICK)
TestGovernorEvicting = machine(TightGovernorMachine, QUICK)


class DeepGovernorMachine(GovernorMachine):
    pass


class DeepTightGovernorMachine(TightGovernorMachine):
    pass


TestGovernorExactlyDeep = pytest.mark.soak(machine(DeepGovernorMachine, DEEP))
TestGovernorEvictingDeep = pytest.mark.soak(machine(DeepTightGovernorMachine, DEEP))
