"""`offload` is asked for where copies leave the device, `export` where events do, and each decision is on record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.audit.kinds import DecisionRecorded, Event, HitCounted
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError, LedgerUnavailable
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.decisions.authorize import authorize
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.identity.principal import identify
from kvcustody.integrations.events.block_event import BlockEvent, EventScope, cleared, removed, stored
from kvcustody.integrations.events.feed import BlockEventFeed, MayExport
from kvcustody.policies.document.model import Action
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from standins import builders
from standins.redteam.two_worlds import _POLICY, BLOCK, ISSUER, MODEL, ROOMY, KeepingLedger, World, table

PROMPT = list(range(1, 3 * BLOCK + 1))
FORBID = "  - {id: stays, effect: forbid, action: offload, when: {owner: attacker}}"


class Recording(KeepingLedger):
    """A ledger that keeps its class A events, and fails while told to."""

    failing = False

    def submit_durable(self, event: Event, /) -> int:
        if self.failing:
            raise LedgerUnavailable("away")
        return super().submit_durable(event)


def offloading(
    rules: str = FORBID, revision: int = 1, offload: str = "{tiers: [host], encrypt: none}"
) -> DecisionTable:
    """A policy whose lowest classification may be copied to the host, but for what `rules` say."""

    text = _POLICY.format(
        profile="shared", scope="tenant", tenants=ROOMY, classify="", sharing="", rules=rules, idle="30m"
    ).replace("low: never", f"low: {offload}")
    return compile_policy(load_policy(text, name="world.yaml"), revision=revision)


def port(decisions: DecisionTable, clock: VirtualClock | None = None, **how: bool) -> EnginePort:
    made = builders.port(decisions, clock, ledger=Recording(), block_tokens=BLOCK, **how)
    made.tiers.copies_leave = True
    return made


def ask(made: EnginePort, tenant: str, number: int = 0) -> Any:
    return made.admit(identify(issuer=ISSUER, tenant=tenant), MODEL, PROMPT, request_id=(tenant, number))


def recorded(made: EnginePort, kind: type) -> list[Any]:
    made.step()
    return [event for event in made._ledger.events if isinstance(event, kind)]  # type: ignore[attr-defined]


def test_beside_a_connector_that_keeps_copies_only_those_are_served_who_may_offload() -> None:
    engine_port = port(offloading())
    assert isinstance(ask(engine_port, "victim"), ExternalResidency)
    assert isinstance(ask(engine_port, "victim", 1), ExternalResidency)
    refused = ask(engine_port, "attacker")
    assert isinstance(refused, AdmissionRefused) and refused.reason == "policy: stays"
    permits = [event for event in recorded(engine_port, DecisionRecorded) if event.action == "offload"]
    assert [(event.reader, event.effect, event.reasons) for event in permits] == [
        ("victim", "permit", ("offload:low",))
    ]
    denials = [event for event in recorded(engine_port, HitCounted) if event.action == "offload"]
    assert [(event.tenant, event.effect, event.rule, event.requests) for event in denials] == [
        ("attacker", "deny", "stays", 1)
    ]


def test_control_where_no_copy_leaves_nobody_is_asked() -> None:
    made = port(offloading())
    made.tiers.copies_leave = False
    residency = ask(made, "attacker")
    assert isinstance(residency, ExternalResidency)
    assert not made.may_offload(residency) and made.may_offload(ask(made, "victim"))


@pytest.mark.parametrize("encrypt", ["required", "none"])
def test_who_must_be_encrypted_is_not_served_while_copies_rest_in_clear(encrypt: str) -> None:
    engine_port = port(offloading(offload=f"{{tiers: [host], encrypt: {encrypt}}}"))
    may_be_clear = encrypt == "none"
    for is_sealed, is_served in ((False, may_be_clear), (True, True), (False, may_be_clear)):
        engine_port.tiers.are_copies_sealed = lambda is_sealed=is_sealed: is_sealed
        answer = ask(engine_port, "victim")
        assert isinstance(answer, ExternalResidency) is is_served, (is_sealed, answer)
        if not is_served:
            assert answer.reason == "policy: copies-in-clear"
        else:
            engine_port.release(answer)
    refused = ask(engine_port, "attacker", 1)
    assert isinstance(refused, AdmissionRefused)
    engine_port.tiers.copies_leave = False
    assert isinstance(ask(engine_port, "victim", 2), ExternalResidency), "control: no copy leaves"


def test_a_permit_that_cannot_be_recorded_is_none() -> None:
    engine_port = port(offloading())
    engine_port.tiers.copies_leave = False
    residency = ask(engine_port, "victim")
    engine_port._ledger.failing = True  # type: ignore[attr-defined]
    assert not engine_port.may_offload(residency)
    engine_port.tiers.copies_leave = True
    again = ask(engine_port, "victim", 1)
    assert isinstance(again, AdmissionRefused) and "try again" in again.reason
    engine_port._ledger.failing = False  # type: ignore[attr-defined]
    assert engine_port.may_offload(residency)


def test_a_revision_that_takes_it_back_holds_before_it_is_on_record() -> None:
    engine_port = port(offloading(rules=""))
    residency = ask(engine_port, "attacker")
    assert engine_port.may_offload(residency)
    engine_port._ledger.failing = True  # type: ignore[attr-defined]
    with pytest.raises(LedgerUnavailable):
        engine_port.activate(offloading(revision=2), actor="t")
    engine_port._ledger.failing = False  # type: ignore[attr-defined]
    assert engine_port.table.revision == 1 and not engine_port.may_offload(residency)


def test_a_denied_admission_is_on_record_too() -> None:
    rules = "  - {id: banned, effect: forbid, action: admit, when: {owner: attacker}}"
    world = World(table(rules=rules), blocks=64, keep_events=True)
    assert isinstance(world.ask("attacker", PROMPT), AdmissionRefused)
    world.step()
    counted = [event for event in world.ledger.events if isinstance(event, HitCounted)]  # type: ignore[attr-defined]
    assert [(event.action, event.effect, event.rule) for event in counted] == [("admit", "deny", "banned")]


def test_positive_control_an_action_that_nobody_asks_for_is_permitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Permitted:
        permitted = True

    monkeypatch.setattr(EnginePort, "authorize", lambda self, action, plan, trace="": Permitted)
    assert isinstance(ask(port(offloading()), "attacker"), ExternalResidency)
    assert not authorize(offloading(), Action.OFFLOAD, "attacker", 0).permitted


@pytest.mark.parametrize("carried", [True, False], ids=["carried", "control"])
def test_a_request_that_is_preempted_again_and_again_ends_when_the_policy_says(carried: bool) -> None:
    """`active_max` counts from the first block of a request, not from that of its last residency (the control)."""
    clock = VirtualClock()
    engine_port = port(offloading(rules=""), clock)
    running: Any = ask(engine_port, "victim")
    ended: list[object] = []
    engine_port._engine.abort = lambda request_ids, cause: ended.extend(request_ids)  # type: ignore[method-assign]
    for hour in range(1, 10):
        engine_port.look_up(running, lambda key: -1)
        assert engine_port.may_start(running) is None
        engine_port.handed_out(running, [4 * hour + at for at in range(3)])
        clock.advance(3_600_000_000)
        engine_port.step()
        if ended:
            break
        engine_port.release(running, "preempted")
        running = engine_port.resume(running, PROMPT)
        if not carried:
            running.active_since_us = -1
    assert (hour, len(ended)) == ((8, 1) if carried else (9, 0))


EXPORTS = """\
  - {id: out, effect: permit, action: export, when: {reader: owner}}
  - {id: stays, effect: forbid, action: export, when: {owner: attacker}}"""


class Told(BlockEventFeed):
    """A feed of what a test says happened; `out` is what left."""

    def __init__(self, may_export: MayExport) -> None:
        super().__init__(self, lambda: 1, may_export)
        self.pending: list[BlockEvent] = []
        self.out: list[tuple[str, str]] = []

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        self.out += [(event.kind, event.scope.tenant) for event in events]
        return 0

    def take_pending(self) -> list[BlockEvent]:
        taken, self.pending = self.pending, []
        return taken

    def take_last(self) -> list[BlockEvent]:
        return [cleared(1, "shutdown")]

    def happen(self, *events: BlockEvent) -> list[tuple[str, str]]:
        self.pending, self.out = list(events), []
        self.publish_pending()
        return self.out


def begun(tenant: str) -> BlockEvent:
    return stored(EventScope(tenant, "tenant", "low", 1, 1), bytes(32), residency=1, block_tokens=BLOCK)


def ended(tenant: str) -> BlockEvent:
    return removed(EventScope(tenant, "tenant", "low", 1, 1), bytes(32), cause="evicted")


def test_block_events_leave_where_their_tenant_may_export() -> None:
    engine_port = port(offloading(EXPORTS))
    feed = Told(engine_port.may_export)
    both = [begun("victim"), begun("attacker"), ended("attacker"), ended("victim"), cleared(1, "reset")]
    left = [("stored", "victim"), ("removed", "victim"), ("cleared", "*")]
    assert feed.happen(*both) == left and feed.happen(*both) == left
    permits = [event for event in recorded(engine_port, DecisionRecorded) if event.action == "export"]
    assert [(event.reader, event.effect, event.reasons) for event in permits] == [("victim", "permit", ("out",))]
    denials = [event for event in recorded(engine_port, HitCounted) if event.action == "export"]
    assert {(event.tenant, event.effect, event.rule) for event in denials} == {("attacker", "deny", "stays")}
    everything = Told(lambda tenant, classification: True).happen(*both)
    assert len(everything) == len(both), "control: without the question everything leaves"


def test_what_was_told_is_taken_back_when_it_may_leave_no_more() -> None:
    made = port(offloading(EXPORTS))
    feed = Told(made.may_export)
    assert feed.happen(begun("victim")) == [("stored", "victim")]
    made.activate(offloading(EXPORTS.replace("owner: attacker", "owner: victim"), revision=2), actor="t")
    assert feed.happen(begun("victim"), ended("victim")) == [("removed", "victim")]
    assert Told(made.may_export).happen(ended("victim")) == [], "control: to whom nothing was told"


def test_no_block_event_leaves_before_its_permit_is_on_record() -> None:
    clock = VirtualClock()
    made = port(offloading(EXPORTS), clock)
    feed = Told(made.may_export)
    made._ledger.failing = True  # type: ignore[attr-defined]
    assert feed.happen(begun("victim"), ended("victim")) == []
    made._ledger.failing = False  # type: ignore[attr-defined]
    assert feed.happen(begun("victim")) == [], "an engine does not wait for the ledger at every step"
    clock.advance(10_000_000)
    assert feed.happen(begun("victim")) == [("stored", "victim")]


def asking(revision: int = 1) -> DecisionTable:
    text = offloading(revision=revision).policy.source
    return compile_policy(load_policy(text + "integrity: {default: {verify: 1/64}}\n", name="asks"), revision=revision)


def test_integrity_is_refused_where_nothing_sums_the_engines_blocks() -> None:
    with pytest.raises(ConfigError, match="`integrity` compares what is reused with checksums, which is not done"):
        port(asking())
    engine_port = port(offloading())
    with pytest.raises(ConfigError, match="`integrity`"):
        engine_port.activate(asking(revision=2), actor="t")
    assert engine_port.table.revision == 1
    engine_port = port(asking(), can_sum=True)
    assert engine_port.pool.sums is not None
    engine_port.activate(asking(revision=2), actor="t")
