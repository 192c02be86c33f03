"""A row inserted without a leaf changes no verdict and no order, before any `fsck`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Connection, Engine, Table, delete, insert, select, true

from kvcustody.audit.evidence.cases import read_cases as case_reader
from kvcustody.audit.evidence.copies import copy_rows
from kvcustody.audit.evidence.counters import read_figures
from kvcustody.audit.evidence.coverage import block_uses
from kvcustody.audit.evidence.erasure import erasure_state, preview
from kvcustody.audit.evidence.erasure import requests_and_answers as erasing
from kvcustody.audit.evidence.processes import enforcement, orders, sequence_gaps
from kvcustody.audit.evidence.processes.work_periods import read_work_periods
from kvcustody.audit.evidence.query import attempts, issuers, narrowed_holds
from kvcustody.audit.evidence.query import custody as block_custody
from kvcustody.audit.keep import purge_and_legal_hold as keeping
from kvcustody.audit.kinds import (
    AttemptsRefused,
    CaseOpened,
    CaseStepped,
    CopiesStored,
    EnforcementOrdered,
    ErasureCompleted,
    ErasureRequested,
    GapRecorded,
    HitCounters,
    HoldsNarrowed,
    IssuerAssigned,
    LegalHoldChanged,
    OrphanFound,
    ResidencyOpened,
    WorkerClosingAsked,
    WorkerStarted,
)
from kvcustody.audit.store.schema import all_tables, recorded_losses
from kvcustody.audit.store.schema.all_tables import MONTHLY
from kvcustody.audit.store.schema.counters import counter_deltas
from kvcustody.audit.store.schema.leaf_tables import (
    case_steps,
    copy_steps,
    erasure_results,
    erasures,
    hit_counters,
    legal_holds,
    orphan_findings,
    outages,
    residencies,
)
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.governance.decisions import replay_decisions
from kvcustody.governance.service.fleet import dead_workers

Make = Callable[..., Any]
FAR, LATER_US = 1_000_003, 2 * 10**15
ANOTHER_KIND = (1, 0)
NOWHERE = ((9999, 0), (1, -1), (1, FAR))  # a log that is not there, before the first leaf, beyond the last


class _Verdict(NamedTuple):
    """Where a forged row would tell, the values that it has, the reader and what it says."""

    table: Table
    forged: dict[str, Any]
    reader: ModuleType
    ask: Callable[[Connection], Any]


def _late(connection: Connection) -> Any:
    asked = erasure_state.AskedErasure("e-1", LATER_US - 9, LATER_US - 8)
    return erasure_state.read_states(connection, [asked], LATER_US + 9, read_work_periods(connection))[asked]


def _by_name(reader: ModuleType, name: str) -> Callable[[Connection], Any]:
    """The reader's function as it is when it is called: a reload replaces it."""

    def ask(connection: Connection) -> Any:
        return getattr(reader, name)(connection)

    return ask


def _case_steps(connection: Connection) -> int:
    return len(case_reader.read_case(connection, "c-1").steps)


VERDICTS = {
    "a legal hold is lifted": _Verdict(legal_holds, {"action": "lifted"}, keeping, _by_name(keeping, "active_holds")),
    "an erasure is complete": _Verdict(erasure_results, {"outcome": "complete"}, erasure_state, _late),
    "an erasure is asked for": _Verdict(
        erasures, {"erasure": "e-9"}, erasing, lambda connection: len(erasing.requests(connection))
    ),
    "a subject's erasure moves the time when custody was due": _Verdict(
        erasures,
        {"erasure": "e-1", "at_us": 5},
        block_uses,
        lambda connection: block_uses._read_erasures(connection, None),
    ),
    "cases have a step more": _Verdict(
        case_steps,
        {"reason": "forged"},
        case_reader,
        lambda connection: [len(case.steps) for case in case_reader.read_cases(connection)],
    ),
    "one case has a step more": _Verdict(case_steps, {"reason": "forged"}, case_reader, _case_steps),
    "a gap has been named": _Verdict(
        orphan_findings,
        {"orphan": "forged"},
        block_custody,
        lambda connection: len(block_custody.findings(connection)),
    ),
    "sums of requests double": _Verdict(
        hit_counters,
        {"rule": "forged"},
        replay_decisions,
        lambda connection: sorted(replay_decisions.sources_in_use(connection)),
    ),
    "a loss is on record": _Verdict(
        outages, {"cause": "forged"}, recorded_losses, lambda connection: len(sequence_gaps.gaps(connection))
    ),
    "a copy was stored": _Verdict(
        copy_steps, {}, copy_rows, lambda connection: copy_rows.copy_totals(connection, 1)["nvme"].stored
    ),
    "a tenant holds a class": _Verdict(
        residencies,
        {"classification": "forged", "residency": 99},
        preview,
        lambda connection: preview._rows(connection, [], 0),
    ),
}


@contextmanager
def believing(reader: ModuleType) -> Iterator[None]:
    """The reader with the condition off: its constants are made anew, too. Afterwards its names mean what they did."""
    before = dict(vars(reader))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(all_tables, "has_leaf", lambda _: true())
            importlib.reload(reader)
        yield
    finally:
        vars(reader).clear()
        vars(reader).update(before)


