"""Rows from leaves: the one way in which any column of evidence comes to be.

1. A projection is a function of the leaves and of the ids of logs and incarnations alone, so a spill is replayed, and
   a table re-derived, from bytes.
2. Which columns a kind's row has, and where they come from, is said with the kind (`audit.kinds.row`). What is no
   value of the leaf is derived here, by kind (`_DERIVED`).
3. An event written in two logs is projected once, in the log of the tenant that acted.
4. A row has the time of its leaf, which is the month that it lies in; an item's own moment is another column.
5. Whatever its kind, a leaf that carries a trace has a row by which the trace finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

from sqlalchemy import Table

from kvcustody.audit.events import log_of
from kvcustody.audit.events.batch import LeafGroup
from kvcustody.audit.events.leaf_schema import LEAF_KEYS, boot_key
from kvcustody.audit.events.registry import TRACE
from kvcustody.audit.schema.all_tables import kinds_of, projections
from kvcustody.audit.schema.leaf_tables import event_traces

Row = tuple[Any, ...]
Columns = dict[str, Sequence[Any]]


class IncarnationRow(NamedTuple):
    """An incarnation's row id, and what turns its boot time into UTC."""

    id: int
    offset_us: int


class Projection(NamedTuple):
    """Rows of one table: the places of their leaves in the batch, and their columns after (log, idx)."""

    table: Table
    places: Sequence[int]
    columns: Sequence[Sequence[Any]]

    def whole(self, logs: Sequence[int], idx: Sequence[int]) -> list[Sequence[Any]]:
        """Every column of the rows, given the log and the idx of every leaf of the batch."""
        return [*([values[place] for place in self.places] for values in (logs, idx)), *self.columns]

    def rows(self, logs: Sequence[int], idx: Sequence[int]) -> Iterator[Row]:
        """The rows, given the same."""
        return zip(*self.whole(logs, idx), strict=True)


_TABLES = {kind: table for table in projections() for kind in kinds_of(table)}
TABLES = (*dict.fromkeys(_TABLES.values()), event_traces)
_SOURCES = {
    kind: tuple(column.source for column in table.info["row"].columns) for kind, table in _TABLES.items()
}
_IN_UTC = {  # columns of moments that a leaf has on its incarnation's clock alone
    kind: [
        (name, boot)
        for name in sources
        if (boot := boot_key(name)) in LEAF_KEYS[kind] and name not in LEAF_KEYS[kind]
    ]
    for kind, sources in _SOURCES.items()
}


def project(group: LeafGroup, lives: Sequence[IncarnationRow], leaves_us: Sequence[int]) -> list[Projection]:
    """The rows of one kind of leaves, in their order; none where the leaves alone are the record.

    `lives` are the incarnations that the leaves are about, one a leaf; `leaves_us` the times of the batch's leaves.
    """
    made = _of_kind(group, lives, leaves_us)
    found = [] if made is None else [made]
    return [*found, _of_traces(group)] if TRACE in group.columns else found


def _of_traces(group: LeafGroup) -> Projection:
    """Where the leaves that carry a trace are (rule 5)."""
    traces = group.columns[TRACE]
    kept = [list(compress(column, traces)) for column in (group.places, traces, group.columns["at_us"])]
    return Projection(event_traces, kept[0], kept[1:])


def _of_kind(
    group: LeafGroup, lives: Sequence[IncarnationRow], leaves_us: Sequence[int]
) -> Projection | None:
    table = _TABLES.get(group.kind)
    if table is None:
        return None
    columns: Columns = {**group.columns, "_incarnation": [life.id for life in lives]}
    if "_leaf_us" in _SOURCES[group.kind]:
        columns["_leaf_us"] = list(map(leaves_us.__getitem__, group.places))
    if "runs" in group.extents:
        columns["_blocks"], columns["_low"], columns["_high"] = group.extents["runs"]
    derive = _DERIVED.get(group.kind)
    if derive is not None:
        derive(columns, group, lives)
    for name, boot in _IN_UTC[group.kind]:
        columns[name] = [moment + life.offset_us for moment, life in zip(columns[boot], lives, strict=True)]
    made = [columns[name] for name in _SOURCES[group.kind]]
    if not (acting := table.info["acting"]):
        return Projection(table, group.places, made)
    pairs = zip(group.columns["log"], group.columns[acting], strict=True)
    own = [log == log_of(tenant) for log, tenant in pairs]
    kept = [list(compress(column, own)) for column in (group.places, *made)]
    return Projection(table, kept[0], kept[1:])


