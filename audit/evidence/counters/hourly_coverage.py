"""Coverage verdicts by the hour in which custody was due, judged once in the background for every reader.

    recent(connection)                                  # rows: no evidence is read

1. A pass (`judge_hours`) judges the state under a checkpoint, with the one implementation of coverage
   (`evidence.coverage`). It judges the hours of the last day and replaces all rows together. So every displayed figure
   is of one state, which `coverage_pass` names. Later leaves count in the next pass. Whoever displays a figure also
   displays its age.
2. Of two passes, the one over the later state is kept.
3. `fsck` judges the whole of the same state again. Retention drops all rows together with its leaves. A pass that read
   any dropped leaf is discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, case, delete, func, select, tuple_

from kvcustody.audit.evidence.coverage.block_uses import UNKNOWN
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, LifeUnits, read_units
from kvcustody.audit.evidence.coverage.summary import CoverageRow, add_rows, by_period, lags_of, rows_of
from kvcustody.audit.kinds import SYSTEM, log_of, tenant_of
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.snapshot import as_of_sizes
from kvcustody.audit.store.schema.counters import ALL_HOURS, coverage_hours, coverage_pass
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.times import DAY_US, HOUR_US

JUDGING = 7_215_410  # the number of the lock
HourRow = tuple[int, ...]  # the columns of `coverage_hours`, classification a text
HourKey = tuple[int, str, str]  # hour, tenant, classification


class JudgedState(NamedTuple):
    """The result of a judging pass: the state under a checkpoint, and the time by which custody had to be due."""

    size: int
    at_us: int


class RecentCoverage(NamedTuple):
    """Coverage of the last day, including the open hour, by tenant and classification.

    `state` is None, and there is no row, before the first pass.
    """

    state: JudgedState | None
    rows: tuple[CoverageRow, ...]
    lag_us_max: int

    @property
    def total(self) -> CoverageRow:
        """All rows added up."""
        return add_rows(self.rows)


class TenantSums(NamedTuple):
    """Custody due in the last day of one tenant, or of several together."""

    tenant: str  # empty: of all that were not named
    due: int
    covered: int
    overdue: int
    unproven: int
    lag_us_max: int


class HourCoverage(NamedTuple):
    """Coverage of the custody of one tenant and classification that was due in one hour."""

    hour_us: int
    row: CoverageRow
    lag_us_max: int


def first_hour(at_us: int) -> int:
    """Return the first hour that a pass at this moment judges."""
    return (at_us - DAY_US) // HOUR_US * HOUR_US + HOUR_US


def judged_rows(connection: Connection, state: JudgedState) -> list[HourRow]:
    """Return the rows of `coverage_hours` for a state, judged in full."""
    proofs = LedgerProofs(connection)
    as_of = as_of_sizes(connection, proofs.sizes(state.size))
    ids = {name: log for log, name in connection.execute(select(logs.c.id, logs.c.name))}
    chosen = CustodySelection(first_hour(state.at_us), state.at_us)
    lives = read_units(connection, chosen, now_us=state.at_us, as_of=as_of)
    return stored_rows(hour_rows(lives, first_hour(state.at_us)), ids)


def hour_rows(lives: Iterable[LifeUnits], since_us: int) -> Iterator[tuple[HourKey, CoverageRow, int]]:
    """Yield the coverage of units by hour, tenant and classification, with the longest lag, from `since_us` on."""
    for hour_us, part in by_period(lives, since_us, HOUR_US):
        if hour_us >= since_us:
            lags = lags_of(part)
            for row in rows_of(part):
                who = (row.tenant, row.classification)
                yield (hour_us, *who), row, lags.get(who, 0)


def stored_rows(every: Iterable[tuple[HourKey, CoverageRow, int]], ids: Mapping[str, int]) -> list[HourRow]:
    """Return the rows of the table, in order, from such coverage and the logs' ids: by hour, and over all hours."""
    by_hour: dict[tuple[int, int, str], tuple[list[CoverageRow], list[int]]] = {}
    for (hour_us, tenant, classification), row, lag in every:
        log = ids.get(log_of(tenant), ids.get(SYSTEM, 0))  # where nothing says whose it was
        for when in (hour_us, ALL_HOURS):
            rows, longest = by_hour.setdefault((when, log, classification), ([], [0]))
            rows.append(row)
            longest.append(lag)
    return [(*key, *add_rows(rows)[2:], max(longest)) for key, (rows, longest) in sorted(by_hour.items())]  # type: ignore[misc]


