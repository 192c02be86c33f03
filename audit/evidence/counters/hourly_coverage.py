"""Coverage verdicts by the hour in which custody was due, judged once in the background for every reader.

    recent(connection)                                  # the last day: no evidence is read
    period(connection, since_us, until_us)              # any hours of the last 31 days

1. A pass (`judge_hours`) judges the state under a checkpoint, with the one implementation of coverage
   (`evidence.coverage`). It judges the hours of the last 31 days and replaces rows together. So every displayed
   figure is of one state, which `coverage_pass` names. Later leaves count in the next pass. Whoever displays a figure
   also displays its age.
2. Of two passes, the one over the later state is kept.
3. `fsck` judges the whole of the same state again. Retention drops all rows together with its leaves. A pass that read
   any dropped leaf is discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, case, delete, func, select, tuple_

from kvcustody.audit.evidence.coverage.block_uses import UNKNOWN
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, LifeUnits, read_units
from kvcustody.audit.evidence.coverage.lag_counts import NO_LAGS, LagCounts, added, from_text
from kvcustody.audit.evidence.coverage.summary import CoverageRow, add_rows, by_period, lags_of, rows_of
from kvcustody.audit.kinds import SYSTEM, log_of, tenant_of
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.snapshot import as_of_sizes
from kvcustody.audit.store.schema.counters import ALL_HOURS, coverage_hours, coverage_pass
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.times import DAY_US, HOUR_US

JUDGING = 7_215_410  # the number of the lock
HISTORY_DAYS = 31
HourRow = tuple[int, ...]  # the columns of `coverage_hours`; classification and lags are texts
JudgedRow = tuple[tuple[str, str], CoverageRow, LagCounts]  # of a tenant and classification
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
    lag_us_p50: int
    lag_us_p99: int


class PeriodCoverage(NamedTuple):
    """Coverage of whole hours: by tenant and classification, and of all of them for each hour with anything due.

    `since_us` is when the first judged hour of the period begins; earlier ones are not known.
    """

    state: JudgedState | None
    since_us: int
    rows: tuple[CoverageRow, ...]
    lags: LagCounts
    hours: Mapping[int, tuple[CoverageRow, LagCounts]]

    @property
    def total(self) -> CoverageRow:
        """All rows added up."""
        return add_rows(self.rows)


def first_hour(at_us: int) -> int:
    """Return the first hour that a pass at this moment judges."""
    return hours_back(at_us, HISTORY_DAYS * DAY_US)


def hours_back(at_us: int, back_us: int) -> int:
    """Return the first hour that begins within so many microseconds before a moment."""
    return (at_us - back_us) // HOUR_US * HOUR_US + HOUR_US


def judged_rows(connection: Connection, state: JudgedState) -> list[HourRow]:
    """Return the rows of `coverage_hours` for a state, judged in full."""
    proofs = LedgerProofs(connection)
    as_of = as_of_sizes(connection, proofs.sizes(state.size))
    ids = {name: log for log, name in connection.execute(select(logs.c.id, logs.c.name))}
    chosen = CustodySelection(first_hour(state.at_us), state.at_us)
    lives = read_units(connection, chosen, now_us=state.at_us, as_of=as_of)
    by_hour: dict[int, list[JudgedRow]] = {}
    for (hour_us, *who), row, lags in hour_rows(lives, first_hour(state.at_us)):
        by_hour.setdefault(hour_us, []).append(((who[0], who[1]), row, lags))
    rows = {hour_us: rows_of_hour(hour_us, parts, ids) for hour_us, parts in by_hour.items()}
    return [*recent_rows(rows, state.at_us), *chain.from_iterable(rows[hour_us] for hour_us in sorted(rows))]


def hour_rows(
    lives: Iterable[LifeUnits], since_us: int, width_us: int = HOUR_US
) -> Iterator[tuple[HourKey, CoverageRow, LagCounts]]:
    """Yield the coverage of units by hour, tenant and classification, with their lags, from `since_us` on.

    `width_us`: another width than an hour.
    """
    for hour_us, part in by_period(lives, since_us, width_us):
        if hour_us >= since_us:
            lags = lags_of(part)
            for row in rows_of(part):
                who = (row.tenant, row.classification)
                yield (hour_us, *who), row, lags.pop(who, NO_LAGS)  # ended and overdue units have a row each


def rows_of_hour(hour_us: int, parts: Iterable[JudgedRow], ids: Mapping[str, int]) -> list[HourRow]:
    """Return the rows of the table for one hour, in order, given the logs' ids."""
    by_log: dict[tuple[int, str], tuple[list[CoverageRow], list[LagCounts]]] = {}
    for (tenant, classification), row, lags in parts:
        log = ids.get(log_of(tenant), ids.get(SYSTEM, 0))  # where nothing says whose it was
        rows, every = by_log.setdefault((log, classification), ([], []))
        rows.append(row)
        every.append(lags)
    return [_hour_row((hour_us, *key), rows, added(every)) for key, (rows, every) in sorted(by_log.items())]


