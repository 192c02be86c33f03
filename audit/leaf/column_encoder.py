"""How events of one kind become leaves, column by column, and how one that outgrows a leaf is continued.

1. The bytes are those of `LeafSchema.row`: whatever an event's values are, its keys are in order and of its kind.
2. What `custody-changed` events hold is encoded as events of those kinds are, and said as items (`leaf_schema`, 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, repeat
from operator import add, sub
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import astuple, replace

from kvcustody.audit.kinds.block_runs import EXACT, Runs, split
from kvcustody.audit.kinds.control_events import ReportKeyRecorded, SigningKeyRecorded
from kvcustody.audit.kinds.event import Event
from kvcustody.audit.kinds.registry import (
    COPIES,
    ROWS,
    SCHEMA,
    SIGNATURE,
    SPARSE,
    TOTALS,
    TRACE,
    log_of,
    logs_of,
)
from kvcustody.audit.leaf.block_run_text import Extents, run_texts, short_texts
from kvcustody.audit.leaf.canonical_leaf import HANDOVER_BYTES_MAX, LEAF_BYTES_MAX, Context, PseudonymSource
from kvcustody.audit.leaf.leaf_schema import ITEMS, LIST_OF_KIND, SCHEMAS, LeafSchema, check_copies
from kvcustody.errors import LedgerError

Item = tuple[int, Event]
# Blocks that were listed when they were handed out are named by their generations. A receipt lists them again: that it
# is of the very blocks is what it proves.
_NAMES = frozenset({"residency-opened", "blocks-attached", "custody-ended"})
_PLACES = frozenset({"residency-released", "blocks-released", "receipt"})
_PIECE_TOKENS = 96
_PARTS_DIGITS = 10
_encode = msgspec.json.Encoder().encode


class ItemColumns(NamedTuple):
    """The events that some leaves hold: whose each is (a place in the chunk), and what would be their own leaves'."""

    name: str
    owners: Sequence[int]
    columns: Mapping[str, Sequence[Any]]
    extents: dict[str, Extents]


class Written(NamedTuple):
    """Leaves of one chunk; `rows` are what `data` was made of."""

    logs: Sequence[str]
    at_us: Sequence[int]
    rows: Sequence[msgspec.Struct]
    data: Sequence[bytes]
    columns: Mapping[str, Sequence[Any]]
    extents: dict[str, Extents]
    held: Sequence[ItemColumns] = ()


class _Said(NamedTuple):
    """What leaves of one kind say: the values of a key in bytes are in `said`, else in `columns`."""

    said: dict[str, Iterable[Any]]
    columns: dict[str, Sequence[Any]]
    extents: dict[str, Extents]

    def values(self, schema: LeafSchema, key: str) -> Iterable[Any]:
        """The values of a key, as bytes have them."""
        if key in self.said:
            return self.said[key]
        return _exact(self.columns[key]) if key in schema.counted else self.columns[key]


def written(schema: LeafSchema, items: Sequence[Item], context: Context) -> Written:
    """A leaf for each of these events of one kind, whatever its size."""
    made = _columns(schema, items, context)
    held = _hold(made, [event for _, event in items], context) if schema.held else ()
    rows = list(map(schema.row, *(made.values(schema, key) for key in schema.order)))
    columns, data = made.columns, list(map(_encode, rows))
    if context.sign is not None and SIGNATURE in columns:
        columns[SIGNATURE] = list(map(context.sign, data))
        rows = [
            replace(row, signature=text or UNSET) for row, text in zip(rows, columns[SIGNATURE], strict=True)
        ]
        data = list(map(_encode, rows))
    return Written(columns["log"], columns["at_us"], rows, data, columns, made.extents, held)


def _hold(made: _Said, events: Sequence[Event], context: Context) -> list[ItemColumns]:
    """Put the events that others hold in place as items; their columns, numbered over all lists of a leaf."""
    held: list[ItemColumns] = []
    numbers = [0] * len(events)
    moments = made.columns["boot_us"]
    for key, schema in ITEMS.items():
        lists: Sequence[Sequence[Event]] = made.columns.pop(key)
        widths = list(map(len, lists))
        made.said[key] = repeat(UNSET)
        if not any(widths):
            continue
        kind = SCHEMAS[schema.kind]
        own = _columns(kind, [(0, event) for event in chain.from_iterable(lists)], context)
        if TRACE in own.columns or set(own.columns["of_incarnation"]) != {context.incarnation}:
            raise LedgerError(f"`{key}` with a trace, or of another incarnation, has a leaf of its own")
        owners = [place for place, width in enumerate(widths) for _ in range(width)]
        if list(own.columns["tenant"]) != [made.columns["tenant"][place] for place in owners]:
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
        made.said[key] = [list(islice(encoded, width)) or UNSET for width in widths]
        own.columns["item"] = [
            numbers[place] + at for place, width in enumerate(widths) for at in range(1, width + 1)
        ]
        numbers = list(map(add, numbers, widths))
        held.append(ItemColumns(schema.name, owners, own.columns, own.extents))
    return held