@pytest.fixture
def told(any_store: Engine, make_writer: Make) -> Engine:
    writer = make_writer(any_store)
    writer.submit(
        [
            WorkerStarted(1, "worker-1", 8, 1, 4096, "cpu", "test"),
            LegalHoldChanged(2, "hold-1", None, "placed", "case", "counsel", None),
            CaseOpened(3, "c-1", "acme", "user-1", "erasure", "mail", 5, "UTC", (), "dana"),
            CaseStepped(4, "c-1", "acme", "identity", "asked", "", "", "a common name", "", "dana"),
            ErasureCompleted(5, "e-1", "acme", "partial", 1, 2, 1, "held"),
            HitCounters(6, "acme", "acme", "attach", "permit", "own-scope", 1, 6, 3, 2, 1),
            EnforcementOrdered(7, "enforce", (), 0, "", 10**10, "ada", "all is well"),
            ErasureRequested(8, "e-1", "acme", "subject", "user-1", None, 99, "dpo", ""),
            OrphanFound(9, 1, 1, "leaked", "test", "acme", 5, (), "none", "left"),
            GapRecorded(10, "test", 5000, 5001),
            CopiesStored(11, "nvme", "acme", "low", ("aa",), (1,), (4,), (400,), (20,), (11,), 5),
            ResidencyOpened(12, 1, "acme", None, None, False, "low", (), (), ("rule",), 1, 10**9),
            WorkerClosingAsked(13, "worker-1", writer.incarnation, "ada", "silent"),
            IssuerAssigned(14, "idp", "idp", "ada"),
            AttemptsRefused(15, "here", "expired", "10.0.0.1", 3, 5),
            HoldsNarrowed(16, "acme", 1, (1,), (20,)),
        ]
    )
    assert writer.flush()
    return any_store


@pytest.mark.parametrize("place", (*NOWHERE, ANOTHER_KIND))
@pytest.mark.parametrize("name", VERDICTS)
def test_a_row_without_its_leaf_says_nothing(told: Engine, name: str, place: tuple[int, int], unguarded: Make) -> None:
    what = VERDICTS[name]
    at_us = MONTHLY.get(what.table.name, "at_us")
    with told.connect() as connection:
        unguarded(connection)
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"ALTER TABLE {what.table.name} DROP CONSTRAINT ck_{what.table.name}_place")
        before = what.ask(connection)
        row = connection.execute(select(what.table)).first()
        assert row is not None
        forged = row._asdict() | {at_us: LATER_US} | what.forged | {"log": place[0], "idx": place[1]}
        if place == ANOTHER_KIND:
            leaf = connection.execute(select(events).where(events.c.kind == "attempts-refused")).one()
            forged |= {"log": leaf.log, "idx": leaf.idx, at_us: leaf.at_us}
        connection.execute(insert(what.table).values(forged))
        assert what.ask(connection) == before
        with believing(what.reader):
            assert what.ask(connection) != before, "control"
        connection.rollback()


ORDERS: dict[str, tuple[ModuleType, str, Callable[[Connection], Any]]] = {
    "enforcement": (
        orders,
        "enforcement-ordered",
        _by_name(enforcement, "newest_order"),
    ),
    "a closing": (
        dead_workers,
        "worker-closing-asked",
        lambda connection: dead_workers._asked_by_another(
            connection, str(connection.scalar(select(incarnations.c.uuid))), "ben", 0
        ),
    ),
    "an issuer": (
        orders,
        "issuer-assigned",
        lambda connection: issuers.known_issuers(connection).knows("idp"),
    ),
    "a narrowing act": (
        narrowed_holds,
        "holds-narrowed",
        lambda connection: narrowed_holds._acts(connection, 1, None),
    ),
    "refused identities": (
        attempts,
        "attempts-refused",
        lambda connection: attempts.refused_identities(connection, 0),
    ),
}


@pytest.mark.parametrize("idx", [-1, FAR])
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_beside_its_log_is_no_order(told: Engine, name: str, idx: int, unguarded: Make) -> None:
    reader, kind, ask = ORDERS[name]
    with told.connect() as connection:
        unguarded(connection)
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("ALTER TABLE events DROP CONSTRAINT ck_events_place")
        row = connection.execute(select(events).where(events.c.kind == kind)).one()
        there = ask(connection)
        connection.execute(delete(events).where(events.c.log == row.log, events.c.idx == row.idx))
        before = ask(connection)
        assert there != before
        connection.execute(insert(events).values(row._asdict() | {"idx": idx, "sequence": FAR}))
        assert ask(connection) == before
        with believing(reader):
            assert ask(connection) != before, "control"
        connection.rollback()


def test_figures_of_a_log_that_is_not_there_count_nowhere(told: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with told.connect() as connection:
        period = {"since_us": 0, "until_us": None}
        before = read_figures.leaves_in(connection, None, **period)  # type: ignore[arg-type]
        rows = [row._asdict() for row in connection.execute(select(counter_deltas))]
        connection.execute(insert(counter_deltas), [row | {"log": 9999 + row["log"]} for row in rows])
        assert read_figures.leaves_in(connection, None, **period) == before > 0  # type: ignore[arg-type]
        connection.execute(insert(counter_deltas), [row | {"size": FAR + row["size"]} for row in rows])
        assert read_figures.leaves_in(connection, None, **period) == before  # type: ignore[arg-type]
        monkeypatch.setattr(read_figures, "is_of_leaves", lambda _: true())
        assert read_figures.leaves_in(connection, None, **period) == 2 * before, "control"  # type: ignore[arg-type]
        connection.rollback()