def _opened(columns: Columns, group: LeafGroup, lives: Sequence[IncarnationRow]) -> None:
    attached, written = group.extents["runs"], group.extents["written"]
    columns["_written_blocks"] = written.blocks
    if max(attached.high) < 0:  # no runs at all, whose extents are (0, 0, -1)
        columns["_low"], columns["_high"] = written.low, written.high
    elif any(written.blocks):
        both = list(zip(*attached, *written, strict=True))
        columns["_low"] = [
            min(low, other) if blocks and more else low if blocks else other
            for blocks, low, _, more, other, _ in both
        ]
        columns["_high"] = list(map(max, attached.high, written.high))


def _released(columns: Columns, group: LeafGroup, lives: Sequence[IncarnationRow]) -> None:
    count = len(group.places)
    columns["_final"] = [True] * count
    columns["_written"] = [True] * count
    columns["_written_blocks"] = columns["_blocks"]


def _blocks_released(columns: Columns, group: LeafGroup, lives: Sequence[IncarnationRow]) -> None:
    own = columns["_written"] = columns["own"]
    columns["_final"] = [False] * len(own)
    columns["_written_blocks"] = [
        blocks if theirs else 0 for blocks, theirs in zip(columns["_blocks"], own, strict=True)
    ]


def _receipt(columns: Columns, group: LeafGroup, lives: Sequence[IncarnationRow]) -> None:
    # Bytes are of all parts together and even over blocks; a count of sampled blocks cannot be divided.
    sizes = zip(columns["bytes"], columns["_blocks"], columns["blocks"], strict=True)
    columns["_bytes"] = [total * here // all_blocks if all_blocks else 0 for total, here, all_blocks in sizes]
    columns["_verified"] = [
        verified if part == 1 else 0
        for verified, part in zip(columns["verified"], columns["part"], strict=True)
    ]


def _decision(columns: Columns, group: LeafGroup, lives: Sequence[IncarnationRow]) -> None:
    columns["_rule"] = [reasons[0] if reasons else "default-deny" for reasons in columns["reasons"]]


def _copies(columns: Columns, group: LeafGroup, lives: Sequence[IncarnationRow]) -> None:
    numbers, count = columns["numbers"], len(group.places)
    columns["_step"] = [group.kind] * count
    columns["_cause"] = columns.get("cause", [""] * count)
    columns["_erasure"] = columns.get("erasure", [""] * count)
    columns["_copies"], columns["_numbers"] = list(map(len, numbers)), list(map(sum, numbers))
    columns["_blocks"], columns["_bytes"] = (
        list(map(sum, columns[name])) for name in ("blocks_each", "bytes_each")
    )
    columns["_low"], columns["_high"] = ([of(some, default=0) for some in numbers] for of in (min, max))


def _case_opened(columns: Columns, group: LeafGroup, lives: Sequence[IncarnationRow]) -> None:
    columns["_holidays"] = list(map(" ".join, columns["holidays"]))
    columns["_ends"] = [" ".join(ends) or None for ends in columns["ends"]]


_OUTAGE = {"cause": "", "first_sequence": 0, "last_sequence": 0, "added": 0, "duplicates": 0}


def _outage(columns: Columns, group: LeafGroup, lives: Sequence[IncarnationRow]) -> None:
    count = len(group.places)
    columns["kind"] = [group.kind] * count
    for name, nothing in _OUTAGE.items():
        columns[f"_{name}"] = columns.get(name, [nothing] * count)


def _withdrawn(columns: Columns, group: LeafGroup, lives: Sequence[IncarnationRow]) -> None:
    _outage(columns, group, lives)
    columns["_cause"] = ["refused"] * len(group.places)
    columns["_first_sequence"] = columns["_last_sequence"] = columns["of_sequence"]


_DERIVED: dict[str, Callable[[Columns, LeafGroup, Sequence[IncarnationRow]], None]] = {
    "residency-opened": _opened,
    "residency-released": _released,
    "blocks-released": _blocks_released,
    "receipt": _receipt,
    "decision": _decision,
    "case-opened": _case_opened,
    **dict.fromkeys(("copies-stored", "copies-ended", "copies-destroyed"), _copies),
    **dict.fromkeys(("spill-started", "replay-completed", "gap"), _outage),
    "withdrawn": _withdrawn,
}
