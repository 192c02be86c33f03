"""How events of one kind become leaves, column by column, and how one that outgrows a leaf is continued.

1. The bytes are those of `LeafSchema.row`: whatever an event's values are, its keys are in order and of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import astuple, replace

from kvcustody.audit.events.block_run_text import Extents, run_texts
from kvcustody.audit.events.block_runs import EXACT, Runs, split
from kvcustody.audit.events.canonical_leaf import HANDOVER_BYTES_MAX, LEAF_BYTES_MAX, Context, PseudonymSource
from kvcustody.audit.events.control_events import SigningKeyRecorded
from kvcustody.audit.events.event import Event
from kvcustody.audit.events.leaf_schema import SCHEMAS, LeafSchema
from kvcustody.audit.events.registry import ROWS, SCHEMA, TOTALS, TRACE, log_of, logs_of
from kvcustody.errors import LedgerError

Item = tuple[int, Event]
_PIECE_TOKENS = 96
_PARTS_DIGITS = 10
_encode = msgspec.json.Encoder().encode


class Written(NamedTuple):
    """Leaves of one chunk; `rows` are what `data` was made of."""

    logs: Sequence[str]
    at_us: Sequence[int]
    rows: Sequence[msgspec.Struct]
    data: Sequence[bytes]
    columns: Mapping[str, Sequence[Any]]
    extents: dict[str, Extents]


def written(schema: LeafSchema, items: Sequence[Item], context: Context) -> Written:
    """A leaf for each of these events of one kind, whatever its size."""
    fields = zip(*[astuple(event) for _, event in items], strict=True)
    columns: dict[str, Sequence[Any]] = {}
    said: dict[str, Iterable[Any]] = {}
    found: dict[str, Extents] = {}
    for key, value, column in zip(schema.keys, schema.values, fields, strict=True):
        try:
            columns[key] = value.column(column)
            if key in schema.lists:
                texts, found[key] = run_texts(columns[key])
                said[key] = map(Raw, texts)
                columns[TOTALS[key]] = found[key].blocks
        except (LedgerError, TypeError, ValueError, OverflowError) as problem:
            raise LedgerError(f"`{key}` of `{schema.name}` cannot be written: {problem}") from problem
    columns["at_us"] = [moment + context.offset_us for moment in columns["boot_us"]]
    columns["part"] = [1] * len(items)
    if "of_incarnation" in columns:
        columns["of_incarnation"] = [of or context.incarnation for of in columns["of_incarnation"]]
    if "subject" in columns:
        _pseudonymise(columns, context.pseudonym)
    tenants = columns.get("tenant")
    names = {None: log_of(None)} if tenants is None else {tenant: log_of(tenant) for tenant in set(tenants)}
    logs = [names[tenant] for tenant in tenants or [None] * len(items)]
    if TRACE in columns:
        said[TRACE] = repeat(UNSET)
        if any(columns[TRACE]):
            said[TRACE] = [trace or UNSET for trace in columns[TRACE]]
            columns[TRACE] = [trace or None for trace in columns[TRACE]]
        else:
            del columns[TRACE]
    columns["log"] = logs
    columns["sequence"] = [sequence for sequence, _ in items]
    said |= {"schema": repeat(SCHEMA), "kind": repeat(schema.name), "outage": repeat(schema.outage)}
    said |= {"incarnation": repeat(context.incarnation), "parts": repeat(1)}
    values = [
        said[key] if key in said else _exact(columns[key]) if key in schema.counted else columns[key]
        for key in schema.order
    ]
    rows = list(map(schema.row, *values))
    return Written(logs, columns["at_us"], rows, list(map(_encode, rows)), columns, found)


def _pseudonymise(columns: dict[str, Sequence[Any]], name: PseudonymSource) -> None:
    tenants = [tenant or "" for tenant in columns["tenant"]]
    subjects, sessions = columns["subject"], columns["session"]
    columns["subject"] = [
        None if subject is None else name(tenant, subject)
        for tenant, subject in zip(tenants, subjects, strict=True)
    ]
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
    limit = HANDOVER_BYTES_MAX if isinstance(event, SigningKeyRecorded) else LEAF_BYTES_MAX
    if len(whole) <= limit:
        return [whole]
    schema = SCHEMAS[type(event)]
    lists = dict.fromkeys(ROWS if ROWS[0] in schema.keys else schema.lists)
    room = limit - len(_encode(replace(row, **dict.fromkeys(lists, Raw(b"[]"))))) - _PARTS_DIGITS
    if ROWS[0] in lists:
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
        texts = {key: Raw(b"[%b]" % b",".join(items.get(key, ()))) for key in lists}
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
