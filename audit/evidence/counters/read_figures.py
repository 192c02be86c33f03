"""Read the ledger's figures for pages, the API and scrapes, instead of leaves and rows of evidence.

1. A figure is the sum of folded and unfolded deltas (`schema.counters`, rule 2), read by one statement. So it matches
   the leaves in the same snapshot, whoever folds meanwhile.
2. How many rows are read depends on how many tenants there are, and, for a period, on its hours: never on how long the
   history is. What a scrape reads of all tenants stands apart, in few rows.
3. One sum needs more, of a process whose leaves do not add up: one that lost leaves, by a record of its writer, or that
   was taken for dead and came back. Its leaves are read (`_uneven`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from sqlalchemy import ColumnElement, CompoundSelect, Connection, exists, func, or_, select, union, union_all

from kvcustody.audit.evidence.processes.sequence_gaps import recorded_losses
from kvcustody.audit.evidence.processes.work_periods import RETURNED, about, life_leaves
from kvcustody.audit.evidence.query.evidence_columns import read, unit_keys
from kvcustody.audit.kinds import PROCESS_DEATH, SYSTEM, log_of, tenant_of
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.leaf.change_items import CHANGED
from kvcustody.audit.project import (
    ASSIGNED,
    ATTACHED,
    BLOCKS,
    BYTES,
    CARRIED,
    COPIES,
    COPY_KINDS,
    COUNTED_KEYS,
    CUSTODY_KINDS,
    DENIED,
    ENDED,
    EVENTS,
    GIVEN,
    LEAVES,
    MONITORED,
    MONITORED_TOKENS,
    ORPHANS,
    WRITTEN,
    Figures,
    count_events,
    custody_of,
    held_blocks,
)
from kvcustody.audit.store.database.postgres_roles import sees_one_tenant
from kvcustody.audit.store.schema.all_tables import has_leaf, is_of_leaves
from kvcustody.audit.store.schema.counters import ALL_HOURS, ALL_LOGS, counter_deltas, counters
from kvcustody.audit.store.schema.leaf_tables import custody_ends
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.errors import LedgerError
from kvcustody.times import HOUR_US

_AT_ONCE = 4096  # leaves that are read together
_NAMED = 500  # logs that are asked for by id; of more all names are read


class TenantTotals(NamedTuple):
    """A tenant's totals in the ledger.

    `held_blocks` are in its custody: handed out to it or assigned to it by others' requests, less what it was handed in
    others' segments and what has ended. Growth that no leaf lists yet is not among them. None: not known, for a process
    that still runs lost leaves; when it has ended it holds nothing, whatever was lost.
    """

    tenant: str
    residencies: int
    released: int
    attached_blocks: int
    written_blocks: int
    ended_blocks: int
    leaves: int
    assigned_blocks: int
    given_blocks: int
    held_blocks: int | None


class Denials(NamedTuple):
    """Denied requests of one reader, by one rule of one policy revision."""

    reader: str
    owner: str
    rule: str
    revision: int
    requests: int


class TierTotals(NamedTuple):
    """Copies and sealed bytes of one tier in all processes. `evidence` counts pieces, of which a copy may have two."""

    tier: str
    stored: int
    stored_bytes: int
    ended: int
    ended_bytes: int
    evidence: int

    @property
    def living(self) -> int:
        """Copies whose end is not on record."""
        return self.stored - self.ended


class EventCount(NamedTuple):
    """The number of events of one kind and outcome in a log, in a period or overall."""

    log: str
    kind: str
    outcome: str
    events: int


class _Wanted(NamedTuple):
    """Figures that are asked for; None is any."""

    measures: Sequence[str]
    kinds: Sequence[str] | None = None
    scraped: bool | None = None
    log: str | None = None
    since_us: int | None = None
    until_us: int | None = None


def tenant_totals(connection: Connection, *, tenant: str | None = None) -> tuple[TenantTotals, ...]:
    """Return totals by tenant, in name order."""
    log = None if tenant is None else log_of(tenant)
    sums: defaultdict[int, Counter[tuple[str, str]]] = defaultdict(Counter)
    measures = (EVENTS, ATTACHED, WRITTEN, ASSIGNED, GIVEN, BLOCKS, CARRIED[1])
    for number, kind, measure, _, _, value in _read(
        connection, _Wanted(measures, (*CUSTODY_KINDS, CARRIED[0]), False, log)
    ):
        sums[number][kind, measure] += value
    uneven = _uneven(connection)
    by_name = {name: sums[number] for number, name in _names(connection, sums).items()}
    totals = []
    sizes = leaves_by_tenant(connection)
    for each in sorted(sizes) if tenant is None else sizes.keys() & {tenant}:
        figures = by_name.get(log_of(each), Counter())
        by_measure = Counter[str]()
        for (_, measure), value in figures.items():
            by_measure[measure] += value
        held = None if uneven is None else held_blocks(figures) - uneven[log_of(each)]
        totals.append(
            TenantTotals(
                each,
                figures["residency-opened", EVENTS],
                figures["residency-released", EVENTS],
                by_measure[ATTACHED],
                by_measure[WRITTEN],
                figures[ENDED, BLOCKS],
                sizes[each],
                by_measure[ASSIGNED],
                by_measure[GIVEN],
                held,
            )
        )
    return tuple(totals)


class UnevenLife(NamedTuple):
    """A process whose leaves do not add up (rule 3)."""

    id: int
    uuid: str
    is_running: bool
    has_losses: bool


def uneven_lives(connection: Connection) -> list[UnevenLife]:
    """Return every such process. A connection of one tenant cannot see returns, so processes that died count as
    running.
    """
    losing, is_alone = recorded_losses(connection), sees_one_tenant(connection)
    is_uneven: ColumnElement[bool]
    if not is_alone:
        came_back = any(_read(connection, _Wanted((LEAVES,), (RETURNED,), None, SYSTEM)))
        bodies = [leaf.body for leaf in life_leaves(connection)] if came_back else []
        returned = {about(body) for body in bodies if body["kind"] == RETURNED}
        is_uneven = incarnations.c.uuid.in_(losing | returned)
    else:
        died = select(custody_ends.c.incarnation).where(custody_ends.c.cause == PROCESS_DEATH)
        is_uneven = or_(incarnations.c.id.in_(died.where(has_leaf(custody_ends))), incarnations.c.uuid.in_(losing))
    query = select(incarnations.c.id, incarnations.c.uuid, incarnations.c.end).where(is_uneven)
    return [
        UnevenLife(row.id, row.uuid, row.end is None or (is_alone and not is_losing), is_losing)
        for row in connection.execute(query.order_by(incarnations.c.id))
        for is_losing in (row.uuid in losing,)
    ]


def _uneven(connection: Connection) -> Counter[str] | None:
    """By log, what the sums have too much because of such processes; None: it cannot be known."""
    found: Counter[str] = Counter()
    for life in uneven_lives(connection):
        if life.is_running and life.has_losses:
            return None
        found.update(_ended_twice(connection, life.id) if life.is_running else _left_over(connection, life.id))
    return found


def _left_over(connection: Connection, life: int) -> Counter[str]:
    """By log, what an ended process would hold by the leaves that are there: it holds nothing.

    Ends are those that anybody said for it, and none that it said for another.
    """
    own = events.c.kind.in_([kind for kind in (*CUSTODY_KINDS, CHANGED) if kind != ENDED])
    end = (custody_ends.c.log == events.c.log) & (custody_ends.c.idx == events.c.idx)
    of_life = exists().where(end, custody_ends.c.incarnation == life, has_leaf(custody_ends))
    said = ((events.c.incarnation == life) & own) | ((events.c.kind == ENDED) & of_life)
    query = select(events.c.leaf, logs.c.name).join(logs, logs.c.id == events.c.log).where(said, has_leaf(events))
    names: dict[str, int] = {}
    figures = Figures()
    for rows in connection.execute(query.execution_options(yield_per=_AT_ONCE)).partitions():
        batch = read_leaves([bytes(row.leaf) for row in rows], hashed=False, keys=COUNTED_KEYS)
        count_events(batch, [names.setdefault(row.name, len(names)) for row in rows], figures)
    by_log = list(names)
    found: Counter[str] = Counter()
    for (_, number, _), of_hour in figures.items():
        found[by_log[number]] += custody_of(of_hour)
    return found


def _ended_twice(connection: Connection, life: int) -> Counter[str]:
    """By log, less one for each block with two ends: one that was said for the process, and its own as it came back."""
    ends = read(connection, custody_ends, (custody_ends.c.tenant,), custody_ends.c.incarnation == life)
    _, first = np.unique(unit_keys(ends.pairs.pools, ends.pairs.generations), return_index=True)
    is_again = np.ones(len(ends.owner), np.bool_)
    is_again[first] = False
    tenants = ends.texts("tenant")
    again = Counter(log_of(tenants[row]) for row in ends.owner[is_again].tolist())
    return Counter({log: -blocks for log, blocks in again.items()})


def leaves_by_tenant(connection: Connection) -> dict[str, int]:
    """Return the number of leaves in each tenant's log, including those that retention dropped."""
    query = select(logs.c.name, logs.c.size).where(logs.c.name.like(log_of("%")))
    return {tenant_of(name): size for name, size in connection.execute(query)}


