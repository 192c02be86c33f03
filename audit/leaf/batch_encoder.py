"""Encode many events into canonical leaves at once: by kind, column by column, in loops outside the interpreter.

1. An event with a value that its kind does not accept gets no leaf. It is reported with the reason. It does not hinder
   other events, neither of its batch nor of the leaf that it would have shared. numpy's numbers become Python's, and
   integers from 2^53 on decimal strings; nothing else is converted.
2. The interpreter lock is offered between chunks, so an engine's thread waits for no batch.
3. The bytes are those of `LeafSchema.row`: whatever an event's values are, its keys are in order and of its kind.
4. What `custody-changed` events hold is encoded as events of those kinds are, and said as items (`leaf_schema`, 4).
5. An event that outgrows a leaf is continued in numbered leaves (`audit.leaf`, 3).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, islice, repeat
from operator import add, sub
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import asdict, astuple, replace

from kvcustody.audit.kinds.block_runs import EXACT, Runs, split
from kvcustody.audit.kinds.control_events import ReportKeyRecorded, SigningKeyRecorded
from kvcustody.audit.kinds.custody_events import CustodyChanged
from kvcustody.audit.kinds.event import Event
from kvcustody.audit.kinds.registry import (
    ACTING,
    COPIES,
    KINDS,
    ROWS,
    SCHEMA,
    SIGNATURE,
    SPARSE,
    TOTALS,
    TRACE,
    log_of,
    logs_of,
)
from kvcustody.audit.leaf.batch import EMPTY, Columns, IncarnationStart, LeafBatch, LeafGroup, read_leaves
from kvcustody.audit.leaf.block_run_text import Extents, run_texts, short_texts
from kvcustody.audit.leaf.canonical_leaf import (
    HANDOVER_BYTES_MAX,
    LEAF_BYTES_MAX,
    Context,
    Leaf,
    PseudonymSource,
    parse,
)
from kvcustody.audit.leaf.leaf_schema import (
    FOLDED,
    ITEMS,
    LIST_OF_KIND,
    SCHEMAS,
    Column,
    LeafSchema,
    check_copies,
)
from kvcustody.audit.leaf.merkle import leaf_hashes
from kvcustody.errors import LedgerError

Item = tuple[int, Event]
_Said = Raw | UnsetType | str | int | Column | None  # a value as bytes have it
_ValueT = TypeVar("_ValueT")
_CHUNK = 256  # events of one kind between offers of the interpreter lock
# Blocks that were listed when they were handed out are named by their generations. A receipt lists them again: that it
# is of the very blocks is what it proves.
_NAMES = frozenset({"residency-opened", "blocks-attached", "custody-ended"})
_PLACES = frozenset({"residency-released", "blocks-released", "receipt"})
_PIECE_TOKENS = 96
_PARTS_DIGITS = 10
_encode = msgspec.json.Encoder().encode


class RefusedEvent(NamedTuple):
    """An event without a leaf, and the reason."""

    sequence: int
    event: Event
    problem: Exception


class Entry(NamedTuple):
    """One event and the bytes of its leaves."""

    sequence: int
    event: Event
    leaves: Sequence[bytes]

    def batch(self) -> LeafBatch:
        """Its leaves as a separate batch."""
        return read_leaves(self.leaves)


class Encoded(NamedTuple):
    """Events with their leaves: `widths[i]` leaves of the batch, in order, belong to `items[i]`."""

    items: Sequence[Item]
    widths: Sequence[int]
    batch: LeafBatch
    refused: Sequence[RefusedEvent] = ()

    def entries(self) -> list[Entry]:
        """Return one entry for each event, for callers that handle events one by one."""
        ends = accumulate(self.widths)
        return [
            Entry(sequence, event, self.batch.data[end - width : end])
            for (sequence, event), width, end in zip(self.items, self.widths, ends, strict=True)
        ]


NOTHING = Encoded((), (), EMPTY)


def encoded_of(entries: Sequence[Entry]) -> Encoded:
    """Return entries combined again."""
    batch = read_leaves([data for entry in entries for data in entry.leaves])
    items = [(entry.sequence, entry.event) for entry in entries]
    return Encoded(items, [len(entry.leaves) for entry in entries], batch)


def leaves(event: Event, context: Context, sequence: int) -> list[Leaf]:
    """Return every leaf of an event, for each of its logs: usually one. Raises what is wrong with the event."""
    made = BatchEncoder(context).encode([(sequence, event)])
    for refused in made.refused:
        raise refused.problem
    return [parse(data) for data in made.batch.data]


def leaf(event: Event, context: Context, sequence: int = 0) -> bytes:
    """Return the canonical bytes of an event that needs one leaf; raises `LedgerError` if it needs several."""
    made = leaves(event, context, sequence)
    if len(made) != 1:
        raise LedgerError(f"`{KINDS[type(event)].name}` needs `{len(made)}` leaves", leaves=len(made))
    return made[0].data


class _Draft:
    """What chunks have made so far: whole groups of one leaf an event, and the leaves of all other events."""

    def __init__(self, count: int) -> None:
        self.logs = [""] * count
        self.at_us = [0] * count
        self.data = [b""] * count
        self.groups: list[LeafGroup] = []
        self.several: dict[int, list[bytes]] = {}  # none: refused
        self.refused: list[RefusedEvent] = []

    def take(self, kind: str, places: list[int], written: Written) -> None:
        """Events of one kind, each of one leaf."""
        data, logs, at_us = self.data, self.logs, self.at_us
        for place, line, log, moment in zip(places, written.data, written.logs, written.at_us, strict=True):
            data[place], logs[place], at_us[place] = line, log, moment
        self.groups.append(LeafGroup(kind, places, written.columns, written.extents))
        for held in written.held:
            owners = [places[owner] for owner in held.owners]
            self.groups.append(LeafGroup(held.name, owners, held.columns, held.extents))


class BatchEncoder:
    """Encodes the events of one incarnation."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def encode(self, items: Sequence[Item]) -> Encoded:
        """Return the leaves of events in the events' order; events without a leaf are in `refused`."""
        draft = _Draft(len(items))
        by_kind: defaultdict[type, list[int]] = defaultdict(list)
        for place, (_, event) in enumerate(items):
            by_kind[event.__class__].append(place)
        for kind, places in by_kind.items():
            for start in range(0, len(places), _CHUNK):
                time.sleep(0)
                self._chunk(draft, kind, items, places[start : start + _CHUNK])
        return self._ordered(draft, items)

    def _chunk(self, draft: _Draft, kind: type, items: Sequence[Item], places: list[int]) -> None:
        try:
            schema = SCHEMAS[kind]
            done = written(schema, [items[place] for place in places], self._context)
            if max(map(len, done.data)) <= LEAF_BYTES_MAX and kind not in ACTING:
                draft.take(schema.name, places, done)
                return
            split = {}
            for number, (place, data) in enumerate(zip(places, done.data, strict=True)):
                if len(data) > LEAF_BYTES_MAX or kind in ACTING:
                    split[place] = leaves_of(items[place][1], done.rows[number])
        except Exception as problem:  # rule 1: whatever a caller put into an event
            if len(places) > 1:
                for place in places:
                    self._chunk(draft, kind, items, [place])
                return
            draft.several[places[0]] = []
            sequence, event = items[places[0]]
            sound, found = self._without_wrong(sequence, event)
            draft.refused += found or [RefusedEvent(sequence, event, problem)]
            if sound is not None:
                row = written(SCHEMAS[kind], [(sequence, sound)], self._context).rows[0]
                draft.several[places[0]] = leaves_of(sound, row)
            return
        draft.several |= split
        rest = [place for place in places if place not in split]
        if rest:
            self._chunk(draft, kind, items, rest)

    def _without_wrong(self, sequence: int, event: Event) -> tuple[CustodyChanged | None, list[RefusedEvent]]:
        """What of a shared leaf can be written, if any of it is wrong, and what is wrong."""
        if not isinstance(event, CustodyChanged) or not all(isinstance(getattr(event, key), tuple) for key in FOLDED):
            return None, []
        refused: list[RefusedEvent] = []
        encodable: dict[str, list[Event]] = {}
        for key in FOLDED:
            for each in getattr(event, key):
                try:
                    written(SCHEMAS[CustodyChanged], [(sequence, _alone(event, key, each))], self._context)
                except Exception as problem:  # rule 1
                    refused.append(RefusedEvent(sequence, each, problem))
                else:
                    encodable.setdefault(key, []).append(each)
        if not (refused and encodable):
            return None, []  # refused as a whole
        return event._replace(**{key: tuple(encodable.get(key, ())) for key in FOLDED}), refused

    def _ordered(self, draft: _Draft, items: Sequence[Item]) -> Encoded:
        """All leaves in the order of their events."""
        context, several = self._context, dict(sorted(draft.several.items()))
        logs, at_us, data, groups, events = draft.logs, draft.at_us, draft.data, draft.groups, list(items)
        widths, parts, of_parts = [1] * len(items), [1] * len(items), [1] * len(items)
        if several:
            more = read_leaves([line for made in several.values() for line in made])
            for place, made in several.items():
                widths[place] = len(made)
            starts = [0, *accumulate(widths)]
            own = [starts[place] + number for place, made in several.items() for number in range(len(made))]
            groups = [group._replace(places=[starts[place] for place in group.places]) for group in groups]
            groups += [group._replace(places=[own[place] for place in group.places]) for group in more.groups]
            wide = {place: len(made) for place, made in several.items()}
            _put(logs, more.logs, wide)
            _put(at_us, more.at_us, wide)
            _put(data, more.data, wide)
            _put(parts, more.parts, wide)
            _put(of_parts, more.of_parts, wide)
            _put(events, [items[place] for place, width in wide.items() for _ in range(width)], wide)
        kinds = [event.__class__ for _, event in events]
        names = {kind: SCHEMAS[kind] for kind in set(kinds)}
        batch = LeafBatch(
            logs,
            [context.incarnation] * len(events),
            [sequence for sequence, _ in events],
            parts,
            of_parts,
            [names[kind].name for kind in kinds],
            [names[kind].outage for kind in kinds],
            at_us,
            data,
            groups,
            {context.incarnation: IncarnationStart("unknown", context.offset_us, at_us[0])} if events else {},
            leaf_hashes(data),
        )
        kept = [item for item, width in zip(items, widths, strict=True) if width] if draft.refused else items
        widths = [width for width in widths if width] if several else widths
        return Encoded(kept, widths, batch, draft.refused)


