"""Pages of leaves by content: filters, a stable order, cursors, and the ledger as of a checkpoint.

1. The order is (log, time, idx). The leaves alone determine it, so pages neither repeat nor skip a leaf. As of a
   checkpoint the answer never changes. Without one, leaves that are written meanwhile may appear behind the cursor's
   log. A cursor after a leaf that the ledger lacks, for example after a restore, is refused (`CursorError`).
2. A filter on a leaf's content is applied to its canonical bytes in the database, and checked again on the decoded
   leaf. So no projection can invent a leaf. The leaves of a trace or a block are found by projections, which `fsck`
   checks against the leaves.
3. One call looks at no more than `scan_max` leaves. A page that ends there is short but still has a cursor.
4. With many logs, a search by kind reads only those that have the kind according to the figures (`schema.counters`),
   which `fsck` checks against the leaves. Small logs are searched together.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import orjson
from sqlalchemy import ColumnElement, Connection, Select, and_, bindparam, exists, func, literal, or_, select

from kvcustody.audit.evidence.counters.read_figures import logs_with
from kvcustody.audit.kinds import log_of
from kvcustody.audit.kinds.block_runs import blocks_at, names_block
from kvcustody.audit.leaf.change_items import CHANGED, plain_bodies
from kvcustody.audit.leaf.leaf_schema import LIST_OF_KIND
from kvcustody.audit.store.database.dialect import dialect_of, fetch_all
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import (
    attachments,
    custody_ends,
    event_traces,
    receipts,
    releases,
    residencies,
)
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.errors import LedgerError

_WINDOW = 20_000
_LOGS_TOGETHER = 1000
_ONE_LOG = "SELECT id, name, size FROM logs WHERE name = ?"
LAST_LOG = (1 << 31) - 1  # above the id of any log
_BEFORE_ALL = -(1 << 62)  # a time before that of any leaf
_OUTCOMES = ("outcome", "effect", "result")
_RULES = ("rule", "reasons")
_GRANTS = ("grant", "via", "ids", "reasons")


class CursorError(LedgerError):
    """A cursor points behind a leaf that the ledger never had, or lost in a restore."""


class BlockRef(NamedTuple):
    """One block of one incarnation's pool, at one generation."""

    incarnation: str
    block: int
    generation: int
    pool: int = 0


class EventFilter(NamedTuple):
    """Selects leaves; None and empty mean any. Times are UTC µs, `until_us` is exclusive.

    `logs` restricts what can be seen at all (a tenant's own log); `tenant` is that tenant's log. `rule` and `grant`
    are ids among what determined a decision; `outcome` is an outcome, effect or result; `trace` is a W3C trace id.
    `reader` is the tenant that asked for blocks of `owner`; `generation` is the number of a hand-out, in any pool.
    """

    logs: tuple[str, ...] | None = None
    tenant: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    kinds: tuple[str, ...] = ()
    outcome: str | None = None
    actor: str | None = None
    rule: str | None = None
    grant: str | None = None
    revision: int | None = None
    residency: int | None = None
    incarnation: str | None = None
    block: BlockRef | None = None
    trace: str | None = None
    reader: str | None = None
    owner: str | None = None
    generation: int | None = None


class Cursor(NamedTuple):
    """The place after a leaf of the log with this id, at this time and idx."""

    log: int
    at_us: int
    idx: int

    def to_text(self) -> str:
        """Return the cursor as text; not signed."""
        return base64.urlsafe_b64encode(b"%d.%d.%d" % self).decode().rstrip("=")

    @classmethod
    def from_text(cls, text: str) -> Cursor:
        """Return the cursor from its text; raises `LedgerError` for anything else."""
        try:
            padded = text + "=" * (-len(text) % 4)
            log, at_us, idx = (int(part) for part in base64.urlsafe_b64decode(padded).split(b"."))
        except ValueError:
            raise LedgerError(f"cursor `{text[:40]}` is not valid; start again without it") from None
        return cls(log, at_us, idx)


