"""The canonical leaf of one event: the definition of its bytes.

`encoder` writes the same bytes for many events at once; what it does not take comes here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson

from kvcustody.audit.events.block_runs import EXACT, Runs, count, encode, split
from kvcustody.audit.events.control_events import SigningKeyRecorded
from kvcustody.audit.events.registry import FIELD_KEYS, KINDS, ROWS, TOTALS, TRACE, Event, logs_of
from kvcustody.errors import LedgerError

SCHEMA = "kvcustody/event@1"
LEAF_BYTES_MAX = 8192
HANDOVER_BYTES_MAX = (
    1 << 15
)  # two post-quantum keys and a signature of each, in one leaf: a handover is not continued
_PIECE_TOKENS = 96
_PARTS_DIGITS = 10
_CANONICAL = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER


class PseudonymSource(Protocol):
    """Gives the random pseudonym of a subject, or of a session (kept with its subject)."""

    def __call__(self, tenant: str, subject: str, session: str = "") -> str:
        """The pseudonym, made on first use."""


class Context(NamedTuple):
    """What turns an incarnation's events into leaves."""

    incarnation: str
    offset_us: int
    pseudonym: PseudonymSource


class Leaf(NamedTuple):
    """One canonical leaf: its log, its decoded body and its bytes."""

    log: str
    body: dict[str, Any]
    data: bytes


def leaf(event: Event, context: Context, sequence: int = 0) -> bytes:
    """The canonical bytes of an event that needs one leaf; raises `LedgerError` where it needs several."""
    made = leaves(event, context, sequence)
    if len(made) != 1:
        raise LedgerError(f"`{KINDS[type(event)].name}` needs `{len(made)}` leaves", leaves=len(made))
    return made[0].data


def leaves(event: Event, context: Context, sequence: int) -> list[Leaf]:
    """Every leaf of an event, for each of its logs: usually one."""
    body, lists = _body(event, context, sequence)
    made: list[Leaf] = []
    for log in logs_of(event):
        whole = {key: value for key, value in body.items() if key != TRACE} if made else body
        whole["log"] = log
        data = canonical(whole)
        handover = isinstance(event, SigningKeyRecorded)
        if len(data) <= (HANDOVER_BYTES_MAX if handover else LEAF_BYTES_MAX):
            made.append(Leaf(log, whole, data))
        else:
            made += _continued(whole, lists, log)
    return made


def parse(data: bytes) -> Leaf:
    """A leaf from its bytes; raises `LedgerError` where they are none."""
    try:
        body = orjson.loads(data)
        return Leaf(body["log"], body, data)
    except (ValueError, KeyError, TypeError) as problem:
        raise LedgerError("bytes that are not a leaf were found in a spill") from problem


def canonical(body: dict[str, Any]) -> bytes:
    """The canonical bytes of a leaf body; raises `LedgerError` on what the profile refuses.

    The body is put right in place where a number needs it: numpy's become Python's, large ones become decimal strings.
    """
    try:
        return orjson.dumps(body, option=_CANONICAL)
    except (TypeError, ValueError):
        for key, value in body.items():
            plain = value.item() if isinstance(value, np.generic) else value
            large = plain.__class__ is int and not -EXACT < plain < EXACT
            body[key] = str(plain) if large else plain
    try:
        _refuse_floats(body.values(), body["kind"])
        return orjson.dumps(body, option=_CANONICAL)
    except (TypeError, ValueError) as problem:
        raise LedgerError(
            f"`{body.get('kind')}` cannot be written as a canonical leaf: {problem}"
        ) from problem


class _Shape(NamedTuple):
    """What is known about a kind of event before any is seen."""

    keys: tuple[str, ...]
    head: dict[str, Any]
    lists: tuple[str, ...]  # keys of run lists
    share: bool
    subject: bool
    about: bool  # may be about another incarnation
    traced: bool  # may have a trace