class LargestTenants(NamedTuple):
    """The leaves of the largest tenants by name, largest first, and those of all other tenants together."""

    leaves: dict[str, int]
    others: int


def largest_tenants(connection: Connection, limit: int) -> LargestTenants:
    """Return the largest tenants; in one snapshot with the others if the transaction has one."""
    of_tenants = logs.c.name.like(log_of("%"))
    largest = select(logs.c.name, logs.c.size).where(of_tenants).order_by(logs.c.size.desc(), logs.c.name)
    found = {tenant_of(name): size for name, size in connection.execute(largest.limit(limit))}
    every = int(connection.scalar(select(func.sum(logs.c.size)).where(of_tenants)) or 0)
    return LargestTenants(found, every - sum(found.values()))


def denials_by_rule(
    connection: Connection,
    *,
    tenant: str | None = None,
    since_us: int | None = None,
    until_us: int | None = None,
) -> tuple[Denials, ...]:
    """Return denied requests by reader, owner, rule and revision, both counted and recorded, in the whole hours of a
    period; without a period, of all time.
    """
    own = None if tenant is None else log_of(tenant)
    wanted = _Wanted((DENIED,), scraped=True, log=own, since_us=since_us, until_us=until_us)
    by_log: Counter[tuple[int, str, str]] = Counter()
    for log, _, _, rule, detail, value in _read(connection, wanted):
        by_log[log, rule, detail] += value
    names = _names(connection, {log for log, _, _ in by_log})
    totals: Counter[tuple[str, str, str, int]] = Counter()
    for (log, rule, detail), value in by_log.items():
        if log not in names:
            continue
        revision, _, owner = detail.partition(" ")
        totals[tenant_of(names[log]), owner, rule, int(revision)] += value
    return tuple(Denials(*key, totals[key]) for key in sorted(totals) if totals[key])


