"""Pages of leaves from all logs by time, newest or oldest first.

1. The order is (time, log, idx), which the leaves alone determine. With the newest first, leaves written meanwhile come
   before the first page and move no later page.
2. The ledger's figures show which logs have leaves in which hours. So an hour or a log without any, or without the
   requested kinds, costs nothing. A leaf's content is checked as in `query.events`.
3. One call looks at about `scan_max` leaves. A page that ends there is short but still has a cursor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, or_, select

from kvcustody.audit.evidence.counters.read_figures import hour_span, hourly_leaves
from kvcustody.audit.evidence.query.events import (
    LAST_LOG,
    Cursor,
    EventFilter,
    EventRow,
    LeafPage,
    Log,
    check_cursor,
    conditions_of,
    logs_of,
    row_of,
    says,
)
from kvcustody.audit.leaf.change_items import CHANGED
from kvcustody.audit.leaf.leaf_schema import LIST_OF_KIND
from kvcustody.audit.store.schema.all_tables import is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import event_traces
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.times import HOUR_US

_LARGEST = 1 << 62
_TOGETHER, _SEARCHED_TOGETHER = (
    10_000,
    50_000,
)  # leaves of a slice of which all logs are asked by one statement


class _Slice(NamedTuple):
    """A period, the logs that have leaves in it, and about how many."""

    since_us: int
    until_us: int
    logs: tuple[int, ...]
    leaves: int


def find_by_time(
    connection: Connection,
    wanted: EventFilter,
    *,
    newest: bool = True,
    after: Cursor | None = None,
    limit: int = 100,
    as_of: int | None = None,
    scan_max: int = 200_000,
) -> LeafPage:
    """Return one page; raises `ProofError` without a checkpoint of `as_of` root leaves, and `CursorError`."""
    check_cursor(connection, after)
    sizes = None if as_of is None else LedgerProofs(connection).sizes(as_of)
    logs = {log.id: log for log in logs_of(connection, wanted)}
    conditions = conditions_of(connection, wanted)
    if wanted.trace is not None:
        conditions.append(event_traces.c.trace == wanted.trace)
        slices: Iterator[_Slice] = iter([_Slice(wanted.since_us or 0, _until(wanted), tuple(logs), 0)])
    else:
        slices = _slices(connection, wanted, logs, after, newest, scan_max)
    rows: list[EventRow] = []
    scanned = 0
    for part in slices:
        if scanned and scanned + (part.leaves if conditions else 0) > scan_max:
            edge = Cursor(LAST_LOG, part.until_us - 1, 0) if newest else Cursor(-1, part.since_us, 0)
            return LeafPage(tuple(rows), edge, scanned)
        found, last = _of_slice(connection, part, logs, wanted, conditions, sizes, after, newest, limit - len(rows))
        rows += found
        scanned += part.leaves if conditions else len(found)
        if last is not None:
            return LeafPage(tuple(rows), last, scanned)
    return LeafPage(tuple(rows), None, scanned)


def _until(wanted: EventFilter) -> int:
    return _LARGEST if wanted.until_us is None else wanted.until_us


def _slices(
    connection: Connection,
    wanted: EventFilter,
    logs: Mapping[int, Log],
    after: Cursor | None,
    newest: bool,
    scan_max: int,
) -> Iterator[_Slice]:
    """Yield the hours that may have matching leaves, in order; very large hours in pieces (rule 3)."""
    since_us, until_us = wanted.since_us or 0, _until(wanted)
    if after is not None:
        since_us, until_us = (
            (since_us, min(until_us, after.at_us + 1)) if newest else (max(since_us, after.at_us), until_us)
        )
    kinds = {*wanted.kinds, *(CHANGED for kind in wanted.kinds if kind in LIST_OF_KIND)}
    only = tuple(logs) if len(logs) == 1 else None
    for first_us, last_us in _windows(connection, since_us, until_us, newest):
        hours: defaultdict[int, set[int]] = defaultdict(set)
        every: defaultdict[int, int] = defaultdict(int)
        for log, hour_us, kind, leaves in hourly_leaves(connection, first_us, last_us, only):
            if log in logs:
                every[hour_us] += leaves
                if not kinds or kind in kinds:
                    hours[hour_us].add(log)
        together: list[int] = []
        for hour_us in sorted(hours, reverse=newest):
            if together and sum(every[hour] for hour in together) + every[hour_us] > _TOGETHER:
                yield _joined(together, hours, every, since_us, until_us)
                together = []
            if every[hour_us] <= scan_max:
                together.append(hour_us)
                continue
            yield from _pieces(
                hour_us, tuple(sorted(hours[hour_us])), every[hour_us], (since_us, until_us), newest, scan_max
            )
        if together:
            yield _joined(together, hours, every, since_us, until_us)


def _joined(
    together: Sequence[int],
    hours: Mapping[int, set[int]],
    every: Mapping[int, int],
    since_us: int,
    until_us: int,
) -> _Slice:
    """Hours with few leaves, as one slice: many are asked about at once."""
    logs = sorted(set().union(*(hours[hour] for hour in together)))
    first, last = max(min(together), since_us), min(max(together) + HOUR_US, until_us)
    return _Slice(first, last, tuple(logs), sum(every[hour] for hour in together))


def _pieces(
    hour_us: int, logs: tuple[int, ...], leaves: int, period: tuple[int, int], newest: bool, scan_max: int
) -> Iterator[_Slice]:
    """One hour with very many leaves."""
    pieces = min(3600, -(-leaves // scan_max))
    width = HOUR_US // pieces
    places = range(pieces)
    for place in reversed(places) if newest else places:
        first = max(hour_us + place * width, period[0])
        last = min(hour_us + (HOUR_US if place == pieces - 1 else (place + 1) * width), period[1])
        if first < last:
            yield _Slice(first, last, logs, leaves // pieces)


def _windows(connection: Connection, since_us: int, until_us: int, newest: bool) -> Iterator[tuple[int, int]]:
    """Whole hours of a period in order, few at first: a first page reads few figures, a long search few times."""
    span = hour_span(connection)
    if span is None:
        return
    low = max(since_us // HOUR_US * HOUR_US, span[0])
    high = min(until_us, span[1] + HOUR_US)
    hours = 1
    while low < high:
        if newest:
            first = max(low, -(-high // HOUR_US) * HOUR_US - hours * HOUR_US)
            yield first, high
            high = first
        else:
            last = min(high, low + hours * HOUR_US)
            yield low, last
            low = last
        hours *= 2


def _of_slice(
    connection: Connection,
    part: _Slice,
    logs: Mapping[int, Log],
    wanted: EventFilter,
    conditions: Sequence[ColumnElement[bool]],
    sizes: Mapping[str, int] | None,
    after: Cursor | None,
    newest: bool,
    limit: int,
) -> tuple[list[EventRow], Cursor | None]:
    """Return the first matching leaves of a slice, and where they end if there may be more than `limit`."""
    entries: list[tuple[Cursor, EventRow]] = []
    few = part.leaves <= (_SEARCHED_TOGETHER if conditions else _TOGETHER)
    at_once = [part.logs] if few and wanted.trace is None else [(log,) for log in part.logs]
    for some in at_once:
        edge = None  # what is behind the last of as many leaves as are asked for is not read
        if len(entries) >= limit:
            entries = sorted(entries, key=lambda each: _order(each[0]), reverse=newest)[:limit]
            edge = entries[-1][0].at_us
        entries += _of_logs(connection, some, part, logs, wanted, conditions, sizes, after, newest, limit, edge)
    entries.sort(key=lambda each: _order(each[0]), reverse=newest)
    kept = entries[:limit]
    return [row for _, row in kept], kept[-1][0] if len(entries) >= limit else None


def _of_logs(
    connection: Connection,
    some: Sequence[int],
    part: _Slice,
    logs: Mapping[int, Log],
    wanted: EventFilter,
    conditions: Sequence[ColumnElement[bool]],
    sizes: Mapping[str, int] | None,
    after: Cursor | None,
    newest: bool,
    limit: int,
    edge_us: int | None,
) -> Iterator[tuple[Cursor, EventRow]]:
    column = events.c
    since_us, until_us = part.since_us, part.until_us
    if edge_us is not None:
        since_us, until_us = (max(since_us, edge_us), until_us) if newest else (since_us, min(until_us, edge_us + 1))
    inside: list[ColumnElement[bool]] = [
        column.log == some[0] if len(some) == 1 else column.log.in_(some),
        column.at_us >= since_us,
        column.at_us < until_us,
        *conditions,
    ]
    query = select(column.log, column.at_us, column.idx, column.kind, column.leaf)
    if wanted.trace is not None:
        query = query.select_from(events).join(event_traces, is_leaf_of(event_traces))
    order: tuple[Any, ...] = (column.at_us, column.log, column.idx)
    if len(some) == 1:  # as the index has it
        order = (column.at_us, column.idx)
    order = tuple(each.desc() for each in order) if newest else order
    place, taken = after, 0
    while taken < limit:
        rows = connection.execute(query.where(*inside, *_behind(place, newest)).order_by(*order).limit(limit)).all()
        for log, *of in rows:
            made = row_of(logs[log].name, of)
            place = Cursor(log, made.at_us, made.idx)
            if (sizes is None or made.idx < sizes.get(made.log, 0)) and says(made.body, wanted):
                taken += 1
                yield place, made
        if len(rows) < limit:
            return


def _order(place: Cursor) -> tuple[int, int, int]:
    return place.at_us, place.log, place.idx


def _behind(place: Cursor | None, newest: bool) -> list[ColumnElement[bool]]:
    """What keeps to the leaves that are behind a place in the order."""
    if place is None:
        return []
    at_us, log, idx = events.c.at_us, events.c.log, events.c.idx
    if newest:
        further = or_(log < place.log, and_(log == place.log, idx < place.idx))
        return [at_us <= place.at_us, or_(at_us < place.at_us, further)]
    further = or_(log > place.log, and_(log == place.log, idx > place.idx))
    return [at_us >= place.at_us, or_(at_us > place.at_us, further)]