def _shape(kind: type) -> _Shape:
    keys = FIELD_KEYS[kind]
    name, outage = KINDS[kind]
    head = {"schema": SCHEMA, "kind": name, "outage": outage, "part": 1, "parts": 1}
    return _Shape(
        keys,
        head,
        tuple(key for key in TOTALS if key in keys),
        "share_ppm" in keys,
        "subject" in keys,
        "of_incarnation" in keys,
        TRACE in keys,
    )


_SHAPES = {kind: _shape(kind) for kind in KINDS}


def _body(event: Event, context: Context, sequence: int) -> tuple[dict[str, Any], dict[str, Runs]]:
    shape = _SHAPES[event.__class__]
    body = shape.head.copy()
    body.update(zip(shape.keys, event, strict=True))
    lists: dict[str, Runs] = {}
    for key in shape.lists:
        runs = lists[key] = body[key]
        body[key] = [encode(run) for run in runs if len(run.blocks)]
        body[TOTALS[key]] = count(runs)
    if shape.share:
        body["share_ppm"] = round(body["share_ppm"] * 1_000_000)
    if shape.about and not body["of_incarnation"]:
        body["of_incarnation"] = context.incarnation
    if shape.traced and not body[TRACE]:
        del body[TRACE]
    if shape.subject:
        _pseudonymise(body, context.pseudonym)
    body["incarnation"] = context.incarnation
    body["sequence"] = sequence
    body["at_us"] = body["boot_us"] + context.offset_us
    _refuse_floats(body.values(), body["kind"])
    return body, lists


def _refuse_floats(values: Iterable[Any], kind: str) -> None:
    if float in set(map(type, values)):
        raise LedgerError(f"`{kind}` carries a float", kind=kind)


def _pseudonymise(body: dict[str, Any], pseudonym: PseudonymSource) -> None:
    tenant, subject, session = body["tenant"] or "", body["subject"], body["session"]
    if session is not None:
        body["session"] = pseudonym(tenant, subject or "", session)
    if subject is not None:
        body["subject"] = pseudonym(tenant, subject)


def _continued(body: dict[str, Any], lists: dict[str, Runs], log: str) -> list[Leaf]:
    """The same event over several leaves, each filled close to the limit."""
    keys = ROWS if ROWS[0] in body else tuple(lists)
    empty: dict[str, Any] = {key: [] for key in keys}
    room = LEAF_BYTES_MAX - len(canonical({**body, **empty})) - _PARTS_DIGITS
    parts = _rows(body, room) if keys is ROWS else _pieces(lists, room)
    made = []
    for number, items in enumerate(parts, 1):
        whole = {**body, **items, "part": number, "parts": len(parts)}
        data = canonical(whole)
        if len(data) > LEAF_BYTES_MAX:
            raise LedgerError(
                f"`{body['kind']}` does not fit `{LEAF_BYTES_MAX}` bytes a leaf", bytes=len(data), log=log
            )
        made.append(Leaf(log, whole, data))
    return made


def _pieces(lists: dict[str, Runs], room: int) -> list[dict[str, list[Any]]]:
    """Run lists, cut to fill `room` bytes each."""
    parts: list[dict[str, list[Any]]] = [{key: [] for key in lists}]
    used = 0
    for key, run in [(key, run) for key, runs in lists.items() for run in runs if len(run.blocks)]:
        for piece in split(run, _PIECE_TOKENS):
            item = encode(piece)
            size = len(orjson.dumps(item)) + 1
            if used + size > room and used:
                parts.append({key: [] for key in lists})
                used = 0
            parts[-1][key].append(item)
            used += size
    return parts


def _rows(body: dict[str, Any], room: int) -> list[dict[str, list[Any]]]:
    """Lists that belong together, cut to fill `room` bytes each."""
    parts: list[dict[str, list[Any]]] = [{key: [] for key in ROWS}]
    used = 0
    for row in zip(*(body[key] for key in ROWS), strict=True):
        size = sum(len(str(number)) + 1 for number in row)
        if used + size > room and used:
            parts.append({key: [] for key in ROWS})
            used = 0
        for key, number in zip(ROWS, row, strict=True):
            parts[-1][key].append(number)
        used += size
    return parts