def monitored_figures(
    connection: Connection, *, since_us: int | None = None, until_us: int | None = None
) -> dict[str, Counter[str]]:
    """Return monitored requests and tokens by tenant, in the whole hours of a period."""
    wanted = _Wanted((EVENTS, *MONITORED_TOKENS), (MONITORED,), since_us=since_us, until_us=until_us)
    by_log: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for log, _, measure, outcome, _, value in _read(connection, wanted):
        sums = by_log[log]
        sums[measure] += value
        if measure == EVENTS and outcome == "would-deny":
            sums["would_deny"] += value
    return {tenant_of(name): by_log[log] for log, name in _names(connection, by_log).items()}


def orphans_by_class(connection: Connection) -> Counter[str]:
    """Return the recorded orphan findings by class."""
    found: Counter[str] = Counter()
    for _, _, _, outcome, _, value in _read(connection, _Wanted((EVENTS,), (ORPHANS,), True)):
        found[outcome] += value
    return found


def tier_totals(connection: Connection, *, tenant: str | None = None) -> tuple[TierTotals, ...]:
    """Return the copies in the ledger by tier, in name order."""
    log = None if tenant is None else log_of(tenant)
    sums: Counter[tuple[str, str, str]] = Counter()
    for _, kind, measure, _, tier, value in _read(connection, _Wanted((COPIES, BYTES), COPY_KINDS, False, log)):
        sums[tier, kind, measure] += value
    stored, ended, destroyed = COPY_KINDS
    return tuple(
        TierTotals(
            tier,
            sums[tier, stored, COPIES],
            sums[tier, stored, BYTES],
            sums[tier, ended, COPIES],
            sums[tier, ended, BYTES],
            sums[tier, destroyed, COPIES],
        )
        for tier in sorted({tier for tier, _, _ in sums})
    )


def event_counts(
    connection: Connection,
    *,
    tenant: str | None = None,
    kind: str | None = None,
    since_us: int | None = None,
    until_us: int | None = None,
) -> tuple[EventCount, ...]:
    """Return events by log, kind and outcome, in the whole hours of a period; without a period, of all time."""
    wanted = _Wanted(
        (EVENTS,),
        None if kind is None else (kind,),
        log=None if tenant is None else log_of(tenant),
        since_us=since_us,
        until_us=until_us,
    )
    event_sums: Counter[tuple[int, str, str]] = Counter()
    for log, of_kind, _, outcome, _, value in _read(connection, wanted):
        event_sums[log, of_kind, outcome] += value
    names = _names(connection, {log for log, _, _ in event_sums})
    counts = (
        EventCount(names[log], of_kind, outcome, events)
        for (log, of_kind, outcome), events in event_sums.items()
        if events and log in names
    )
    return tuple(sorted(counts))


