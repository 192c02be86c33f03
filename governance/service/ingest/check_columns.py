"""A worker's batch checked and read column by column: what `leaf_check` does leaf by leaf, for the plain case.

1. What is taken here, `leaf_check` takes too, and gives the same `LeafBatch`. None means: look leaf by leaf.
2. Bytes are compared with the canonical form of what they say. With the keys of a leaf in their order, that is the
   form without sorting.
3. A trace, which not every leaf of a kind has, is looked at by itself: leaves with and without one are one group.
4. A few leaves are read and checked at a time, and what is not kept of them is freed: the values of a whole batch are
   more than a processor's cache holds, and would be fetched anew for every check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter, sub
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.events import KINDS, LEAF_BYTES_MAX, LEAF_KEYS, ORIGINS, SCHEMA, log_of
from kvcustody.audit.events.batch import UNREAD, IncarnationStart, LeafBatch, LeafGroup, extents
from kvcustody.audit.events.block_run_text import Extents
from kvcustody.audit.events.registry import FIELD_KEYS, HEAD_KEYS, TOTALS, TRACE, field_types
from kvcustody.audit.tlog.merkle import leaf_hashes
from kvcustody.governance.identity.w3c_trace import is_trace

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
_CHUNK = 128
_PLACED_KEYS = (
    "log",
    "incarnation",
    "sequence",
    "part",
    "parts",
    "kind",
    "outage",
    "at_us",
    "boot_us",
    "schema",
)
_PLACED = itemgetter(*_PLACED_KEYS)
_HEAD_TEXTS = frozenset({"log", "incarnation", "kind", "outage", "schema"})
Columns = Mapping[str, Sequence[Any]]
_FormKey = tuple[str, tuple[str, ...]]  # a kind and its keys in order


class Sender(NamedTuple):
    """Who sends a batch: the worker, its incarnation, and its incarnations of old."""

    worker: str
    incarnation: str
    offset_us: int
    predecessors: frozenset[str]


class _Shape(NamedTuple):
    """One kind of leaf: its keys in order, what their values may be, its run lists, which values are texts."""

    kind: str
    outage: str
    types: tuple[tuple[str, frozenset[type]], ...]
    lists: tuple[str, ...]
    texts: frozenset[str]


def _shapes() -> Iterator[tuple[_FormKey, _Shape]]:
    for event, (name, outage) in KINDS.items():
        types = {
            key: _TYPES.get(annotation, _LIST)
            for key, annotation in zip(FIELD_KEYS[event], field_types(event), strict=True)
        }
        keys = tuple(sorted(LEAF_KEYS[name] - {TRACE}))
        fields = tuple((key, types[key]) for key in keys if key in types and key not in HEAD_KEYS)
        lists = tuple(key for key in TOTALS if key in types)
        sizes = tuple((TOTALS[key], _TYPES["int"]) for key in lists)
        texts = _HEAD_TEXTS | {key for key, kinds in fields if str in kinds}
        yield (name, keys), _Shape(name, outage, fields + sizes, lists, texts)


_SHAPES = dict(_shapes())


def read_columns(lines: list[bytes], sender: Sender, refused: frozenset[str]) -> LeafBatch | None:
    """The batch of canonical leaves, a line each; None where one is not plain. `refused` are kinds not to take."""
    try:
        if max(map(len, lines)) > LEAF_BYTES_MAX:
            return None
        read = _Read(sender, refused)
        for start in range(0, len(lines), _CHUNK):
            if not read.take(start, lines[start : start + _CHUNK]):
                return None
        return read.batch(lines)
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
        return None


class _Kind(NamedTuple):
    """What the leaves of one kind say, so far."""

    shape: _Shape
    places: list[int]
    columns: dict[str, list[Any]]
    extents: dict[str, Extents]


class _Read:
    """The leaves of a batch on their way into columns, some at a time (rule 4)."""

    def __init__(self, sender: Sender, refused: frozenset[str]) -> None:
        self._sender = sender
        self._refused = refused
        self._columns: list[list[Any]] = [[] for _ in _PLACED_KEYS]
        self._kinds: dict[_FormKey, _Kind] = {}
        self._traces: dict[int, str] = {}  # by place
        self._hashes: list[bytes] = []
        self._texts: dict[Any, Any] = {}

    def take(self, first: int, lines: list[bytes]) -> bool:
        """Check and read some lines, the first of them at this place; False where one is not plain."""
        bodies = list(map(orjson.loads, lines))
        if set(map(type, bodies)) != {dict} or not _canonical(bodies, lines):
            return False
        self._hashes += leaf_hashes(lines)
        for place, body in enumerate(bodies, first):
            if TRACE in body:
                self._traces[place] = body.pop(TRACE)
        if not self._take_heads(bodies):
            return False
        alike: dict[_FormKey, list[int]] = {}
        for place, body in enumerate(bodies):
            alike.setdefault((body["kind"], tuple(body)), []).append(place)
        for form, places in alike.items():
            rows = zip(*[bodies[place].values() for place in places], strict=True)
            columns = dict(zip(form[1], rows, strict=True))
            if not _right(_SHAPES[form], columns, self._sender):
                return False
            self._add(form, [first + place for place in places], columns)
        return True

    def batch(self, lines: list[bytes]) -> LeafBatch | None:
        """The batch of all that was taken; None where one kind came in two forms, or a trace is none."""
        if len({kind for kind, _ in self._kinds}) != len(self._kinds):  # a version of old among them
            return None
        if not all(map(is_trace, self._traces.values())):
            return None
        groups = []
        for shape, places, columns, found in self._kinds.values():
            if not self._traces.keys().isdisjoint(places):
                if TRACE not in LEAF_KEYS[shape.kind]:
                    return None
                columns[TRACE] = [self._traces.get(place) for place in places]
            groups.append(LeafGroup(shape.kind, places, columns, found))
        *head, _, _ = self._columns
        at_us = self._columns[_PLACED_KEYS.index("at_us")]
        founders = {
            self._sender.incarnation: IncarnationStart(self._sender.worker, self._sender.offset_us, at_us[0])
        }
        return LeafBatch._make((*head, lines, groups, founders, self._hashes))

    def _take_heads(self, bodies: list[dict[str, Any]]) -> bool:
        """What every leaf has, whatever its kind."""
        columns = list(zip(*map(_PLACED, bodies), strict=True))
        logs, lives, sequences, parts, of_parts, kinds, _, at_us, boot_us, schemas = columns
        if (
            set(schemas) != {SCHEMA}
            or set(lives) != {self._sender.incarnation}
            or set(map(type, logs)) != {str}
        ):
            return False
        if not self._refused.isdisjoint(kinds):
            return False
        if not _placed_well(sequences, parts, of_parts, at_us, boot_us, self._sender.offset_us):
            return False
        for key, whole, values in zip(_PLACED_KEYS, self._columns, columns, strict=True):
            whole.extend(self._shared(values) if key in _HEAD_TEXTS else values)
        return True

    def _add(self, form: _FormKey, places: list[int], columns: Columns) -> None:
        """Leaves of one kind that are right."""
        known = self._kinds.get(form)
        if known is None:
            shape = _SHAPES[form]
            nothing = {key: Extents([], [], []) for key in shape.lists}
            known = self._kinds[form] = _Kind(
                shape, [], {key: [] for key in form[1] if key not in UNREAD}, nothing
            )
        known.places.extend(places)
        texts = known.shape.texts
        for key, whole in known.columns.items():
            whole.extend(self._shared(columns[key]) if key in texts else columns[key])
        for key, found in known.extents.items():
            for whole, more in zip(found, extents(columns[key]), strict=True):
                whole.extend(more)

    def _shared(self, values: Sequence[Any]) -> Iterator[Any]:
        """The same texts, and for each the one object that came first: the others' memory is free again."""
        return map(self._texts.setdefault, values, values)


