"""Verdicts of coverage by the hour in which custody was due, judged once in the background for all who show them.

    recent(connection)                                  # rows: no evidence is read

1. A pass (`judge_hours`) judges the state under a checkpoint with the one implementation of coverage
   (`audit.coverage`), for the hours of the last day, and replaces all rows together: every figure that is shown is of
   one state, which `coverage_pass` names. What came later counts in the next pass; whoever shows a figure shows its
   age.
2. Of two passes the one over the later state stays.
3. `fsck` judges the same state again, from all of it. Retention drops all rows with its leaves; a pass that read any of
   those has judged nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, delete, select

from kvcustody.audit.coverage.custody_units import CustodySelection, LifeUnits, read_units
from kvcustody.audit.coverage.summary import CoverageRow, add_rows, by_period, lags_of, rows_of
from kvcustody.audit.database.dialect import dialect_of
from kvcustody.audit.database.snapshot import as_of_sizes
from kvcustody.audit.events import SYSTEM, log_of
from kvcustody.audit.schema.counters import coverage_hours, coverage_pass
from kvcustody.audit.schema.ledger import logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.times import DAY_US, HOUR_US

JUDGING = 7_215_410  # the number of the lock
HourRow = tuple[int, ...]  # the columns of `coverage_hours`, classification a text
HourKey = tuple[int, str, str]  # hour, tenant, classification


class JudgedState(NamedTuple):
    """What a pass judged: the state under a checkpoint, and by when custody had to be due."""

    size: int
    at_us: int


class RecentCoverage(NamedTuple):
    """Coverage of the last day's hours, the open one included, by tenant and classification.

    `state` is None, and there is no row, before the first pass.
    """

    state: JudgedState | None
    rows: tuple[CoverageRow, ...]
    lag_us_max: int

    @property
    def total(self) -> CoverageRow:
        """All rows added up."""
        return add_rows(self.rows)


class HourCoverage(NamedTuple):
    """Coverage of the custody of one tenant and classification that was due in one hour."""

    hour_us: int
    row: CoverageRow
    lag_us_max: int


def first_hour(at_us: int) -> int:
    """The first hour that a pass at this moment judges."""
    return (at_us - DAY_US) // HOUR_US * HOUR_US + HOUR_US


def judged_rows(connection: Connection, state: JudgedState) -> list[HourRow]:
    """The rows of `coverage_hours` that a state gives, judged from all of it."""
    proofs = LedgerProofs(connection)
    as_of = as_of_sizes(connection, proofs.sizes(state.size))
    ids = {name: log for log, name in connection.execute(select(logs.c.id, logs.c.name))}
    chosen = CustodySelection(first_hour(state.at_us), state.at_us)
    lives = read_units(connection, chosen, now_us=state.at_us, as_of=as_of)
    return stored_rows(hour_rows(lives, first_hour(state.at_us)), ids)


def hour_rows(lives: Iterable[LifeUnits], since_us: int) -> Iterator[tuple[HourKey, CoverageRow, int]]:
    """Coverage of units by hour, tenant and classification, with the longest lag; those before `since_us` left out."""
    for hour_us, part in by_period(lives, since_us, HOUR_US):
        if hour_us >= since_us:
            lags = lags_of(part)
            for row in rows_of(part):
                who = (row.tenant, row.classification)
                yield (hour_us, *who), row, lags.get(who, 0)


def stored_rows(every: Iterable[tuple[HourKey, CoverageRow, int]], ids: Mapping[str, int]) -> list[HourRow]:
    """The rows of the table, in order, from such coverage and the ids of logs."""
    found: dict[tuple[int, int, str], tuple[list[CoverageRow], list[int]]] = {}
    for (hour_us, tenant, classification), row, lag in every:
        log = ids.get(log_of(tenant), ids.get(SYSTEM, 0))  # where nothing says whose it was
        rows, longest = found.setdefault((hour_us, log, classification), ([], [0]))
        rows.append(row)
        longest.append(lag)
    return [(*key, *add_rows(rows)[2:], max(longest)) for key, (rows, longest) in sorted(found.items())]  # type: ignore[misc]


def judged_state(connection: Connection) -> JudgedState | None:
    """What the rows are of."""
    column = coverage_pass.c
    row = connection.execute(select(column.size, column.at_us).where(column.id == 1)).first()
    return None if row is None else JudgedState(*row)


def drop_verdicts(connection: Connection) -> None:
    """Drop every row, inside the caller's transaction; no pass ends before that has."""
    dialect_of(connection).one_at_a_time(connection, JUDGING)
    for table in (coverage_hours, coverage_pass):
        connection.execute(delete(table))


def by_hour(connection: Connection, *, tenant: str | None = None) -> tuple[HourCoverage, ...]:
    """The judged hours in order, by tenant and classification."""
    column = coverage_hours.c
    query = select(coverage_hours, logs.c.name).join(logs, logs.c.id == column.log)
    if tenant is not None:
        query = query.where(logs.c.name == log_of(tenant))
    made = []
    for row in connection.execute(query.order_by(column.hour_us, logs.c.name, column.classification)):
        hour_us, _, classification, *counts, lag, name = row
        who = "unknown" if name == SYSTEM else str(name).removeprefix("tenant/")
        made.append(HourCoverage(hour_us, CoverageRow(who, classification, *counts), lag))
    return tuple(made)


def recent(connection: Connection, *, tenant: str | None = None) -> RecentCoverage:
    """Coverage of all judged hours together."""
    found: dict[tuple[str, str], list[CoverageRow]] = {}
    hours: Sequence[HourCoverage] = by_hour(connection, tenant=tenant)
    for each in hours:
        found.setdefault((each.row.tenant, each.row.classification), []).append(each.row)
    rows = tuple(add_rows(found[key], *key) for key in sorted(found))
    lag = max((each.lag_us_max for each in hours), default=0)
    return RecentCoverage(judged_state(connection), rows, lag)