class HourlyFigure(NamedTuple):
    """A figure of one log in one hour. `name` is the log's."""

    hour_us: int
    name: str
    kind: str
    measure: str
    outcome: str
    value: int


def figures_by_hour(
    connection: Connection,
    measures: Sequence[str],
    kinds: Sequence[str] | None = None,
    *,
    tenant: str | None = None,
    since_us: int,
    until_us: int,
    scraped: bool = False,
) -> Iterator[HourlyFigure]:
    """Yield the figures of a period's whole hours, of one tenant or of every log; one may come in several parts."""
    log = None if tenant is None else log_of(tenant)
    only = None if log is None else tuple(connection.scalars(select(logs.c.id).where(logs.c.name == log)))
    names = {row.id: str(row.name) for row in connection.execute(select(logs.c.id, logs.c.name))}
    for log_id, hour_us, figures in _hourly(connection, max(0, since_us), until_us, only, scraped=(scraped,)):
        for kind, measure, outcome, _, _, value in figures:
            if measure in measures and (kinds is None or kind in kinds) and log_id in names:
                yield HourlyFigure(hour_us, names[log_id], kind, measure, outcome, value)


def hours_with_leaves(connection: Connection, *, tenant: str | None = None, since_us: int, until_us: int) -> set[int]:
    """Return the hours of a period in which anything was recorded, by anybody or in one tenant's log."""
    only = None
    if tenant is not None:
        only = tuple(connection.scalars(select(logs.c.id).where(logs.c.name == log_of(tenant))))
    rows = _hourly(connection, max(0, since_us), until_us, only, over_all=tenant is None)
    return {hour_us for _, hour_us, figures in rows if figures}


_Figure = tuple[int, str, str, str, str, int]
"""Log id, kind, measure, outcome, detail and value."""
HourCount = tuple[int, str, str, int]
"""Hour, kind, outcome and events; requests that were denied stand under the kind `denied`, by rule."""


def hourly_counts(
    connection: Connection, log: str | None, *, since_us: int | None = None, until_us: int | None = None
) -> Iterator[HourCount]:
    """Yield the hourly counts of a period's whole hours, in one log or over all; one hour and kind may have
    several.
    """
    only: tuple[int, ...] | None = None
    if log is not None:
        only = tuple(connection.scalars(select(logs.c.id).where(logs.c.name == log)))
    for _, hour_us, figures in _hourly(connection, max(0, since_us or 0), until_us, only, over_all=log is None):
        for kind, measure, outcome, _, _, value in figures:
            if measure == EVENTS:
                yield hour_us, kind, outcome, value
            elif measure == DENIED:
                yield hour_us, DENIED, outcome, value


def events_by_log(
    connection: Connection,
    *,
    kinds: Sequence[str] = (),
    outcome: str | None = None,
    since_us: int | None = None,
    until_us: int | None = None,
) -> Counter[str]:
    """Return events of some kinds by log, in the whole hours of a period; with an outcome, only those."""
    counts: Counter[int] = Counter()
    span = hour_span(connection)
    whole = span is None or ((since_us or 0) <= span[0] and (until_us is None or until_us > span[1]))
    since_us, until_us = (ALL_HOURS, None) if whole else (max(0, since_us or 0), until_us)
    for log, _, figures in _hourly(connection, since_us, until_us, None):
        for kind, measure, came_out, _, _, value in figures:
            if measure == EVENTS and (not kinds or kind in kinds) and (outcome is None or came_out == outcome):
                counts[log] += value
    names = {row.id: row.name for row in connection.execute(select(logs.c.id, logs.c.name))} if counts else {}
    return Counter({str(names[log]): number for log, number in counts.items() if log in names and number})


