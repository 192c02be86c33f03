"""A row that somebody inserted without its leaf changes no verdict and no order, before any `fsck`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Connection, Engine, Table, insert, select, true

from kvcustody.audit.cases import read_cases as case_reader
from kvcustody.audit.counters import read_figures
from kvcustody.audit.erasure import erasure_state
from kvcustody.audit.erasure.erasure_state import AskedErasure, read_states
from kvcustody.audit.events import (
    CaseOpened,
    CaseStepped,
    EnforcementOrdered,
    ErasureCompleted,
    HitCounters,
    LegalHoldChanged,
    WorkerStarted,
)
from kvcustody.audit.processes import enforcement
from kvcustody.audit.processes.work_periods import read_work_periods
from kvcustody.audit.retention import purge_and_legal_hold as keeping
from kvcustody.audit.schema.cases import case_steps
from kvcustody.audit.schema.counters import counter_deltas
from kvcustody.audit.schema.ledger import erasure_results, events
from kvcustody.audit.schema.retention import legal_holds

Make = Callable[..., Any]
FAR, LATER_US = 1_000_003, 2 * 10**15
NOWHERE = ((9999, 0), (1, -1), (1, FAR))  # a log that is not there, before the first leaf, beyond the last


class _Verdict(NamedTuple):
    """Where a forged row would tell, the values that it has, the reader and what it says."""

    table: Table
    forged: dict[str, Any]
    reader: ModuleType
    ask: Callable[[Connection], Any]


def _late(connection: Connection) -> Any:
    asked = AskedErasure("e-1", LATER_US - 9, LATER_US - 8)
    return read_states(connection, [asked], LATER_US + 9, read_work_periods(connection))["e-1"]


VERDICTS = {
    "a legal hold is lifted": _Verdict(legal_holds, {"action": "lifted"}, keeping, keeping.active_holds),
    "an erasure is complete": _Verdict(erasure_results, {"outcome": "complete"}, erasure_state, _late),
    "cases have a step more": _Verdict(
        case_steps,
        {"reason": "forged"},
        case_reader,
        lambda connection: [len(case.steps) for case in case_reader.read_cases(connection)],
    ),
    "one case has a step more": _Verdict(
        case_steps,
        {"reason": "forged"},
        case_reader,
        lambda connection: len(case_reader.read_case(connection, "c-1").steps),
    ),
}


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
        ]
    )
    assert writer.flush()
    return any_store


@pytest.mark.parametrize("place", NOWHERE)
@pytest.mark.parametrize("name", VERDICTS)
def test_a_row_without_its_leaf_says_nothing(
    told: Engine, name: str, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    what = VERDICTS[name]
    with told.connect() as connection:
        before = what.ask(connection)
        row = connection.execute(select(what.table)).first()
        assert row is not None
        forged = row._asdict() | what.forged | {"log": place[0], "idx": place[1], "at_us": LATER_US}
        connection.execute(insert(what.table).values(forged))
        assert what.ask(connection) == before
        monkeypatch.setattr(what.reader, "has_leaf", lambda _: true())
        assert what.ask(connection) != before, "control"
        connection.rollback()


@pytest.mark.parametrize("idx", [-1, FAR])
def test_an_order_beside_its_log_is_no_order(told: Engine, idx: int, unguarded: Make) -> None:
    with told.connect() as connection:
        order = enforcement.newest_order(connection)
        assert order is not None and order.mode == "enforce"
        row = connection.execute(select(events).where(events.c.kind == enforcement.ORDERED)).one()
        unguarded(connection)
        leaf = bytes(row.leaf).replace(b'"enforce"', b'"monitor"')
        forged = row._asdict() | {"idx": idx, "sequence": FAR, "leaf": leaf}
        connection.execute(insert(events).values(forged))
        assert enforcement.newest_order(connection) == order
        connection.rollback()


def test_figures_of_a_log_that_is_not_there_count_nowhere(told: Engine) -> None:
    with told.connect() as connection:
        period = {"since_us": 0, "until_us": None}
        before = read_figures.leaves_in(connection, None, **period)  # type: ignore[arg-type]
        rows = [row._asdict() for row in connection.execute(select(counter_deltas))]
        connection.execute(insert(counter_deltas), [row | {"log": 9999} for row in rows])
        assert read_figures.leaves_in(connection, None, **period) == before > 0  # type: ignore[arg-type]
        connection.execute(insert(counter_deltas), [row | {"size": FAR} for row in rows])
        assert read_figures.leaves_in(connection, None, **period) == 2 * before, "control"  # type: ignore[arg-type]
        connection.rollback()
