"""Rows from leaves: the one way in which a row of evidence comes to be.

1. `project` is a function of leaves, of their places and of the ledger's own ids of processes alone. So whoever writes,
   checks, moves or rebuilds a ledger calls it with a window of leaves, and gets the same rows.
2. Which columns a kind's row has, and where they come from, is said with the kind (`audit.kinds.row`). What is no
   value of the leaf is derived here, by kind (`_DERIVED`).
3. An event written in two logs is projected once, in the log of the tenant that acted.
4. A row has the time of its leaf, which is the month that it lies in; an item's own moment is another column.
5. Whatever its kind, a leaf that carries a trace has a row by which the trace finds it.
6. `incarnations` has one row a process, changed in place: `life_changes` says what a window's leaves change of it.
7. A process is of the worker that its own newest leaf about its life names. Until there is one, its row has the name
   with which it was registered, or else that of the first leaf of another about its end or return, or else `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

from sqlalchemy import Table

from kvcustody.audit.kinds import log_of
from kvcustody.audit.kinds.registry import TRACE
from kvcustody.audit.leaf.batch import OWN_LIFE, UNKNOWN_WORKER, LeafBatch, LeafGroup
from kvcustody.audit.leaf.leaf_schema import LEAF_KEYS, boot_key
from kvcustody.audit.store.schema.all_tables import kinds_of, projections
from kvcustody.audit.store.schema.leaf_tables import event_traces

Columns = dict[str, Sequence[Any]]


class IncarnationRow(NamedTuple):
    """An incarnation's row id, and what turns its boot time into UTC."""

    id: int
    offset_us: int


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


class LifeChange(NamedTuple):
    """What one leaf changes of the row of a process (rule 6)."""

    life: IncarnationRow
    values: dict[str, Any]
    worker: str  # whose process the leaf says it is
    is_own: bool  # the process says so itself

    def renames(self, worker: str) -> bool:
        """Whether a process that is of this worker so far is of another by the leaf (rule 7)."""
        return self.worker != worker and (self.is_own or worker == UNKNOWN_WORKER)


_MEMORY = ("shards", "blocks", "bytes_per_block", "device", "software")
_LIFE = OWN_LIFE | {"worker-died", "worker-returned"}
_Rows = tuple[Table, Sequence[int], Sequence[Sequence[Any]]]  # the places of their leaves, and their columns


def project(
    batch: LeafBatch,
    logs: Sequence[int],
    idx: Sequence[int],
    life_of: Callable[[str], IncarnationRow],
    *,
    tables: frozenset[Table] | None = None,
) -> dict[Table, list[Sequence[Sequence[Any]]]]:
    """The rows of a window of leaves: by table, some columns of values, in the order of the table's own.

    `logs` and `idx` say where each leaf is; `life_of` gives a process of the ledger by its uuid. `tables`: no others.
    """
    made: dict[Table, list[Sequence[Sequence[Any]]]] = {}
    for group in batch.groups:
        for table, places, columns in _of_group(batch, group, life_of):
            if tables is None or table in tables:
                place = [[values[each] for each in places] for values in (logs, idx)]
                made.setdefault(table, []).append([*place, *columns])
    return made