def recent_rows(by_hour: Mapping[int, Sequence[HourRow]], at_us: int) -> list[HourRow]:
    """Return the rows of the last day's hours together, from the rows of each hour."""
    by_log: dict[tuple[int, str], tuple[list[CoverageRow], list[LagCounts]]] = {}
    for hour_us in sorted(hour_us for hour_us in by_hour if hour_us >= hours_back(at_us, DAY_US)):
        for _, log, classification, *counts, longest, lags in by_hour[hour_us]:
            rows, every = by_log.setdefault((log, str(classification)), ([], []))
            rows.append(CoverageRow("", "", *counts))
            every.append(from_text(longest, str(lags)))
    return [_hour_row((ALL_HOURS, *key), rows, added(every)) for key, (rows, every) in sorted(by_log.items())]


def _hour_row(key: tuple[int, int, str], rows: Iterable[CoverageRow], lags: LagCounts) -> HourRow:
    return (*key, *add_rows(rows)[2:], lags.longest_us, lags.text)  # type: ignore[return-value]


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
    since_us: int = 0,
    until_us: int | None = None,
) -> tuple[HourCoverage, ...]:
    """Return the judged hours of a period after a place, in order, each by tenant (first on record first) and
    classification.
    """
    return tuple(_rows(connection, _hours_of(since_us, until_us), tenant, after, limit))


def _hours_of(since_us: int, until_us: int | None) -> ColumnElement[bool]:
    """Return the condition on hours that a period touches."""
    inside = coverage_hours.c.hour_us >= max(0, since_us) // HOUR_US * HOUR_US
    return inside if until_us is None else and_(inside, coverage_hours.c.hour_us < until_us)


def period(connection: Connection, since_us: int, until_us: int, *, tenant: str | None = None) -> PeriodCoverage:
    """Return the judged coverage of the hours that a period touches; the database adds up the counts."""
    column, state = coverage_hours.c, judged_state(connection)
    inside = _hours_of(since_us, until_us)
    source = coverage_hours.join(logs, logs.c.id == column.log)
    if tenant is not None:
        inside = and_(inside, logs.c.name == log_of(tenant))
    sums = [func.max(column[name]) if name == "fence_us_max" else func.sum(column[name]) for name in _COUNTS]
    by_tenant = select(logs.c.name, column.classification, *sums).select_from(source).where(inside)
    rows = tuple(
        CoverageRow(UNKNOWN if name == SYSTEM else tenant_of(str(name)), classification, *map(int, counts))
        for name, classification, *counts in connection.execute(
            by_tenant.group_by(logs.c.name, column.classification).order_by(logs.c.name, column.classification)
        )
    )
    lags: dict[int, list[str]] = {}
    texts = select(column.hour_us, column.lags).select_from(source).where(inside, column.lags != "")
    for hour_us, text in connection.execute(texts):
        lags.setdefault(hour_us, []).append(text)
    by_time = (
        select(column.hour_us, func.max(column.lag_us_max), *sums)
        .select_from(source)
        .where(inside)
        .group_by(column.hour_us)
    )
    hours = {
        hour_us: (CoverageRow("*", "*", *map(int, counts)), from_text(longest, " ".join(lags.get(hour_us, ()))))
        for hour_us, longest, *counts in connection.execute(by_time.order_by(column.hour_us))
    }
    first = 0 if state is None else first_hour(state.at_us)
    return PeriodCoverage(state, max(since_us, first), rows, added(lags for _, lags in hours.values()), hours)


_COUNTS = CoverageRow._fields[2:]


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
    for hour_us, _, classification, *counts, lag, text, name in connection.execute(query):
        who, lags = UNKNOWN if name == SYSTEM else tenant_of(str(name)), from_text(lag, text)
        row = CoverageRow(who, classification, *counts)
        yield HourCoverage(hour_us, row, lag, lags.percentile(50), lags.percentile(99))


def _id_of(connection: Connection, name: str) -> int:
    return connection.scalar(select(logs.c.id).where(logs.c.name == name)) or 0


def recent(connection: Connection, *, tenant: str | None = None) -> RecentCoverage:
    """Return the coverage of the last day's judged hours together."""
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