def _before(moments: Sequence[int], values: Sequence[int]) -> list[Any]:
    """Moments as items say them."""
    since = _exact(list(map(sub, moments, values)))
    return [ago if value else None for ago, value in zip(since, values, strict=True)]


def _texts(schema: LeafSchema, key: str, lists: Sequence[Runs]) -> tuple[list[bytes], Extents]:
    """Run lists in the form that a leaf of this kind has for them."""
    if key == "runs" and schema.name in _NAMES:
        return short_texts(lists, placed=False)
    return short_texts(lists, placed=True) if schema.name in _PLACES else run_texts(lists)


def _columns(schema: LeafSchema, items: Sequence[Item], context: Context) -> _Said:
    fields = zip(*[astuple(event) for _, event in items], strict=True)
    columns: dict[str, Sequence[Any]] = {}
    said: dict[str, Iterable[Any]] = {}
    found: dict[str, Extents] = {}
    for key, value, column in zip(schema.keys, schema.values, fields, strict=True):
        try:
            columns[key] = value.column(column)
            if key in schema.lists:
                texts, found[key] = _texts(schema, key, columns[key])
                said[key] = map(Raw, texts)
                columns[TOTALS[key]] = found[key].blocks
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
            said[key] = [value or UNSET for value in columns[key]] if any(columns[key]) else repeat(UNSET)
    if TRACE in columns:
        if any(columns[TRACE]):
            columns[TRACE] = [trace or None for trace in columns[TRACE]]
        else:
            del columns[TRACE]
    columns["log"] = logs
    columns["sequence"] = [sequence for sequence, _ in items]
    said |= {"schema": repeat(SCHEMA), "kind": repeat(schema.name), "outage": repeat(schema.outage)}
    said |= {"incarnation": repeat(context.incarnation), "parts": repeat(1)}
    if schema.name in LIST_OF_KIND:
        columns["item"] = [0] * len(items)
    return _Said(said, columns, found)


def _pseudonymise(columns: dict[str, Sequence[Any]], name: PseudonymSource) -> None:
    tenants = [tenant or "" for tenant in columns["tenant"]]
    subjects, sessions = columns["subject"], columns.get("session")
    columns["subject"] = [
        None if subject is None else name(tenant, subject)
        for tenant, subject in zip(tenants, subjects, strict=True)
    ]
    if sessions is None:  # of a kind that is about whole subjects alone
        return
    columns["session"] = [
        None if session is None else name(tenant, subject or "", session)
        for tenant, subject, session in zip(tenants, subjects, sessions, strict=True)
    ]


def _exact(values: Sequence[Any]) -> Sequence[Any]:
    """Integers as a leaf has them: decimal strings where a reader of JSON may round."""
    ends = values[:1] if values[0] == values[-1] and values.count(values[0]) == len(values) else values
    if min(ends) > -EXACT and max(ends) < EXACT:
        return values
    return [value if -EXACT < value < EXACT else str(value) for value in values]


def leaves_of(event: Event, row: msgspec.Struct) -> list[bytes]:
    """Every leaf of an event, for each of its logs."""
    return [line for each in _of_logs(event, row) for line in _fitting(event, each)]


def _fitting(event: Event, row: Any) -> list[bytes]:
    """A leaf, or the same event over several leaves, each filled close to the limit."""
    whole = _encode(row)
    limit = (
        HANDOVER_BYTES_MAX if isinstance(event, (ReportKeyRecorded, SigningKeyRecorded)) else LEAF_BYTES_MAX
    )
    if len(whole) <= limit:
        return [whole]
    schema = SCHEMAS[type(event)]
    lists = dict.fromkeys(schema.held or (ROWS if ROWS[0] in schema.keys else schema.lists))
    room = limit - len(_encode(replace(row, **dict.fromkeys(lists, Raw(b"[]"))))) - _PARTS_DIGITS
    if schema.held:
        pieces = [
            {key: _encode(item)}
            for key in lists
            if getattr(row, key) is not UNSET
            for item in getattr(row, key)
        ]
    elif ROWS[0] in lists:
        pieces = [
            {key: b"%d" % number for key, number in zip(ROWS, numbers, strict=True)}
            for numbers in zip(*(getattr(row, key) for key in ROWS), strict=True)
        ]
    else:
        given: dict[str, Any] = dict(zip(schema.keys, astuple(event), strict=True))
        pieces = [{key: text} for key in lists for text in _piece_texts(given[key])]
    parts = _filled(pieces, room)
    made = []
    for number, items in enumerate(parts, 1):
        texts: dict[str, Any] = {key: Raw(b"[%b]" % b",".join(items.get(key, ()))) for key in lists}
        if schema.held:
            texts |= {key: UNSET for key in lists if key not in items}
        made.append(_encode(replace(row, part=number, parts=len(parts), **texts)))
        if len(made[-1]) > limit:
            raise LedgerError(
                f"`{schema.name}` does not fit `{limit}` bytes a leaf", bytes=len(made[-1]), log=row.log
            )
    return made


def _of_logs(event: Event, row: Any) -> list[Any]:
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