def _alone(event: CustodyChanged, key: str, held: Event) -> CustodyChanged:
    return event._replace(**{name: (held,) if name == key else () for name in FOLDED})


def _put(column: list[_ValueT], values: Sequence[_ValueT], wide: dict[int, int]) -> None:
    """Put the values of all leaves of some events in the places of these; the events' widths, in order."""
    end = len(values)
    for place, width in reversed(wide.items()):
        column[place : place + 1] = values[end - width : end]
        end -= width


class ItemColumns(NamedTuple):
    """The events that some leaves hold: the leaf of each (a place in the chunk), and the columns of their own
    leaves.
    """

    name: str
    owners: Sequence[int]
    columns: Columns
    extents: dict[str, Extents]


class Written(NamedTuple):
    """Leaves of one chunk; `data` was made from `rows`."""

    logs: Sequence[str]
    at_us: Sequence[int]
    rows: Sequence[msgspec.Struct]
    data: Sequence[bytes]
    columns: Columns
    extents: dict[str, Extents]
    held: Sequence[ItemColumns] = ()


class _Columns(NamedTuple):
    """What leaves of one kind say: the values of a key in bytes are in `said`, else in `columns`."""

    said: dict[str, Iterable[_Said]]
    columns: dict[str, Column]
    extents: dict[str, Extents]

    def values(self, schema: LeafSchema, key: str) -> Iterable[_Said]:
        """Return the values of a key in the form that leaf bytes have."""
        if key in self.said:
            return self.said[key]
        return _exact(self.columns[key]) if key in schema.counted else self.columns[key]


