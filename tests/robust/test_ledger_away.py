"""The ledger is away while requests come: no reuse across tenants goes unrecorded, and the own scope is served.

What a policy demands beyond the floor, `lifecycle: deny` and `own_hits: deny`, holds for as long as events are spilled.
A Governor over a real writer on a SQLite file; blocks without memory.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select

from kvcustody.audit.kinds import KeyEvent
from kvcustody.audit.store.database.dialect import file_of
from kvcustody.audit.store.schema.leaf_tables import releases, residencies
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.clock import VirtualClock
from kvcustody.errors import LedgerUnavailable
from kvcustody.governance.admission_outcome import Admission, Deferred
from kvcustody.governance.decisions.first_use_log import FirstUseLog
from kvcustody.governance.identity.principal import identify
from standins.builders import governor, grant, policy, table, writer
from standins.robust.custody_world import MODEL

POLICY = policy(more=grant())
PROMPT = [*range(1, 65), 7]


class World:
    """Two tenants, one grant, and a ledger that may go away."""

    def __init__(self, store: Engine, folder: Path, stricter: str = "") -> None:
        path = file_of(store)
        assert path is not None
        self.path = path
        self._pages = str(1 << 30)
        event.listen(store, "begin", self._limited)
        self.clock = VirtualClock(utc_us=time.time_ns() // 1000)
        self.writer = writer(store, folder / "spill", clock=self.clock)
        text = POLICY + (f"  by_classification: {{low: {stricter}}}\n" if stricter else "")
        self.governor = governor(table(text), self.clock, ledger=self.writer)
        assert self.ask("reader") == self.ask("holder", keeps=True) == 0  # their keys are on record
        self.governor.activate(table(text, 2), actor="ada")  # no grant was used under it

    def _limited(self, connection: Connection) -> None:
        """By the thread that uses the connection, in its transaction: another one might close it meanwhile."""
        connection.exec_driver_sql(f"PRAGMA max_page_count = {self._pages}")

    def pages(self, most: str) -> None:
        """The most pages that the ledger's file may have, from the next transaction on."""
        self._pages = most

    def ask(self, tenant: str, *, keeps: bool = False) -> int | Deferred:
        """The tokens of the prompt that a tenant gets from the cache; `keeps`: it is computed and published."""
        decision = self.governor.admit(identify(issuer="idp", tenant=tenant), MODEL, PROMPT)
        if not isinstance(decision, Admission):
            assert isinstance(decision, Deferred)
            return decision
        if keeps:
            self.governor.commit([decision.request_id], [len(PROMPT)])
        self.governor.abort(decision.request_id)
        self.governor.step()
        self.governor.settle()
        return decision.hit_tokens

    def notice(self) -> None:
        """Wait until the writer knows that the ledger is away."""
        for epoch in range(500):  # a full file has room in its last pages
            event = KeyEvent(1, "holder", "made" * 400, epoch, "operator")
            try:
                self.writer.submit_durable(event, timeout_seconds=2.0)
            except LedgerUnavailable:
                if not self.writer.recording:  # else it was late, and is there
                    break
        until, looks = time.monotonic() + 30, 0
        while looks < 100:  # it tries again all the time, and nothing is taken
            assert time.monotonic() < until and self.writer.admitting
            looks = 0 if self.writer.recording else looks + 1
            if looks <= 1:  # more than the pages that are there, or became free, have room for
                self.writer.submit([event] * 50)
                assert self.writer.flush()
            time.sleep(0.005)

    def back(self) -> None:
        """Wait until what was spilled is in the ledger."""
        until = time.monotonic() + 30
        while not (self.writer.recording and self.writer.flush()) and time.monotonic() < until:
            time.sleep(0.01)
        assert self.writer.recording

    def close(self) -> None:
        """Release what is open and drain."""
        self.governor.close()
        self.writer.close()


@contextlib.contextmanager
def locked(world: World, folder: Path) -> Iterator[None]:
    """Every write waits until its deadline."""
    with contextlib.closing(sqlite3.connect(world.path, isolation_level=None, timeout=30)) as intruder:
        intruder.execute("BEGIN EXCLUSIVE")
        yield
        intruder.execute("ROLLBACK")


@contextlib.contextmanager
def full(world: World, folder: Path) -> Iterator[None]:
    """The disk has no room for another page (SQLITE_FULL, as ENOSPC gives)."""
    world.pages("1")  # no fewer than there are
    yield
    world.pages(str(1 << 30))