def rows_of(columns: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """The rows of some columns."""
    return zip(*columns, strict=True)


def life_changes(batch: LeafBatch, life_of: Callable[[str], IncarnationRow]) -> list[LifeChange]:
    """What the leaves change of the rows of processes, in the order of the leaves."""
    found: list[tuple[int, LifeChange]] = []
    for group in batch.groups:
        if group.kind in _LIFE:
            lives = _lives(batch, group, life_of)
            is_own = group.kind in OWN_LIFE
            for number, (place, life) in enumerate(zip(group.places, lives, strict=True)):
                worker = group.columns["worker"][number]
                found.append((place, LifeChange(life, _life_values(group, number), worker, is_own)))
    return [change for _, change in sorted(found, key=lambda each: each[0])]


def _life_values(group: LeafGroup, number: int) -> dict[str, Any]:
    at_us = group.columns["at_us"][number]
    if group.kind == "observation-started":
        return {}
    if group.kind == "worker-started":
        return {key: group.columns[key][number] for key in _MEMORY} | {"started_us": at_us}
    if group.kind == "worker-returned":
        return {"ended_us": None, "end": None}
    return {"ended_us": at_us, "end": group.kind.removeprefix("worker-")}


def _lives(
    batch: LeafBatch, group: LeafGroup, life_of: Callable[[str], IncarnationRow]
) -> list[IncarnationRow]:
    """The process that each leaf of a group is about: another's, or the one that recorded it."""
    recorders = [batch.incarnations[place] for place in group.places]
    named = group.columns.get("of_incarnation", recorders)
    about = [of or recorder for of, recorder in zip(named, recorders, strict=True)]
    lives = {uuid: life_of(uuid) for uuid in set(about)}
    return [lives[uuid] for uuid in about]


def _of_group(
    batch: LeafBatch, group: LeafGroup, life_of: Callable[[str], IncarnationRow]
) -> Iterator[_Rows]:
    table = _TABLES.get(group.kind)
    if table is not None:
        yield _of_kind(table, group, _lives(batch, group, life_of), batch.at_us)
    if TRACE in group.columns:
        traces = group.columns[TRACE]
        kept = [list(compress(column, traces)) for column in (group.places, traces, group.columns["at_us"])]
        yield event_traces, kept[0], kept[1:]


def _of_kind(
    table: Table, group: LeafGroup, lives: Sequence[IncarnationRow], leaves_us: Sequence[int]
) -> _Rows:
    columns: Columns = {**group.columns, "_incarnation": [life.id for life in lives]}
    if "_leaf_us" in _SOURCES[group.kind]:
        columns["_leaf_us"] = list(map(leaves_us.__getitem__, group.places))
    if "runs" in group.extents:
        columns["_blocks"], columns["_low"], columns["_high"] = group.extents["runs"]
    derive = _DERIVED.get(group.kind)
    if derive is not None:
        derive(columns, group)
    for name, boot in _IN_UTC[group.kind]:
        columns[name] = [moment + life.offset_us for moment, life in zip(columns[boot], lives, strict=True)]
    made = [columns[name] for name in _SOURCES[group.kind]]
    if not (acting := table.info["acting"]):
        return table, group.places, made
    pairs = zip(group.columns["log"], group.columns[acting], strict=True)
    own = [log == log_of(tenant) for log, tenant in pairs]
    kept = [list(compress(column, own)) for column in (group.places, *made)]
    return table, kept[0], kept[1:]


def _opened(columns: Columns, group: LeafGroup) -> None:
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


def _released(columns: Columns, group: LeafGroup) -> None:
    count = len(group.places)
    columns["_final"] = [True] * count
    columns["_written"] = [True] * count
    columns["_written_blocks"] = columns["_blocks"]


def _blocks_released(columns: Columns, group: LeafGroup) -> None:
    own = columns["_written"] = columns["own"]
    columns["_final"] = [False] * len(own)
    columns["_written_blocks"] = [
        blocks if theirs else 0 for blocks, theirs in zip(columns["_blocks"], own, strict=True)
    ]


def _receipt(columns: Columns, group: LeafGroup) -> None:
    # Bytes are of all parts together and even over blocks; a count of sampled blocks cannot be divided.
    sizes = zip(columns["bytes"], columns["_blocks"], columns["blocks"], strict=True)
    columns["_bytes"] = [total * here // all_blocks if all_blocks else 0 for total, here, all_blocks in sizes]
    columns["_verified"] = [
        verified if part == 1 else 0
        for verified, part in zip(columns["verified"], columns["part"], strict=True)
    ]


def _decision(columns: Columns, group: LeafGroup) -> None:
    columns["_rule"] = [reasons[0] if reasons else "default-deny" for reasons in columns["reasons"]]


def _copies(columns: Columns, group: LeafGroup) -> None:
    numbers, count = columns["numbers"], len(group.places)
    columns["_step"] = [group.kind] * count
    columns["_cause"] = columns.get("cause", [""] * count)
    columns["_erasure"] = columns.get("erasure", [""] * count)
    columns["_copies"], columns["_numbers"] = list(map(len, numbers)), list(map(sum, numbers))
    columns["_blocks"], columns["_bytes"] = (
        list(map(sum, columns[name])) for name in ("blocks_each", "bytes_each")
    )
    columns["_low"], columns["_high"] = ([of(some, default=0) for some in numbers] for of in (min, max))


def _case_opened(columns: Columns, group: LeafGroup) -> None:
    columns["_holidays"] = list(map(" ".join, columns["holidays"]))
    columns["_ends"] = [" ".join(ends) or None for ends in columns["ends"]]


_OUTAGE = {"cause": "", "first_sequence": 0, "last_sequence": 0, "added": 0, "duplicates": 0}


def _outage(columns: Columns, group: LeafGroup) -> None:
    count = len(group.places)
    columns["kind"] = [group.kind] * count
    for name, nothing in _OUTAGE.items():
        columns[f"_{name}"] = columns.get(name, [nothing] * count)


def _withdrawn(columns: Columns, group: LeafGroup) -> None:
    _outage(columns, group)
    columns["_cause"] = ["refused"] * len(group.places)
    columns["_first_sequence"] = columns["_last_sequence"] = columns["of_sequence"]


_DERIVED: dict[str, Callable[[Columns, LeafGroup], None]] = {
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