def _canonical(bodies: list[dict[str, Any]], lines: list[bytes]) -> bool:
    """Each line is the canonical form of its object (rule 2).

    They are compared all together: no object's text is the beginning of another's, so each meets its own line.
    """
    return orjson.dumps(bodies, option=orjson.OPT_STRICT_INTEGER) == b"[%b]" % b",".join(lines)


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


def _right(shape: _Shape, columns: Columns, sender: Sender) -> bool:
    """Leaves of one kind are what their kind is, and their sender's."""
    for key, types in shape.types:
        if not types.issuperset(map(type, columns[key])):
            return False
    if set(columns["outage"]) != {shape.outage} or not _in_their_logs(columns):
        return False
    if "worker" in columns and set(columns["worker"]) != {sender.worker}:
        return False
    if not ORIGINS.issuperset(columns.get("origin", ())):
        return False
    return set(columns.get("of_incarnation", ())) <= {"", sender.incarnation} | sender.predecessors


def _in_their_logs(columns: Columns) -> bool:
    named = [columns[key] for key in _PARTIES if key in columns]
    for log, *parties in set(zip(columns["log"], *named, strict=True)):
        if not _NAMES.issuperset(map(type, parties)):
            return False
        if log not in {log_of(party) for party in set(parties) or {None}}:
            return False
    return True