@dataclass(slots=True)
class EventRow:
    """One leaf. `decoded` None: it is decoded on first access, because an API page only returns the bytes."""

    log: str
    idx: int
    at_us: int
    kind: str
    decoded: dict[str, Any] | None = field(compare=False, repr=False)
    leaf: bytes

    @property
    def body(self) -> dict[str, Any]:
        """The leaf decoded."""
        if self.decoded is None:
            self.decoded = orjson.loads(self.leaf)
        return self.decoded


class LeafPage(NamedTuple):
    """Some leaves, and the start of the next page (None: there is none)."""

    rows: tuple[EventRow, ...]
    next: Cursor | None
    scanned: int


def find_events(
    connection: Connection,
    wanted: EventFilter,
    *,
    after: Cursor | None = None,
    limit: int = 100,
    as_of: int | None = None,
    scan_max: int = 1_000_000,
) -> LeafPage:
    """Return one page; raises `ProofError` without a checkpoint of `as_of` root leaves, and `CursorError`."""
    check_cursor(connection, after)
    sizes = None if as_of is None else LedgerProofs(connection).sizes(as_of)
    rows: list[EventRow] = []
    scanned = 0
    conditions = conditions_of(connection, wanted)
    searched = bool(conditions) and wanted.trace is None
    for together in _together(logs_of(connection, wanted, after), searched):
        log, name, _ = together[0]
        place = after if after is not None and after.log == log else None
        if len(together) > 1:
            found, full = _of_several(connection, together, wanted, conditions, sizes, place, limit - len(rows))
            rows += found
            if full is not None:
                return LeafPage(tuple(rows), full, scanned)
            scanned += sum(each.size for each in together)
            if scanned >= scan_max:
                return LeafPage(tuple(rows), Cursor(together[-1].id + 1, _BEFORE_ALL, -1), scanned)
            continue
        below = None if sizes is None else sizes.get(name, 0)
        if not conditions and wanted.trace is None:  # every leaf of the period: nothing to search for, so no window
            plain = [row_of(name, row) for row in _next(connection, log, wanted, below, place, limit - len(rows))]
            rows += plain
            scanned += len(plain)
            if len(rows) == limit:
                return LeafPage(tuple(rows), Cursor(log, rows[-1].at_us, rows[-1].idx), scanned)
            continue
        while True:
            window = _Window(connection, log, wanted, below, place)
            for row in window.rows(conditions, limit - len(rows)):
                made = row_of(name, row)
                if says(made.body, wanted):
                    rows.append(made)
                place = Cursor(log, row.at_us, row.idx)
                if len(rows) == limit:
                    return LeafPage(tuple(rows), place, scanned)
            if window.is_clipped:
                continue  # more matches in this window than were asked for, and some did not hold
            scanned += window.size
            if window.end is None:
                break
            place = window.end
            if scanned >= scan_max:
                return LeafPage(tuple(rows), place, scanned)
    return LeafPage(tuple(rows), None, scanned)


def check_cursor(connection: Connection, after: Cursor | None) -> None:
    """Raise `CursorError` unless the ledger has the cursor's leaf, or had it before a purge (rule 1)."""
    if after is None or after.idx < 0 or not 0 <= after.log < LAST_LOG:
        return  # a page that ended between two logs, or between two hours
    column = events.c
    there = (column.log == logs.c.id) & (column.idx == after.idx) & has_leaf(events)
    query = select(logs.c.size, column.at_us).select_from(logs.outerjoin(events, there))
    found = connection.execute(query.where(logs.c.id == after.log)).first()
    if found is None or found.size <= after.idx or found.at_us not in (None, after.at_us):
        raise CursorError(
            "the cursor points to a leaf that this ledger does not have (was it restored?); start again without it"
        )


def every_event(
    connection: Connection, wanted: EventFilter, *, as_of: int | None = None, page: int = 1000
) -> Iterator[EventRow]:
    """Yield all leaves of a filter, page by page, with bounded memory."""
    after: Cursor | None = None
    while True:
        found = find_events(connection, wanted, after=after, limit=page, as_of=as_of)
        yield from found.rows
        if found.next is None:
            return
        after = found.next


