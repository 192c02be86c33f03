"""Refused identities are on record: in sums that a flood does not fill, from the engine, the door and the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.query.attempts import refused_identities
from kvcustody.audit.kinds import AttemptsRefused
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.errors import LedgerError
from kvcustody.governance.observability import attempts as module
from kvcustody.governance.observability.attempts import (
    OTHERS,
    SOURCES_MAX,
    WINDOW_SECONDS,
    Attempted,
    Attempts,
    AttemptsReporter,
    network_of,
    reason_of,
)
from kvcustody.governance.settings import Settings
from kvcustody.integrations.identity.from_settings import open_attempts
from kvcustody.migrations.upgrade import upgrade

FLOOD, NETWORKS = 20_000, 2_000


def flood(attempts: Attempts) -> list[Any]:
    for at in range(FLOOD):
        attempts.note("forged", f"network-{at % NETWORKS}")
    attempts.note("missing", "network-0")
    return attempts.events()


def test_a_flood_writes_little_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = flood(Attempts("door", VirtualClock()))
    assert len(found) == SOURCES_MAX + 2 and all(isinstance(one, AttemptsRefused) for one in found)
    forged = [one for one in found if one.reason == "forged"]
    assert sum(one.attempts for one in forged) == FLOOD
    (rest,) = [one for one in forged if one.source == OTHERS]
    assert rest.attempts == FLOOD - SOURCES_MAX * FLOOD // NETWORKS
    monkeypatch.setattr(module, "SOURCES_MAX", 1 << 30)
    assert len(flood(Attempts("door", VirtualClock()))) == NETWORKS + 1, "void: without the bound one a network"


def test_what_cannot_be_recorded_waits_in_the_same_sums() -> None:
    clock = VirtualClock()
    attempts = Attempts("service", clock)
    recorded: list[Attempted] = []
    down = True

    def record(taken: Any) -> None:
        if down:
            raise LedgerError("away")
        recorded.extend(taken)

    reporter = AttemptsReporter(attempts, record)
    for _ in range(3):
        for at in range(100):
            reporter.note("invalid", f"network-{at}")
        reporter.flush()
    assert not recorded and len(attempts.take()) == SOURCES_MAX + 1
    reporter.note("invalid", "last")
    down = False
    reporter.close()
    assert [(one.source, one.attempts) for one in recorded] == [("last", 1)]
    assert attempts.totals == {"invalid": 301}


def test_a_window_is_due_when_it_ends() -> None:
    clock = VirtualClock()
    attempts = Attempts("engine", clock)
    assert attempts.next_due_us() is None
    attempts.note("replayed")
    first_us = clock.now_us()
    clock.advance(1_000_000)
    attempts.note("replayed")
    assert attempts.next_due_us() == first_us + WINDOW_SECONDS * 1_000_000
    (event,) = attempts.events()
    assert (event.reason, event.attempts, event.from_us) == ("replayed", 2, first_us)  # type: ignore[union-attr]
    assert attempts.next_due_us() is None and attempts.events() == []


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("203.0.113.77", "203.0.113.0/24"),
        ("::ffff:203.0.113.77", "203.0.113.0/24"),
        ("2001:db8:1:2::9", "2001:db8:1::/48"),
        ("", ""),
        ("unix", ""),
    ],
)
def test_a_source_is_a_network_and_no_address(address: str, network: str) -> None:
    assert network_of(address) == network


def test_a_refusal_in_words_is_one_of_few() -> None:
    said = ["no credential", "token expired", "API key past its date", "unknown API key", "two credentials"]
    assert [reason_of(one) for one in said] == ["missing", "expired", "expired", "invalid", "invalid"]


def test_a_doors_refusals_reach_the_ledger_of_its_engine(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    settings = Settings(policy_path=tmp_path / "policy.yaml", database_url=url, worker_name="gpu-0")
    reporter = open_attempts(settings, SystemClock())
    reporter.note("invalid", "203.0.113.0/24")
    reporter.flush()  # there is no ledger yet: nothing is lost, and none is made
    assert not (tmp_path / "ledger.db").exists()
    engine = open_store(url)
    upgrade(engine)
    reporter.note("invalid", "203.0.113.0/24")
    reporter.note("missing")
    reporter.close()
    with engine.connect() as connection:
        bodies = map(json.loads, connection.scalars(select(events.c.leaf).where(events.c.kind == "attempts-refused")))
        said = [(body["place"], body["of_worker"], body["reason"], body["source"], body["attempts"]) for body in bodies]
        shown = refused_identities(connection, 0)
    engine.dispose()
    assert said == [("door", "gpu-0", "invalid", "203.0.113.0/24", 2), ("door", "gpu-0", "missing", "", 1)]
    assert [(one.place, one.reason, one.attempts, one.sources) for one in shown] == [
        ("door", "invalid", 2, 1),
        ("door", "missing", 1, 1),
    ]
