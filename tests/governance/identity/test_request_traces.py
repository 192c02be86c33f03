"""The trace of a request is on each of its own leaves, in our pool and through the engine port, and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import IdentityError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import identify
from kvcustody.testkit.conformance.deployment import KeepingLedger
from standins.builders import governor, table
from standins.governance.port_by_hand import MODEL, POLICY, PROMPT, PortByHand

TRACE, OTHER = "4bf92f3577b34da6a3ce929d0e0e4736", "ab" * 16


class World:
    """A Governor over memory that is nowhere, with a ledger that keeps what it gets."""

    def __init__(self) -> None:
        self.ledger = KeepingLedger()
        self.governor = governor(table(POLICY), VirtualClock(), ledger=self.ledger)

    def admit(self, tenant: str, prompt: Sequence[int] = PROMPT, **named: Any) -> Admission:
        admission = self.governor.admit(identify(issuer="idp", tenant=tenant), MODEL, prompt, **named)
        assert isinstance(admission, Admission)
        return admission

    def serve(self, tenant: str, **named: Any) -> int:
        admission = self.admit(tenant, **named)
        self.governor.commit([admission.request_id], [len(PROMPT)])
        self.governor.release(admission.request_id)
        self.governor.settle()
        self.governor.step()
        return admission.hit_tokens


def traces(ledger: KeepingLedger) -> list[tuple[str, str]]:
    """Kind and trace of every event that may have one, in order; none may be lost or added."""
    return [(type(event).__name__, event.trace) for event in ledger.events if hasattr(event, "trace")]


def test_a_requests_leaves_say_its_trace_and_the_next_ones_do_not() -> None:
    world, plain = World(), World()
    hits = [world.serve("holder", trace=TRACE), world.serve("holder"), world.serve("holder", trace=OTHER)]
    own = [pair for pair in traces(world.ledger) if pair[0] != "KeyEvent"]
    assert own == [(name, trace) for trace in (TRACE, "", OTHER) for name in ("ResidencyOpened", "ResidencyReleased")]
    assert hits == [plain.serve("holder") for _ in range(3)], "a trace decides nothing"


def test_the_first_use_of_a_grant_is_recorded_under_the_trace_that_brought_it() -> None:
    world = World()
    world.serve("holder")
    world.serve("reader", trace=TRACE)
    assert ("DecisionRecorded", TRACE) in traces(world.ledger)


def test_a_fork_and_a_window_that_passes_keep_the_trace() -> None:
    world = World()
    parent = world.admit("holder", request_id="a", trace=TRACE)
    world.governor.fork(parent.request_id, "b")
    world.governor.step()
    opened = [trace for name, trace in traces(world.ledger) if name == "ResidencyOpened"]
    assert opened == [TRACE, TRACE]


@pytest.mark.parametrize("trace", ["0" * 32, TRACE.upper(), TRACE + "\n", "x", f"00-{TRACE}-00f067aa0ba902b7-01"])
def test_what_is_no_trace_admits_nothing(trace: str) -> None:
    world = World()
    with pytest.raises(IdentityError, match="trace"):
        world.admit("holder", trace=trace)
    with pytest.raises(IdentityError, match="trace"):
        PortByHand().port.admit(identify(issuer="idp", tenant="holder"), MODEL, PROMPT, request_id=1, trace=trace)
    assert traces(world.ledger) == [] and not world.governor.running


def test_through_the_port_a_trace_outlives_a_preemption() -> None:
    engine = PortByHand()
    principal = identify(issuer="idp", tenant="holder")
    for trace in (TRACE, ""):
        residency: Any = engine.port.admit(principal, MODEL, PROMPT, request_id=f"r{trace}", trace=trace)
        engine.port.look_up(residency, lambda key: -1)
        engine.port.handed_out(residency, [1, 2])
        engine.port.step()
        engine.port.returned(residency, [2])
        engine.port.release(residency, "preempted")
        again: Any = engine.port.resume(residency, PROMPT)
        engine.port.handed_out(again, [3])
        engine.port.step()
        engine.port.release(again)
        engine.port.step()
    own = [pair for pair in traces(engine.ledger) if pair[0] != "KeyEvent"]
    names = ("ResidencyOpened", "BlocksReleased", "ResidencyReleased", "ResidencyOpened", "ResidencyReleased")
    assert sorted(own) == sorted((name, trace) for trace in (TRACE, "") for name in names)