def written(schema: LeafSchema, items: Sequence[Item], context: Context) -> Written:
    """Return a leaf for each of these events of one kind, regardless of size."""
    encoded_columns = _columns(schema, items, context)
    held = _hold(encoded_columns, [event for _, event in items], context) if schema.held else ()
    rows = list(map(schema.row, *(encoded_columns.values(schema, key) for key in schema.order)))
    columns, data = encoded_columns.columns, list(map(_encode, rows))
    if context.sign is not None and SIGNATURE in columns:
        columns[SIGNATURE] = list(map(context.sign, data))
        rows = [replace(row, signature=text or UNSET) for row, text in zip(rows, columns[SIGNATURE], strict=True)]
        data = list(map(_encode, rows))
    return Written(columns["log"], columns["at_us"], rows, data, columns, encoded_columns.extents, held)


def _hold(columns: _Columns, events: Sequence[Event], context: Context) -> list[ItemColumns]:
    """Put the events that others hold in place as items; their columns, numbered over all lists of a leaf."""
    held: list[ItemColumns] = []
    numbers = [0] * len(events)
    moments = columns.columns["boot_us"]
    for key, schema in ITEMS.items():
        lists: Sequence[Sequence[Event]] = columns.columns.pop(key)
        widths = list(map(len, lists))
        columns.said[key] = repeat(UNSET)
        if not any(widths):
            continue
        kind = SCHEMAS[schema.kind]
        own = _columns(kind, [(0, event) for event in chain.from_iterable(lists)], context)
        if TRACE in own.columns or set(own.columns["of_incarnation"]) != {context.incarnation}:
            raise LedgerError(f"`{key}` with a trace, or of another incarnation, has a leaf of its own")
        owners = [place for place, width in enumerate(widths) for _ in range(width)]
        if list(own.columns["tenant"]) != [columns.columns["tenant"][place] for place in owners]:
            raise LedgerError(f"`{key}` of another tenant has a leaf of its own")
        said = own.columns["boot_us"]
        values = [
            _before([moments[place] for place in owners], said)
            if name == "boot_us"
            else _before(said, own.columns[name])
            if name in schema.moments
            else own.values(kind, name)
            for name in schema.keys
        ]
        encoded = zip(*values, strict=True)
        columns.said[key] = [list(islice(encoded, width)) or UNSET for width in widths]
        own.columns["item"] = [numbers[place] + at for place, width in enumerate(widths) for at in range(1, width + 1)]
        numbers = list(map(add, numbers, widths))
        held.append(ItemColumns(schema.name, owners, own.columns, own.extents))
    return held