@contextlib.contextmanager
def gone(world: World, folder: Path) -> Iterator[None]:
    """The ledger's file is away."""
    path, hidden = world.path, folder / "hidden"
    hidden.mkdir()
    for each in [each for each in path.parent.glob(path.name + "*") if each.is_file()]:
        each.rename(hidden / each.name)
    try:
        yield
    finally:
        for each in hidden.iterdir():
            each.rename(path.parent / each.name)


OUTAGES = {"locked": locked, "full": full, "gone": gone}


def leaves_of(store: Engine, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """The leaves of one kind, with the names of their logs."""
    query = select(logs.c.name, events.c.leaf).join(events, events.c.log == logs.c.id)
    with store.connect() as connection:
        rows = connection.execute(query.where(events.c.kind == kind).order_by(logs.c.name, events.c.idx)).all()
    return [(row.name, json.loads(row.leaf)) for row in rows]


def permits(store: Engine) -> list[tuple[str, int]]:
    """Permissions to reuse across tenants under the second revision: log and sequence of each leaf."""
    found = leaves_of(store, "decision")
    return [(name, body["sequence"]) for name, body in found if (body["effect"], body["revision"]) == ("permit", 2)]


@pytest.mark.parametrize("outage", sorted(OUTAGES))
def test_no_reuse_across_tenants_is_unrecorded_and_the_own_scope_is_served(
    store: Engine, tmp_path: Path, outage: str
) -> None:
    world = World(store, tmp_path)
    with OUTAGES[outage](world, tmp_path):
        world.notice()
        assert [world.ask("reader") for _ in range(4)] == [0] * 4
        assert world.ask("holder") == 64
    world.back()
    assert world.ask("reader") == 0 and world.ask("reader") == 64  # recorded, then reused
    world.close()
    (owner, at), (reader, also) = permits(store)
    assert (owner, reader, at) == ("tenant/holder", "tenant/reader", also)
    counted = [(name, body["requests"]) for name, body in leaves_of(store, "hit-counters") if body["rule"] == "reads"]
    assert counted == [("tenant/holder", 1), ("tenant/reader", 1)]  # every reuse after the first use
    with store.connect() as connection:
        used = residencies.c.tenant == "reader", residencies.c.attached_blocks > 0
        place = (events.c.log == residencies.c.log) & (events.c.idx == residencies.c.idx)
        query = select(events.c.sequence).join(residencies, place).where(*used)
        assert [sequence > at for sequence in connection.scalars(query)] == [True]


def test_without_the_gate_a_reuse_goes_unrecorded(
    store: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control."""
    monkeypatch.setattr(FirstUseLog, "may", lambda *_, **__: True)
    world = World(store, tmp_path)
    with locked(world, tmp_path):
        world.notice()
        assert world.ask("reader") == 64
    world.back()
    world.close()
    assert permits(store) == []


@pytest.mark.parametrize("outage", sorted(OUTAGES))
def test_what_must_not_be_recorded_late_waits(store: Engine, tmp_path: Path, outage: str) -> None:
    """`lifecycle: deny`: no new custody while events are spilled; what runs goes on, is released and is recorded."""
    world = World(store, tmp_path, "{lifecycle: deny}")
    running = world.governor.admit(identify(issuer="idp", tenant="reader"), MODEL, PROMPT)
    assert isinstance(running, Admission)
    with OUTAGES[outage](world, tmp_path):
        world.notice()
        refused = world.ask("holder")
        assert isinstance(refused, Deferred) and refused.reason == "ledger"
        world.governor.commit([running.request_id], [len(PROMPT)])
        world.governor.abort(running.request_id)
        world.governor.step()
    world.back()
    assert world.ask("holder") == 64
    world.close()
    with store.connect() as connection:
        assert len(connection.scalars(select(releases.c.residency).where(releases.c.final)).all()) == 4


def test_hits_that_must_be_on_record_wait(store: Engine, tmp_path: Path) -> None:
    """`own_hits: deny`: everything is a miss while events are spilled. `spill`: each hit is in its residency's leaf."""
    world = World(store, tmp_path, "{own_hits: deny}")
    with locked(world, tmp_path):
        world.notice()
        assert world.ask("holder") == 0
    world.back()
    assert world.ask("holder") == 64
    world.close()
    with store.connect() as connection:
        hits = connection.scalars(select(residencies.c.attached_blocks).order_by(residencies.c.residency)).all()
    assert hits == [0, 0, 0, 4]
