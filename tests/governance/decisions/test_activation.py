"""Activation: what a revision narrows holds at once, what it widens waits for the ledger."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcustody.audit.kinds import Event, PolicyActivated
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.errors import ConfigError, LedgerUnavailable
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders
from standins.builders import governor, grant, policy

GRANT = grant("2027-01-01")
MODEL = tiny_model(kv_dtype="bf16", attention={"heads": 8})
PROMPT = [*range(1, 65), 7]


class FailingLedger(CountingLedger):
    """Refuses to make activations durable while told to."""

    failing = False

    def submit_durable(self, event: Event, /) -> int:
        if self.failing and isinstance(event, PolicyActivated):
            raise LedgerUnavailable("the ledger is away")
        return super().submit_durable(event)

    def submit(self, events: Sequence[Event], /) -> int:
        return super().submit(events)


class World:
    def __init__(self, folder: Path, grants: str = GRANT) -> None:
        self.clock = VirtualClock()
        self.ledger = FailingLedger()
        self.governor = governor(table(1, grants), self.clock, ledger=self.ledger)

    def hit(self, tenant: str) -> int:
        admission = self.governor.admit(identify(issuer="idp", tenant=tenant), MODEL, PROMPT)
        assert isinstance(admission, Admission)
        self.governor.commit([admission.request_id], [len(PROMPT)])
        self.governor.abort(admission.request_id)
        self.governor.step()
        return admission.hit_tokens

    def settled_hit(self) -> int:
        """The reader's hit on the owner's blocks, past the first use, on a prompt that is not its own yet."""
        self.hit("holder")
        admission = self.governor.admit(identify(issuer="idp", tenant="reader"), MODEL, PROMPT)
        assert isinstance(admission, Admission)
        self.governor.abort(admission.request_id)
        self.governor.settle()
        again = self.governor.admit(identify(issuer="idp", tenant="reader"), MODEL, PROMPT)
        assert isinstance(again, Admission)
        self.governor.abort(again.request_id)
        return again.hit_tokens


def table(revision: int, grants: str = GRANT, idle: str = "1h"):
    text = policy(more=grants, retention=f"{{idle: {idle}, absolute: 8h, active_max: 2h}}")
    return builders.table(text, revision)


def test_a_revoked_grant_stops_although_the_ledger_is_away(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.settled_hit() == 64
    world.ledger.failing = True
    with pytest.raises(LedgerUnavailable):
        world.governor.activate(table(2, grants=""), actor="ada")
    assert world.settled_hit() == 0
    assert world.governor.table.revision == 1  # not active: not on record
    world.ledger.failing = False
    world.governor.activate(table(2, grants=""), actor="ada")
    assert world.settled_hit() == 0
    assert world.governor.check() == []


def test_a_new_grant_waits_for_the_ledger(tmp_path: Path) -> None:
    world = World(tmp_path, grants="")
    assert world.settled_hit() == 0
    world.ledger.failing = True
    with pytest.raises(LedgerUnavailable):
        world.governor.activate(table(2), actor="ada")
    assert world.settled_hit() == 0
    world.ledger.failing = False
    world.governor.activate(table(2), actor="ada")
    assert world.settled_hit() == 64  # the control: on record, it opens


def test_a_shorter_retention_binds_what_is_cached_before_it_is_on_record_and_a_longer_one_after(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.hit("holder")
    world.ledger.failing = True
    with pytest.raises(LedgerUnavailable):
        world.governor.activate(table(2, idle="10s"), actor="ada")
    world.clock.advance(11 * MICROSECONDS)
    assert world.hit("holder") == 0
    with pytest.raises(LedgerUnavailable):
        world.governor.activate(table(2, idle="8h"), actor="ada")
    world.clock.advance(11 * MICROSECONDS)
    assert world.hit("holder") == 0  # still the shorter: the longer one is not on record


def test_revisions_only_rise(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(ConfigError, match="not newer"):
        world.governor.activate(table(1), actor="ada")