def _before(moments: Sequence[int], values: Sequence[int]) -> list[int | str | None]:
    """Moments as items say them."""
    since = _exact(list(map(sub, moments, values)))
    return [ago if value else None for ago, value in zip(since, values, strict=True)]


def _texts(schema: LeafSchema, key: str, lists: Sequence[Runs]) -> tuple[list[bytes], Extents]:
    """Run lists in the form that a leaf of this kind has for them."""
    if key == "runs" and schema.name in _NAMES:
        return short_texts(lists, placed=False)
    return short_texts(lists, placed=True) if schema.name in _PLACES else run_texts(lists)


def _columns(schema: LeafSchema, items: Sequence[Item], context: Context) -> _Columns:
    fields = zip(*[astuple(event) for _, event in items], strict=True)
    columns: dict[str, Column] = {}
    leaf_fields: dict[str, Iterable[_Said]] = {}
    extents: dict[str, Extents] = {}
    for key, value, column in zip(schema.keys, schema.values, fields, strict=True):
        try:
            columns[key] = value.column(column)
            if key in schema.lists:
                texts, extents[key] = _texts(schema, key, columns[key])
                leaf_fields[key] = map(Raw, texts)
                columns[TOTALS[key]] = extents[key].blocks
        except (LedgerError, TypeError, ValueError, OverflowError) as problem:
            raise LedgerError(f"`{key}` of `{schema.name}` cannot be written: {problem}") from problem
    if COPIES[0] in columns:
        check_copies(columns)
    columns["at_us"] = [moment + context.offset_us for moment in columns["boot_us"]]
    columns["part"] = [1] * len(items)
    if "of_incarnation" in columns:
        columns["of_incarnation"] = [of or context.incarnation for of in columns["of_incarnation"]]
    if "subject" in columns:
        _pseudonymise(columns, context.pseudonym)
    tenants = columns.get("tenant")
    names = {None: log_of(None)} if tenants is None else {tenant: log_of(tenant) for tenant in set(tenants)}
    logs = [names[tenant] for tenant in tenants or [None] * len(items)]
    for key in SPARSE:
        if key in columns:
            leaf_fields[key] = [value or UNSET for value in columns[key]] if any(columns[key]) else repeat(UNSET)
    if TRACE in columns:
        if any(columns[TRACE]):
            columns[TRACE] = [trace or None for trace in columns[TRACE]]
        else:
            del columns[TRACE]
    columns["log"] = logs
    columns["sequence"] = [sequence for sequence, _ in items]
    leaf_fields |= {"schema": repeat(SCHEMA), "kind": repeat(schema.name), "outage": repeat(schema.outage)}
    leaf_fields |= {"incarnation": repeat(context.incarnation), "parts": repeat(1)}
    if schema.name in LIST_OF_KIND:
        columns["item"] = [0] * len(items)
    return _Columns(leaf_fields, columns, extents)


