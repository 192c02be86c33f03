"""A worker's batch checked and read column by column: what `leaf_check` does leaf by leaf, for the plain case.

C1 What is taken here, `leaf_check` takes too, and gives the same `Batch`. None means: look leaf by leaf.
C2 Bytes are compared with the canonical form of what they say. With the keys of a leaf in their order, that is the form
   without sorting.
C3 A trace, which not every leaf of a kind has, is looked at by itself: leaves with and without one are one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter, sub
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.events import KINDS, LEAF_BYTES_MAX, LEAF_KEYS, SCHEMA, log_of
from kvcustody.audit.events.batch import Batch, Founder, Group, extents
from kvcustody.audit.events.kinds import FIELD_KEYS, HEAD_KEYS, TOTALS, TRACE, field_types
from kvcustody.audit.merkle import leaf_hashes
from kvcustody.audit.run_texts import Extents
from kvcustody.governance.trace_context import is_trace

_NAMES: frozenset[type] = frozenset({str, type(None)})
_TYPES: dict[str, frozenset[type]] = {
    "int": frozenset({int}),
    "float": frozenset({int}),  # parts per million by then
    "bool": frozenset({bool}),
    "str": frozenset({str}),
    "str | None": _NAMES,
}
_LIST = frozenset({list})
_PARTS_MAX = 1 << 20
_SEQUENCE_MAX = 1 << 53
_PARTIES = ("tenant", "owner", "reader")
_PLACED = itemgetter(
    "log", "incarnation", "sequence", "part", "parts", "kind", "outage", "at_us", "boot_us", "schema"
)
Columns = dict[str, Sequence[Any]]


class Sender(NamedTuple):
    """Who sends a batch: the worker, its incarnation, and its incarnations of old."""

    worker: str
    incarnation: str
    offset_us: int
    predecessors: frozenset[str]


class _Shape(NamedTuple):
    """One kind of leaf: its keys in order, what their values may be, its run lists."""

    kind: str
    outage: str
    types: tuple[tuple[str, frozenset[type]], ...]
    lists: tuple[str, ...]


def _shapes() -> Iterator[tuple[tuple[str, tuple[str, ...]], _Shape]]:
    for event, (name, outage) in KINDS.items():
        types = {
            key: _TYPES.get(annotation, _LIST)
            for key, annotation in zip(FIELD_KEYS[event], field_types(event), strict=True)
        }
        keys = tuple(sorted(LEAF_KEYS[name] - {TRACE}))
        fields = tuple((key, types[key]) for key in keys if key in types and key not in HEAD_KEYS)
        lists = tuple(key for key in TOTALS if key in types)
        sizes = tuple((TOTALS[key], _TYPES["int"]) for key in lists)
        yield (name, keys), _Shape(name, outage, fields + sizes, lists)


_SHAPES = dict(_shapes())


def read_columns(lines: list[bytes], sender: Sender, refused: frozenset[str]) -> Batch | None:
    """The batch of canonical leaves, a line each; None where one is not plain. `refused` are kinds not to take."""
    try:
        bodies = list(map(orjson.loads, lines))
        if set(map(type, bodies)) != {dict} or max(map(len, lines)) > LEAF_BYTES_MAX:
            return None
        if [orjson.dumps(body, option=orjson.OPT_STRICT_INTEGER) for body in bodies] != lines:
            return None
        traces = {place: body.pop(TRACE) for place, body in enumerate(bodies) if TRACE in body}
        if not all(map(is_trace, traces.values())):
            return None
        return _batch(lines, bodies, traces, sender, refused)
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
        return None


def _batch(
    lines: list[bytes],
    bodies: list[dict[str, Any]],
    traces: Mapping[int, str],
    sender: Sender,
    refused: frozenset[str],
) -> Batch | None:
    logs, lives, sequences, parts, of_parts, kinds, outages, at_us, boot_us, schemas = zip(
        *map(_PLACED, bodies), strict=True
    )
    if set(schemas) != {SCHEMA} or set(lives) != {sender.incarnation} or not refused.isdisjoint(kinds):
        return None
    if not _placed_well(sequences, parts, of_parts, at_us, boot_us, sender.offset_us):
        return None
    if set(map(type, logs)) != {str}:
        return None
    places: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for place, (kind, body) in enumerate(zip(kinds, bodies, strict=True)):
        places.setdefault((kind, tuple(body)), []).append(place)
    if len({kind for kind, _ in places}) != len(places):  # a kind in two forms: a version of old among them
        return None
    groups = []
    for (kind, keys), mine in places.items():
        group = _group(_SHAPES[kind, keys], keys, mine, [bodies[place] for place in mine], sender)
        if group is None:
            return None
        if not traces.keys().isdisjoint(mine):
            if TRACE not in LEAF_KEYS[kind]:
                return None
            group = group._replace(columns={**group.columns, TRACE: [traces.get(place) for place in mine]})
        groups.append(group)
    founders = {sender.incarnation: Founder(sender.worker, sender.offset_us, at_us[0])}
    hashes = leaf_hashes(lines)
    return Batch(
        logs, lives, sequences, parts, of_parts, kinds, outages, at_us, lines, groups, founders, hashes
    )


def _placed_well(
    sequences: Sequence[Any],
    parts: Sequence[Any],
    of_parts: Sequence[Any],
    at_us: Sequence[Any],
    boot_us: Sequence[Any],
    offset_us: int,
) -> bool:
    numbers = (sequences, parts, of_parts, at_us, boot_us)
    if set(map(type, chain.from_iterable(numbers))) != {int} or min(map(min, numbers)) < 0:
        return False
    if min(sequences) < 1 or max(sequences) >= _SEQUENCE_MAX or set(map(sub, at_us, boot_us)) != {offset_us}:
        return False
    return all(1 <= part <= of <= _PARTS_MAX for part, of in set(zip(parts, of_parts, strict=True)))


def _group(
    shape: _Shape, keys: tuple[str, ...], places: list[int], bodies: list[dict[str, Any]], sender: Sender
) -> Group | None:
    """The leaves of one kind as columns; None where one of them is not what its kind is."""
    rows = zip(*[body.values() for body in bodies], strict=True)
    columns: Columns = dict(zip(keys, rows, strict=True))
    for key, types in shape.types:
        if not types.issuperset(map(type, columns[key])):
            return None
    if set(columns["outage"]) != {shape.outage} or not _in_their_logs(columns):
        return None
    if "worker" in columns and set(columns["worker"]) != {sender.worker}:
        return None
    about = set(columns.get("of_incarnation", ()))
    if not about <= {"", sender.incarnation} | sender.predecessors:
        return None
    found: dict[str, Extents] = {key: extents(columns[key]) for key in shape.lists}
    return Group(shape.kind, places, columns, found)


def _in_their_logs(columns: Columns) -> bool:
    named = [columns[key] for key in _PARTIES if key in columns]
    for log, *parties in set(zip(columns["log"], *named, strict=True)):
        if not _NAMES.issuperset(map(type, parties)):
            return False
        if log not in {log_of(party) for party in set(parties) or {None}}:
            return False
    return True