def newest_events(connection: Connection, wanted: EventFilter, *, limit: int = 20) -> tuple[EventRow, ...]:
    """Return the last leaves of a filter over all its logs, oldest first."""
    rows: list[EventRow] = []
    conditions = conditions_of(connection, wanted)
    for log, name, _ in logs_of(connection, wanted, None):
        column = _ordered(wanted)
        query = (
            _leaves(wanted)
            .where(*_inside(log, wanted, None, None), *conditions)
            .order_by(column.at_us.desc(), column.idx.desc())
        )
        row_count = 0
        for row in connection.execution_options(stream_results=True).execute(query):
            made = row_of(name, row)
            if says(made.body, wanted):
                rows.append(made)
                row_count += 1
            if row_count == limit:
                break
    return tuple(sorted(rows, key=lambda row: (row.at_us, row.log, row.idx))[-limit:])


class Log(NamedTuple):
    """A log: its id, its name, and its number of leaves."""

    id: int
    name: str
    size: int


def _together(every: Sequence[Log], searched: bool) -> Iterator[list[Log]]:
    """Yield the logs in order, grouped for searching: small logs together, and only those that may match."""
    some: list[Log] = []
    leaves = 0
    for log in every:
        if some and (not searched or leaves + log.size > _WINDOW or len(some) == _LOGS_TOGETHER):
            yield some
            some, leaves = [], 0
        some.append(log)
        leaves += log.size
    if some:
        yield some


def _of_several(
    connection: Connection,
    together: Sequence[Log],
    wanted: EventFilter,
    conditions: Sequence[ColumnElement[bool]],
    sizes: Mapping[str, int] | None,
    place: Cursor | None,
    limit: int,
) -> tuple[list[EventRow], Cursor | None]:
    """Return the matching leaves of small logs, and where they end if there may be more than `limit`."""
    column, names, event_rows = events.c, {log.id: log.name for log in together}, list[EventRow]()
    query = select(column.log, column.at_us, column.idx, column.kind, column.leaf)
    query = query.where(column.log.in_(names), *_times(wanted), *conditions)
    query = query.order_by(column.log, column.at_us, column.idx).limit(limit)
    while True:
        asked = query
        if place is not None:
            later = or_(column.at_us > place.at_us, and_(column.at_us == place.at_us, column.idx > place.idx))
            asked = query.where(or_(column.log > place.log, and_(column.log == place.log, later)))
        rows = connection.execute(asked).all()
        for log, *of in rows:
            made = row_of(names[log], of)
            place = Cursor(log, made.at_us, made.idx)
            if (sizes is None or made.idx < sizes.get(made.log, 0)) and says(made.body, wanted):
                event_rows.append(made)
                if len(event_rows) == limit:
                    return event_rows, place
        if len(rows) < limit:
            return event_rows, None


def _next(
    connection: Connection, log: int, wanted: EventFilter, below: int | None, place: Cursor | None, limit: int
) -> Sequence[Any]:
    """Return the next leaves of a log in a period, matching or not."""
    at_us, idx = (None, None) if place is None else (place.at_us, place.idx)
    asked = {"log": log, "since": wanted.since_us, "until": wanted.until_us, "below": below}
    asked |= {"at_us": at_us, "idx": idx, "limit": limit}
    given = {name: value for name, value in asked.items() if value is not None}
    return connection.execute(_statement(frozenset(given)), given).all()


@cache
def _statement(parameters: frozenset[str]) -> Select[Any]:
    """Return the query of `_next` with these parameters; building it takes as long as running it."""
    column = events.c
    conditions: list[ColumnElement[bool]] = [column.log == bindparam("log")]
    if "since" in parameters:
        conditions.append(column.at_us >= bindparam("since"))
    if "until" in parameters:
        conditions.append(column.at_us < bindparam("until"))
    if "below" in parameters:
        conditions.append(column.idx < bindparam("below"))
    if "at_us" in parameters:
        past = or_(column.at_us > bindparam("at_us"), column.idx > bindparam("idx"))
        conditions += [column.at_us >= bindparam("at_us"), past]
    query = select(column.at_us, column.idx, column.kind, column.leaf).where(*conditions)
    return query.order_by(column.at_us, column.idx).limit(bindparam("limit"))