def _hourly(
    connection: Connection,
    since_us: int,
    until_us: int | None,
    only: Sequence[int] | None,
    *,
    over_all: bool = False,
    scraped: tuple[bool, ...] = (False, True),
) -> Iterator[tuple[int, int, list[Any]]]:
    """Log id, hour and figures as they are packed, folded and not (rule 1); plain lists, for there may be many.

    `since_us` `ALL_HOURS` gives what there is of all time. `over_all` takes the sums over logs where there are such.
    """
    parts = []
    for table in (counters, counter_deltas):
        column = table.c
        query = select(column.log, column.hour_us, column.figures).where(
            column.scraped.in_(scraped),  # the key begins with it
        )
        if since_us != ALL_HOURS:
            query = query.where(column.hour_us >= max(0, since_us) // HOUR_US * HOUR_US)
            query = query if until_us is None else query.where(column.hour_us < until_us)
        elif table is counters:
            query = query.where(column.hour_us == ALL_HOURS)
        if table is counter_deltas:
            query = query.where(is_of_leaves(counter_deltas))
        if over_all and table is counters:
            query = query.where(column.log == ALL_LOGS)
        elif only is None:
            query = query.where(column.log.in_(select(logs.c.id)))
        else:
            query = query.where(column.log.in_(only))
        parts.append(query)
    try:
        for log, hour_us, figures in connection.execute(union_all(*parts)):
            yield log, hour_us, orjson.loads(figures)
    except ValueError as problem:
        raise _unreadable(hour_us) from problem


def hour_span(connection: Connection) -> tuple[int, int] | None:
    """Return the beginnings of the first and the last hour with figures; None if there are none."""
    parts = []
    for table in (counters, counter_deltas):
        for scraped in (False, True):  # the key begins with it
            column = table.c.hour_us
            own = select(func.min(column), func.max(column)).where(table.c.scraped == scraped)
            parts.append(own.where(column != ALL_HOURS))
    edges = [pair for pair in connection.execute(union_all(*parts)).all() if pair[0] is not None]
    return (min(pair[0] for pair in edges), max(pair[1] for pair in edges)) if edges else None


def hourly_leaves(
    connection: Connection, since_us: int, until_us: int, only: Sequence[int] | None = None
) -> Iterator[tuple[int, int, str, int]]:
    """Return log id, hour, kind and number of leaves in the hours of a period; of these logs, or of all."""
    found: Counter[tuple[int, int, str]] = Counter()
    for log, hour_us, figures in _hourly(connection, since_us, until_us, only):
        for kind, measure, _, _, _, value in figures:
            if measure == LEAVES:
                found[log, hour_us, kind] += value
    return ((*key, value) for key, value in found.items() if value > 0)


def leaves_in(connection: Connection, log: int | None, *, since_us: int, until_us: int | None) -> int:
    """Return the number of leaves of one log or all logs in the hours of a period."""
    rows = _hourly(connection, since_us, until_us, None if log is None else (log,), over_all=log is None)
    return sum(value for _, _, figures in rows for _, measure, _, _, _, value in figures if measure == LEAVES)


def logs_with(kinds: Sequence[str]) -> CompoundSelect[tuple[int]]:
    """Return a query for the ids of the logs with an event of one of these kinds; leaves count under their own kind
    too.
    """
    parts = []
    for table in (counters, counter_deltas):
        named = or_(*(table.c.figures.contains(f'["{kind}",', autoescape=True) for kind in kinds))
        of_all = [table.c.hour_us == ALL_HOURS] if table is counters else []
        parts.append(select(table.c.log).where(table.c.scraped.in_((False, True)), *of_all, named))
    return union(*parts)


def _read(connection: Connection, wanted: _Wanted) -> Iterator[_Figure]:
    """Folded and not, by hour where a period is asked for, else of all time (rule 1); plain, for there may be many."""
    only: tuple[int, ...] | None = None
    if wanted.log is not None:
        only = tuple(connection.scalars(select(logs.c.id).where(logs.c.name == wanted.log)))
    period = (wanted.since_us, wanted.until_us) != (None, None)
    rows = _hourly(
        connection,
        max(0, wanted.since_us or 0) if period else ALL_HOURS,
        wanted.until_us,
        only,
        scraped=(False, True) if wanted.scraped is None else (wanted.scraped,),
    )
    measures, kinds = wanted.measures, wanted.kinds
    for log, hour_us, figures in rows:
        try:
            for kind, measure, outcome, detail, _, value in figures:
                if measure in measures and (kinds is None or kind in kinds):
                    yield log, kind, measure, outcome, detail, value
        except (TypeError, ValueError) as problem:
            raise _unreadable(hour_us) from problem


def _names(connection: Connection, ids: Collection[int]) -> dict[int, str]:
    """Return the names of these logs, by id."""
    if not ids:
        return {}
    query = select(logs.c.id, logs.c.name)
    if len(ids) <= _NAMED:
        query = query.where(logs.c.id.in_(list(ids)))
    return {row.id: str(row.name) for row in connection.execute(query) if row.id in ids}


def _unreadable(hour_us: int) -> LedgerError:
    return LedgerError(f"figures of the hour `{hour_us}` cannot be read; run `kvcustody audit fsck`")
