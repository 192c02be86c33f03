"""Leaves in order, column by column: what a transaction appends.

1. Every column is a function of the leaves' bytes: `batch_of(parse(data) …)` gives the batch that the encoder gave.
   Values of `LeafGroup.columns` are as in the leaf, except that decimal strings of large integers are integers.
2. A group has no column of a key in `UNREAD`: no row is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from kvcustody.audit.events.block_run_text import Extents
from kvcustody.audit.events.canonical_leaf import Leaf
from kvcustody.audit.events.registry import FIELD_KEYS, KINDS, TOTALS, field_types
from kvcustody.audit.tlog.merkle import leaf_hashes

Columns = Mapping[str, Sequence[Any]]

# What these say is in the columns of the whole batch, in extents, or in the leaf alone.
UNREAD = frozenset({"schema", "kind", "outage", "incarnation", "sequence", "parts", "domains", *TOTALS})


class LeafGroup(NamedTuple):
    """Leaves of one kind: their places in the batch, their values by leaf key, the extents of their run lists."""

    kind: str
    places: Sequence[int]
    columns: Columns
    extents: Mapping[str, Extents]


class IncarnationStart(NamedTuple):
    """What the first leaf of an incarnation in a batch says of it."""

    worker: str
    offset_us: int
    at_us: int


class LeafBatch(NamedTuple):
    """Leaves in order; columns have one value a leaf."""

    logs: Sequence[str]
    incarnations: Sequence[str]
    sequences: Sequence[int]
    parts: Sequence[int]
    of_parts: Sequence[int]
    kinds: Sequence[str]
    outages: Sequence[str]
    at_us: Sequence[int]
    data: Sequence[bytes]
    groups: Sequence[LeafGroup]
    founders: Mapping[str, IncarnationStart]
    hashes: Sequence[bytes]  # RFC 6962, of `data`


EMPTY = LeafBatch((), (), (), (), (), (), (), (), (), (), {}, ())


def _integer_keys(kind: type) -> frozenset[str]:
    """Keys whose values may be decimal strings in a leaf."""
    keys = dict(zip(FIELD_KEYS[kind], field_types(kind), strict=True))
    named = [key for key, annotation in keys.items() if annotation in ("int", "float")]
    return frozenset({"at_us", *named, *(TOTALS[key] for key in keys if key in TOTALS)})


_INTEGER_KEYS = {KINDS[kind].name: _integer_keys(kind) for kind in KINDS}


def batch_of(leaves: Sequence[Leaf]) -> LeafBatch:
    """The batch of leaves that are there already, as a replay reads them; raises `KeyError` on a strange body."""
    bodies = [leaf.body for leaf in leaves]
    by_kind: dict[str, list[int]] = {}
    founders: dict[str, IncarnationStart] = {}
    for place, body in enumerate(bodies):
        by_kind.setdefault(body["kind"], []).append(place)
        if body["incarnation"] not in founders:
            at_us = int(body["at_us"])
            worker = str(body.get("worker", "unknown"))
            founders[body["incarnation"]] = IncarnationStart(worker, at_us - int(body["boot_us"]), at_us)
    return LeafBatch(
        [leaf.log for leaf in leaves],
        [body["incarnation"] for body in bodies],
        [int(body["sequence"]) for body in bodies],
        [body["part"] for body in bodies],
        [body["parts"] for body in bodies],
        [body["kind"] for body in bodies],
        [body["outage"] for body in bodies],
        [int(body["at_us"]) for body in bodies],
        [leaf.data for leaf in leaves],
        [_group(kind, places, [bodies[place] for place in places]) for kind, places in by_kind.items()],
        founders,
        leaf_hashes(leaf.data for leaf in leaves),
    )


def _group(kind: str, places: list[int], bodies: list[dict[str, Any]]) -> LeafGroup:
    integers = _INTEGER_KEYS.get(kind, frozenset())
    keys = dict.fromkeys(key for body in bodies for key in body)
    columns = {
        key: [_integer(body.get(key)) if key in integers else body.get(key) for body in bodies]
        for key in keys
        if key not in UNREAD
    }
    # Leaves of earlier versions have no `written`: the list is empty.
    lists = [key for key in TOTALS if key in keys or (key == "written" and kind == "residency-opened")]
    return LeafGroup(
        kind, places, columns, {key: extents([body.get(key, []) for body in bodies]) for key in lists}
    )


def _integer(value: Any) -> Any:
    """A large integer from its decimal string; whatever else stands there is for the database to refuse."""
    return int(value) if value.__class__ is str and value.removeprefix("-").isdecimal() else value


def extents(lists: Sequence[Sequence[Sequence[Any]]]) -> Extents:
    """The extent of every list of encoded runs."""
    widths = set(map(len, lists))
    if widths == {0}:
        return Extents([0] * len(lists), [0] * len(lists), [-1] * len(lists))
    if widths == {1}:  # the rule: one run a list
        items = list(map(itemgetter(0), lists))
        firsts = list(map(int, map(itemgetter(0), items)))
        blocks = [sum(item[2]) if item[2] else len(item[1]) for item in items]
        if 0 not in blocks:
            return Extents(
                blocks,
                firsts,
                [first + length - 1 if first else 0 for first, length in zip(firsts, blocks, strict=True)],
            )
    made = Extents([], [], [])
    for runs in lists:
        total, low, high = 0, 1 << 62, -1
        for item in runs:
            length = sum(item[2]) if item[2] else len(item[1])
            first = int(item[0])
            total, low = total + length, min(low, first)
            high = max(high, first + length - 1 if first else 0)
        made.blocks.append(total)
        made.low.append(low if total else 0)
        made.high.append(high)
    return made