def _inside(log: int, wanted: EventFilter, below: int | None, place: Cursor | None) -> list[ColumnElement[bool]]:
    """What keeps to a log, a trace, a period, a checkpoint, and behind a place."""
    column = _ordered(wanted)
    conditions = [column.log == log, *_times(wanted)]
    if wanted.trace is not None:
        conditions.append(event_traces.c.trace == wanted.trace)
    if below is not None:
        conditions.append(column.idx < below)
    if place is not None:
        past = or_(column.at_us > place.at_us, column.idx > place.idx)
        conditions += [column.at_us >= place.at_us, past]
    return conditions


def _ordered(wanted: EventFilter) -> Any:
    """Return the columns that order pages; those of a trace come from its own, indexed table."""
    return events.c if wanted.trace is None else event_traces.c


def _leaves(wanted: EventFilter) -> Select[Any]:
    """Leaves as they are shown; conditions are on the columns of `_ordered`."""
    query = select(events.c.at_us, events.c.idx, events.c.kind, events.c.leaf)
    if wanted.trace is None:
        return query
    return query.select_from(events).join(event_traces, is_leaf_of(event_traces))


class _Window:
    """The next so many leaves of a log in order, or of a trace in it, whatever they say."""

    def __init__(
        self, connection: Connection, log: int, wanted: EventFilter, below: int | None, place: Cursor | None
    ) -> None:
        self._connection = connection
        self._wanted = wanted
        column = _ordered(wanted)
        inside = _inside(log, wanted, below, place)
        ordered = select(column.at_us, column.idx).where(*inside).order_by(column.at_us, column.idx).limit(_WINDOW)
        edge = ordered.subquery()
        self.size, last = connection.execute(select(func.count(), func.max(edge.c.at_us)).select_from(edge)).one()
        self.end: Cursor | None = None
        self._inside = inside
        if self.size == _WINDOW:
            idx = connection.scalar(select(func.max(edge.c.idx)).where(edge.c.at_us == last))
            self.end = Cursor(log, last, idx)
            self._inside.append(or_(column.at_us < last, and_(column.at_us == last, column.idx <= idx)))
        self._taken = 0
        self._asked = 0

    def rows(self, conditions: Sequence[ColumnElement[bool]], limit: int) -> Iterator[Any]:
        """At most `limit` leaves of the window whose bytes match."""
        column = _ordered(self._wanted)
        query = _leaves(self._wanted).where(*self._inside, *conditions).order_by(column.at_us, column.idx).limit(limit)
        self._asked = limit
        for row in self._connection.execute(query):
            self._taken += 1
            yield row

    @property
    def is_clipped(self) -> bool:
        """The window may hold more matches than it was asked for."""
        return self._taken == self._asked


def _only_log(wanted: EventFilter) -> str | None:
    """Return the log that a filter names, if it names exactly one and does not choose logs in another way."""
    if wanted.trace is not None:
        return None
    if wanted.logs is None:
        return None if wanted.tenant is None else log_of(wanted.tenant)
    return wanted.logs[0] if wanted.tenant is None and len(wanted.logs) == 1 else None


def logs_of(connection: Connection, wanted: EventFilter, after: Cursor | None = None) -> list[Log]:
    """Return the logs that a filter covers, by id, after a place."""
    first = 0 if after is None else after.log
    only = _only_log(wanted)
    if only is not None:
        found = fetch_all(connection, _ONE_LOG, (only,))
        return [log for log in map(Log._make, found) if log.id >= first]
    query = select(logs.c.id, logs.c.name, logs.c.size).order_by(logs.c.id)
    if wanted.logs is not None:
        query = query.where(logs.c.name.in_(wanted.logs))
    if wanted.tenant is not None:
        query = query.where(logs.c.name == log_of(wanted.tenant))
    if wanted.trace is not None:
        query = query.where(exists().where(event_traces.c.trace == wanted.trace, event_traces.c.log == logs.c.id))
    if wanted.kinds:
        query = query.where(logs.c.id.in_(logs_with(wanted.kinds)))
    query = query.where(logs.c.id >= first)
    return [Log(*row) for row in connection.execute(query)]