def _pseudonymise(columns: dict[str, Column], name: PseudonymSource) -> None:
    tenants = [tenant or "" for tenant in columns["tenant"]]
    subjects, sessions = columns["subject"], columns.get("session")
    columns["subject"] = [
        None if subject is None else name(tenant, subject) for tenant, subject in zip(tenants, subjects, strict=True)
    ]
    if sessions is None:  # of a kind that is about whole subjects alone
        return
    columns["session"] = [
        None if session is None else name(tenant, subject or "", session)
        for tenant, subject, session in zip(tenants, subjects, sessions, strict=True)
    ]


def _exact(values: Column) -> Column:
    """Integers as a leaf has them: decimal strings where a reader of JSON may round."""
    ends = values[:1] if values[0] == values[-1] and values.count(values[0]) == len(values) else values
    if min(ends) > -EXACT and max(ends) < EXACT:
        return values
    return [value if -EXACT < value < EXACT else str(value) for value in values]


def leaves_of(event: Event, row: msgspec.Struct) -> list[bytes]:
    """Return every leaf of an event, for each of its logs."""
    return [line for each in _of_logs(event, row) for line in _fitting(event, each)]


def _fitting(event: Event, row: msgspec.Struct) -> list[bytes]:
    """Return a leaf, or several leaves for one event, each filled close to the limit."""
    whole = _encode(row)
    limit = HANDOVER_BYTES_MAX if isinstance(event, (ReportKeyRecorded, SigningKeyRecorded)) else LEAF_BYTES_MAX
    if len(whole) <= limit:
        return [whole]
    schema = SCHEMAS[type(event)]
    lists = dict.fromkeys(schema.held or (ROWS if ROWS[0] in schema.keys else schema.lists))
    room = limit - len(_encode(replace(row, **dict.fromkeys(lists, Raw(b"[]"))))) - _PARTS_DIGITS
    if schema.held:
        pieces = [{key: _encode(item)} for key in lists if getattr(row, key) is not UNSET for item in getattr(row, key)]
    elif ROWS[0] in lists:
        pieces = [
            {key: b"%d" % number for key, number in zip(ROWS, numbers, strict=True)}
            for numbers in zip(*(getattr(row, key) for key in ROWS), strict=True)
        ]
    else:
        given = dict(zip(schema.keys, astuple(event), strict=True))
        pieces = [{key: text} for key in lists for text in _piece_texts(given[key])]
    parts = _filled(pieces, room)
    leaves = []
    for number, items in enumerate(parts, 1):
        texts: dict[str, Raw | UnsetType] = {key: Raw(b"[%b]" % b",".join(items.get(key, ()))) for key in lists}
        if schema.held:
            texts |= {key: UNSET for key in lists if key not in items}
        leaves.append(_encode(replace(row, part=number, parts=len(parts), **texts)))
        if len(leaves[-1]) > limit:
            raise LedgerError(
                f"`{schema.name}` does not fit `{limit}` bytes a leaf",
                bytes=len(leaves[-1]),
                log=asdict(row)["log"],
            )
    return leaves


def _of_logs(event: Event, row: msgspec.Struct) -> list[msgspec.Struct]:
    """What is written in each of the event's logs; the other party's has no trace."""
    first, *others = logs_of(event)
    more = {TRACE: UNSET} if hasattr(row, TRACE) else {}
    return [replace(row, log=first), *(replace(row, log=log, **more) for log in others)]


def _piece_texts(runs: Runs) -> Iterable[bytes]:
    """Run lists, in pieces small enough to fill leaves with."""
    pieces = chain.from_iterable(split(run, _PIECE_TOKENS) for run in runs if len(run.blocks))
    return (text[1:-1] for text in run_texts([(piece,) for piece in pieces])[0])


def _filled(pieces: Iterable[Mapping[str, bytes]], room: int) -> list[dict[str, list[bytes]]]:
    """Pieces of lists that belong together, cut to fill `room` bytes each."""
    parts: list[dict[str, list[bytes]]] = [{}]
    used = 0
    for piece in pieces:
        size = sum(len(text) + 1 for text in piece.values())
        if used + size > room and used:
            parts.append({})
            used = 0
        for key, text in piece.items():
            parts[-1].setdefault(key, []).append(text)
        used += size
    return parts