def judged_state(connection: Connection) -> JudgedState | None:
    """Return the state that the rows describe."""
    column = coverage_pass.c
    row = connection.execute(select(column.size, column.at_us).where(column.id == 1)).first()
    return None if row is None else JudgedState(*row)


def drop_verdicts(connection: Connection) -> None:
    """Drop every row inside the caller's transaction; a running pass cannot finish before it."""
    dialect_of(connection).one_at_a_time(connection, JUDGING)
    for table in (coverage_hours, coverage_pass):
        connection.execute(delete(table))


def by_hour(
    connection: Connection,
    *,
    tenant: str | None = None,
    after: HourKey | None = None,
    limit: int | None = None,
) -> tuple[HourCoverage, ...]:
    """Return the judged hours after a place, in order, each by tenant (first on record first) and classification."""
    return tuple(_rows(connection, coverage_hours.c.hour_us >= 0, tenant, after, limit))


def _rows(
    connection: Connection,
    of_hours: ColumnElement[bool],
    tenant: str | None,
    after: HourKey | None = None,
    limit: int | None = None,
) -> Iterator[HourCoverage]:
    key = tuple_(*coverage_hours.primary_key.columns)
    query = select(coverage_hours, logs.c.name).join(logs, logs.c.id == coverage_hours.c.log).where(of_hours)
    if tenant is not None:
        query = query.where(logs.c.name == log_of(tenant))
    if after is not None:
        hour_us, who, classification = after
        name = SYSTEM if who == UNKNOWN else log_of(who)
        query = query.where(key > tuple_(hour_us, _id_of(connection, name), classification))
    query = query.order_by(*coverage_hours.primary_key.columns).limit(limit)
    for hour_us, _, classification, *counts, lag, name in connection.execute(query):
        who = UNKNOWN if name == SYSTEM else tenant_of(str(name))
        yield HourCoverage(hour_us, CoverageRow(who, classification, *counts), lag)


def _id_of(connection: Connection, name: str) -> int:
    return connection.scalar(select(logs.c.id).where(logs.c.name == name)) or 0


def recent(connection: Connection, *, tenant: str | None = None) -> RecentCoverage:
    """Return the coverage of all judged hours together."""
    found = list(_rows(connection, coverage_hours.c.hour_us == ALL_HOURS, tenant))
    rows = tuple(sorted(each.row for each in found))
    lag = max((each.lag_us_max for each in found), default=0)
    return RecentCoverage(judged_state(connection), rows, lag)


def recent_sums(connection: Connection, tenants: Collection[str]) -> list[TenantSums]:
    """Return the sums for each of these tenants and for all others together, one row each, added up by the database."""
    column = coverage_hours.c
    who = case((logs.c.name.in_([log_of(tenant) for tenant in tenants]), logs.c.name), else_="").label("who")
    counts = (func.sum(each) for each in (column.due, column.covered, column.overdue, column.unproven))
    query = (
        select(who, *counts, func.max(column.lag_us_max))
        .join(logs, logs.c.id == column.log)
        .where(column.hour_us == ALL_HOURS)
        .group_by(who)
    )
    return [
        TenantSums(tenant_of(str(name)), *map(int, sums)) for name, *sums in connection.execute(query.order_by(who))
    ]