def _times(wanted: EventFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    column = _ordered(wanted)
    if wanted.since_us is not None:
        conditions.append(column.at_us >= wanted.since_us)
    if wanted.until_us is not None:
        conditions.append(column.at_us < wanted.until_us)
    return conditions


def conditions_of(connection: Connection, wanted: EventFilter) -> list[ColumnElement[bool]]:
    """Return conditions on the content of leaves; they are necessary and checked again by `says` (rule 2)."""
    conditions: list[ColumnElement[bool]] = []
    if wanted.kinds:
        held = [LIST_OF_KIND[kind] for kind in wanted.kinds if kind in LIST_OF_KIND]
        of_items = (_holds(connection, b'"%s":[' % key.encode()) for key in held)
        of_kind = events.c.kind.in_(wanted.kinds)
        conditions.append(or_(of_kind, and_(events.c.kind == CHANGED, or_(*of_items))) if held else of_kind)
    if wanted.incarnation is not None:
        life = select(incarnations.c.id).where(incarnations.c.uuid == wanted.incarnation).scalar_subquery()
        conditions.append(events.c.incarnation == life)
    texts = (wanted.outcome, wanted.actor, wanted.rule, wanted.grant, wanted.reader, wanted.owner)
    conditions += [_holds(connection, orjson.dumps(text)) for text in texts if text is not None]
    if wanted.revision is not None:
        conditions.append(_holds(connection, b'"revision":%d' % wanted.revision))
    if wanted.residency is not None:  # an item says the number alone
        named = _holds(connection, b'"residency":%d' % wanted.residency)
        listed = _holds(connection, b",%d," % wanted.residency)
        conditions.append(or_(named, and_(events.c.kind == CHANGED, listed)))
    if wanted.block is not None:
        conditions.append(_touching(wanted.block.generation))
    if wanted.generation is not None:
        conditions.append(_touching(wanted.generation))
    return conditions


def _holds(connection: Connection, part: bytes) -> ColumnElement[bool]:
    """Return the condition that a leaf's bytes contain these."""
    return dialect_of(connection).contains(events.c.leaf, literal(part))


def _touching(generation: int) -> ColumnElement[bool]:
    return or_(
        *(
            exists().where(
                is_leaf_of(table),
                table.c.low <= generation,
                table.c.high >= generation,
            )
            for table in (residencies, attachments, releases, custody_ends, receipts)
        )
    )


def says(body: dict[str, Any], wanted: EventFilter) -> bool:
    """Return whether a leaf, or one of its items, matches the filter."""
    every = not wanted.kinds or body["kind"] in wanted.kinds
    return any(_says_itself(item, wanted) for item in plain_bodies(body) if every or item["kind"] in wanted.kinds)


def _says_itself(body: Mapping[str, Any], wanted: EventFilter) -> bool:
    checks: tuple[tuple[Any, Callable[[Any], bool]], ...] = (
        (wanted.outcome, lambda value: any(body.get(key) == value for key in _OUTCOMES)),
        (wanted.actor, lambda value: body.get("actor") == value),
        (wanted.rule, lambda value: _among(body, _RULES, value)),
        (wanted.grant, lambda value: _among(body, _GRANTS, value)),
        (wanted.revision, lambda value: body.get("revision") == value),
        (wanted.residency, lambda value: body.get("residency") == value),
        (wanted.block, lambda value: _names(body, value)),
        (wanted.trace, lambda value: body.get("trace") == value),
        (wanted.reader, lambda value: "owner" in body and body.get("reader", body.get("tenant")) == value),
        (wanted.owner, lambda value: body.get("owner") == value),
        (wanted.generation, lambda value: any(blocks_at(_runs(body), value))),
    )
    return all(value is None or check(value) for value, check in checks)


def _among(body: Mapping[str, Any], keys: Sequence[str], value: str) -> bool:
    return any(value == body.get(key) or value in (body.get(key) or ()) for key in keys if key in body)


def _names(body: Mapping[str, Any], block: BlockRef) -> bool:
    if block.incarnation not in (body["incarnation"], body.get("of_incarnation")):
        return False
    return names_block(_runs(body), block.block, block.generation, block.pool)


def _runs(body: Mapping[str, Any]) -> list[Any]:
    return [*body.get("runs", ()), *body.get("written", ())]


def row_of(name: str, row: Any) -> EventRow:
    """Return the row of a leaf from its log, time, idx, kind and bytes."""
    at_us, idx, kind, leaf = row
    return EventRow(name, idx, at_us, kind, None, bytes(leaf))
