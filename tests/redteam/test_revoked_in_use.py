"""What is revoked or expires while a request reads it: that request ends in time, and nothing reads it anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.governance.decisions.reuse_decision import ReuseDecider
from kvcustody.governance.decisions.segment_matcher import declare
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.policies.table.decision_table import DecisionTable
from standins.builders import keyring_in_memory
from standins.redteam.two_worlds import BLOCK, ISSUER, MODEL, World, table

DAY, ACTIVE_MAX = 86_400 * MICROSECONDS, 8 * 3600 * MICROSECONDS
PROMPT = list(range(1, 6 * BLOCK + 1))
ASKED = [*PROMPT, *range(9_000, 9_000 + BLOCK)]
UNTIL = "until: 2026-01-02"


def grant(end: str = UNTIL) -> str:
    return f"grants: [{{id: way, owner: victim, reader: attacker, at_most: low, {end}, reason: t}}]"


class InUse:
    """A request of the attacker's that reads the victim's blocks through `way`, a grant or a segment of one day."""

    def __init__(self, kind: str) -> None:
        ring = keyring_in_memory(VirtualClock())
        self.sharing = grant() if kind == "grant" else self._segment(ring)
        self.world = World(self.table(), blocks=512, keyring=ring)
        self.world.clock.advance(DAY - MICROSECONDS)
        self.world.step()
        self.world.ask("victim", PROMPT)
        for _ in range(2):
            self.parent = self.admit()
            self.world.governor.settle()
            assert isinstance(self.parent, Admission)
            if self.parent.hit_tokens == 0:
                self.world.governor.abort(self.parent.request_id)
        assert self.parent.hit_tokens >= 4 * BLOCK, "void: it must read the victim's blocks"
        self.world.governor.commit([self.parent.request_id], [len(ASKED)])

    def _segment(self, ring: Keyring) -> str:
        owner = tenant_owner(ISSUER, "victim")
        ring.ensure([owner])
        made = declare(ring, owner, PROMPT, model=MODEL.digest, block_tokens=BLOCK)
        who = "id: way, owner: victim, tenants: [victim, attacker], classification: low"
        return f"segments: [{{{who}, digest: 'hmac:{made.digest}', tokens: {made.tokens}, expires: 2026-01-02}}]"

    def table(self, *, sharing: str | None = None, revision: int = 1) -> DecisionTable:
        return table(sharing=self.sharing if sharing is None else sharing, revision=revision)

    def admit(self) -> Any:
        return self.world.admit("attacker", ASKED, salt="s")

    def fork(self) -> Admission | AdmissionRefused:
        return self.world.governor.fork(self.parent.request_id, "child")

    def resumed_hit(self) -> int:
        """What the parent is served of the victim's when it is preempted and runs again; its own continuation aside."""
        governor = self.world.governor
        self.world.ask("victim", PROMPT)
        governor.preempt(self.parent.request_id)
        again = self.admit()
        domain = governor.running[again.request_id].residency.domain
        node, foreign = governor.running[again.request_id].leaf, 0
        while node is not None:
            foreign += node.length * (node.domain is not domain) * (node.domain.owner.name == "victim")
            node = node.parent
        hit = min(foreign * BLOCK, again.hit_tokens)
        governor.abort(again.request_id)
        return hit


ENDINGS: dict[str, Callable[[InUse], None]] = {
    "revoked": lambda use: use.world.governor.revoke(["way"], actor="t"),
    "expired": lambda use: use.world.step(MICROSECONDS),
    "a revision without it": lambda use: use.world.governor.activate(use.table(sharing="", revision=2), actor="t"),
}


@pytest.fixture(params=["grant", "segment"])
def use(request: Any) -> InUse:
    return InUse(request.param)


@pytest.mark.parametrize("how", ENDINGS)
def test_no_fork_reads_it(use: InUse, how: str) -> None:
    ENDINGS[how](use)
    child = use.fork()
    assert isinstance(child, AdmissionRefused) and child.request_id == "child"
    assert sum(use.world.governor.tenant_counters["attacker"].denials.values()) == 1
    assert use.world.governor.check() == []


@pytest.mark.parametrize("how", ENDINGS)
def test_no_resumed_request_reads_it(use: InUse, how: str) -> None:
    ENDINGS[how](use)
    assert use.resumed_hit() == 0


def test_control_while_it_lasts_it_is_forked_and_resumed(use: InUse) -> None:
    child = use.fork()
    assert isinstance(child, Admission) and child.hit_tokens >= use.parent.hit_tokens
    use.world.governor.release(("attacker", "child"))
    assert use.resumed_hit() > 0


@pytest.mark.parametrize("how", ENDINGS)
def test_positive_control_without_the_look_a_child_reads_it(
    use: InUse, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Governor, "may_fork", lambda self, request_id: True)
    ENDINGS[how](use)
    child = use.fork()
    assert isinstance(child, Admission)
    shared = set(use.parent.blocks.tolist()) & set(child.blocks.tolist())
    assert len(shared) >= 4, "the child reads the victim's blocks"


def test_positive_control_without_the_decision_a_resumed_request_reads_it(
    use: InUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what has expired; to what is revoked no plan leads, so the decision is the second defence there."""
    monkeypatch.setattr(ReuseDecider, "may", lambda self, plan, entry, counters, moment: True)
    plan = use.world.governor._book._by_key
    for each in plan.values():
        each.valid_until_utc_us = 1 << 62
    ENDINGS["expired"](use)
    assert use.resumed_hit() > 0


@pytest.mark.parametrize("how", ENDINGS)
def test_what_runs_goes_on_and_is_ended_at_active_max(use: InUse, how: str) -> None:
    governor, world = use.world.governor, use.world
    ENDINGS[how](use)
    assert governor.extend_many([use.parent.request_id], [1]) == ()
    world.clock.advance(ACTIVE_MAX - 2 * MICROSECONDS)
    assert governor.step() == ()
    assert governor.extend_many([use.parent.request_id], [2]) == ()
    world.clock.advance(2 * MICROSECONDS)
    assert governor.step() == (use.parent.request_id,)
    assert not governor.running


def test_an_expired_revision_forks_nothing_across_tenants(use: InUse) -> None:
    governor = use.world.governor
    governor.activate(use.table(revision=2), actor="t", expires_utc_us=use.world.time.utc_us() + MICROSECONDS // 2)
    use.world.clock.advance(MICROSECONDS // 2)
    assert isinstance(use.fork(), AdmissionRefused)


def test_what_was_erased_and_let_finish_has_no_child(use: InUse) -> None:
    """A child would run beside the erasure's count of what still runs."""
    governor = use.world.governor
    own = use.world.admit("attacker", ASKED[::-1], subject="mia")
    assert governor.may_fork(own.request_id), "control"
    order = Selector(tenant="attacker", subject="mia")
    governor._end_selected(order, governor.clock.now_us() + 1, finish=True)
    assert own.request_id in governor.running
    assert not governor.may_fork(own.request_id)
