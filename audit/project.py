"""Make rows and figures from leaves: the only way in which a row of evidence is created.

    rows = project(batch, logs, idx, life_of)      # {table: columns}
    figures = count_events(batch, logs)            # {(scraped, log, hour): {(kind, measure, …): value}}

1. `project` is a function of only the leaves, their places and the ledger's own ids of processes. So all code that
   writes, checks, moves or rebuilds a ledger calls it with a window of leaves, and gets the same rows.
2. Each kind declares the columns of its row and their sources (`audit.kinds.row`). Columns that are no value of the
   leaf are derived here, by kind (`_DERIVED`).
3. An event written in two logs is projected once, in the log of the tenant that acted.
4. A row has the time of its leaf, which determines its month. An item's own moment is another column.
5. Whatever its kind, a leaf that carries a trace has a row by which the trace finds it.
6. `incarnations` has one row for each process, changed in place. `life_changes` gives the changes by a window's leaves.
7. A process belongs to the worker that its own newest leaf about its life names. Until there is one, its row has the
   name with which it was registered. Without that, it has the name in the first leaf of another process about its end
   or return, or else `unknown`.

Figures, by log and hour:
8. The hour is that of the leaf's `at_us`, or of the item's where a leaf is a list.
9. `leaves` counts leaves, parts included, by their own kind. `events` counts events, and items of lists, by their
   kinds.
10. Sizes are added up over parts, each with its own content. An event that is written in two logs counts as an event in
    both. Its requests, blocks and denials count, as its rows do, in the log of the tenant that acted (rule 3).
11. Copies off the device are counted by tier (`detail`).
12. A cause, outcome, level or rule has a figure of its own; a person, a session, an engine or free text has none.
13. Figures are keyed by the row that they become (`schema.counters`, rule 3). Similar leaves are added up first. In a
    fleet, a leaf is usually the only one of its tenant in a commit, so that costs little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from typing import Any, Final, NamedTuple

from sqlalchemy import Table

from kvcustody.audit.kinds import log_of
from kvcustody.audit.kinds.control_events import DecisionRecorded
from kvcustody.audit.kinds.custody_events import RequestMonitored
from kvcustody.audit.kinds.ledger_events import HitCounters
from kvcustody.audit.kinds.registry import KINDS, TRACE
from kvcustody.audit.leaf.batch import OWN_LIFE, UNKNOWN_WORKER, LeafBatch, LeafGroup
from kvcustody.audit.leaf.change_items import CHANGED
from kvcustody.audit.leaf.leaf_schema import LEAF_KEYS, SCHEMAS, boot_key
from kvcustody.audit.store.schema.all_tables import kinds_of, projections
from kvcustody.audit.store.schema.leaf_tables import event_traces
from kvcustody.times import HOUR_US

Columns = dict[str, Sequence[Any]]


class IncarnationRow(NamedTuple):
    """An incarnation's row id, and the offset from its boot time to UTC."""

    id: int
    offset_us: int


_TABLES = {kind: table for table in projections() for kind in kinds_of(table)}
TABLES = (*dict.fromkeys(_TABLES.values()), event_traces)
_SOURCES = {kind: tuple(column.source for column in table.info["row"].columns) for kind, table in _TABLES.items()}
_IN_UTC = {  # columns of moments that a leaf has on its incarnation's clock alone
    kind: [
        (name, boot) for name in sources if (boot := boot_key(name)) in LEAF_KEYS[kind] and name not in LEAF_KEYS[kind]
    ]
    for kind, sources in _SOURCES.items()
}


class LifeChange(NamedTuple):
    """One leaf's change to the row of a process (rule 6)."""

    life: IncarnationRow
    values: dict[str, Any]
    worker: str  # whose process the leaf says it is
    is_own: bool  # the process says so itself

    def renames(self, worker: str) -> bool:
        """Return whether the leaf moves a process from this worker to another (rule 7)."""
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
    """Return the rows of a window of leaves: by table, pieces of columns in the order of the table's own.

    `logs` and `idx` say where each leaf is; `life_of` gives a process of the ledger by its uuid. `tables`: no others.
    """
    by_table: dict[Table, list[Sequence[Sequence[Any]]]] = {}
    for group in batch.groups:
        for table, places, columns in _of_group(batch, group, life_of):
            if tables is None or table in tables:
                place = [[values[each] for each in places] for values in (logs, idx)]
                by_table.setdefault(table, []).append([*place, *columns])
    return by_table


def rows_of(columns: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Return rows from columns."""
    return zip(*columns, strict=True)


def life_changes(batch: LeafBatch, life_of: Callable[[str], IncarnationRow]) -> list[LifeChange]:
    """Return the leaves' changes to the rows of processes, in the order of the leaves."""
    placed: list[tuple[int, LifeChange]] = []
    for group in batch.groups:
        if group.kind in _LIFE:
            lives = _lives(batch, group, life_of)
            is_own = group.kind in OWN_LIFE
            for number, (place, life) in enumerate(zip(group.places, lives, strict=True)):
                worker = group.columns["worker"][number]
                placed.append((place, LifeChange(life, _life_values(group, number), worker, is_own)))
    return [change for _, change in sorted(placed, key=lambda each: each[0])]


def _life_values(group: LeafGroup, number: int) -> dict[str, Any]:
    at_us = group.columns["at_us"][number]
    if group.kind == "observation-started":
        return {}
    if group.kind == "worker-started":
        return {key: group.columns[key][number] for key in _MEMORY} | {"started_us": at_us}
    if group.kind == "worker-returned":
        return {"ended_us": None, "end": None}
    return {"ended_us": at_us, "end": group.kind.removeprefix("worker-")}


def _lives(batch: LeafBatch, group: LeafGroup, life_of: Callable[[str], IncarnationRow]) -> list[IncarnationRow]:
    """Return the process that each leaf of a group concerns: the one it names, else its recorder."""
    recorders = [batch.incarnations[place] for place in group.places]
    named = group.columns.get("of_incarnation", recorders)
    about = [of or recorder for of, recorder in zip(named, recorders, strict=True)]
    lives = {uuid: life_of(uuid) for uuid in set(about)}
    return [lives[uuid] for uuid in about]


def _of_group(batch: LeafBatch, group: LeafGroup, life_of: Callable[[str], IncarnationRow]) -> Iterator[_Rows]:
    table = _TABLES.get(group.kind)
    if table is not None:
        yield _of_kind(table, group, _lives(batch, group, life_of), batch.at_us)
    if TRACE in group.columns:
        traces = group.columns[TRACE]
        kept = [list(compress(column, traces)) for column in (group.places, traces, group.columns["at_us"])]
        yield event_traces, kept[0], kept[1:]


def _of_kind(table: Table, group: LeafGroup, lives: Sequence[IncarnationRow], leaves_us: Sequence[int]) -> _Rows:
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
            min(low, other) if blocks and more else low if blocks else other for blocks, low, _, more, other, _ in both
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
        verified if part == 1 else 0 for verified, part in zip(columns["verified"], columns["part"], strict=True)
    ]


def _decision(columns: Columns, group: LeafGroup) -> None:
    columns["_rule"] = [reasons[0] if reasons else "default-deny" for reasons in columns["reasons"]]


def _copies(columns: Columns, group: LeafGroup) -> None:
    numbers, count = columns["numbers"], len(group.places)
    columns["_step"] = [group.kind] * count
    columns["_cause"] = columns.get("cause", [""] * count)
    columns["_erasure"] = columns.get("erasure", [""] * count)
    columns["_copies"], columns["_numbers"] = list(map(len, numbers)), list(map(sum, numbers))
    columns["_blocks"], columns["_bytes"] = (list(map(sum, columns[name])) for name in ("blocks_each", "bytes_each"))
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


LEAVES, EVENTS, DENIED = "leaves", "events", "denied"
ATTACHED, WRITTEN, BLOCKS, BYTES = "attached_blocks", "written_blocks", "blocks", "bytes"
ASSIGNED, GIVEN = "assigned_blocks", "given_blocks"  # whose custody is not the tenant's that was handed them
CARRIED = (
    "retention-purged",
    "carried_blocks",
    "",
    "",
    "",
)  # what dropped leaves left in custody, of no hour
ENDED = "custody-ended"
CUSTODY_KINDS = (  # hand-outs, whose they are, and ends
    *("residency-opened", "residency-released", "blocks-attached", "blocks-released"),
    *(ENDED, "blocks-assigned"),
)
COPIES = "copies"
COPY_KINDS = ("copies-stored", "copies-ended", "copies-destroyed")
MONITORED = "request-monitored"
MONITORED_TOKENS = tuple(RequestMonitored.figures.sums)
FAILED = "failed"  # in place of a level: a receipt that proves nothing
ASSIGNMENT, HIT_COUNTERS = "blocks-assigned", "hit-counters"
ORPHANS: Final = "orphan-found"


class FigureName(NamedTuple):
    """The name of a figure's value (`schema.counters`)."""

    hour_us: int
    kind: str
    measure: str
    outcome: str = ""
    detail: str = ""
    classification: str = ""


HourFigure = tuple[str, str, str, str, str]
"""A `FigureName` without its hour: kind, measure, outcome, detail and classification."""
Place = tuple[bool, int, int]
"""Whether every scrape reads the figures that stand there, the log, the hour."""


class Figures(dict[Place, dict[HourFigure, int]]):
    """Sums of leaves; a place exists once it is asked for."""

    def __missing__(self, place: Place) -> dict[HourFigure, int]:
        made = self[place] = {}
        return made


OUTCOMES = {SCHEMAS[kind].name: kind.figures.by for kind in KINDS if kind.figures.by}
_SUMS = {SCHEMAS[kind].name: kind.figures.sums for kind in KINDS if kind.figures.sums}
COUNTED_KEYS = frozenset(
    {
        *("at_us", "part", "classification", "log", "reader", "tenant", "requests", "blocks", "tokens", "rule"),
        *("reasons", "owner", "revision", "level", "result", "bytes", "own", "tier", "numbers", "of_incarnation"),
        *("blocks_each", "bytes_each", *OUTCOMES.values(), *(key for sums in _SUMS.values() for key in sums.values())),
    }
)  # fmt: skip
"""The keys of leaves that figures are made of."""
DEFAULT_DENY = "default-deny"  # denied, and no rule says so
ASKING = {SCHEMAS[kind].name: kind.acting for kind in (DecisionRecorded, HitCounters)}
_RUNS = "runs"


def held_blocks(figures: Mapping[tuple[str, str], int]) -> int:
    """Return the blocks in a tenant's custody from its log's sums by kind and measure."""
    signs = {WRITTEN: 1, ASSIGNED: 1, GIVEN: -1, CARRIED[1]: 1}
    return sum(
        -value if (kind, measure) == (ENDED, BLOCKS) else signs.get(measure, 0) * value
        for (kind, measure), value in figures.items()
    )


def custody_of(figures: Mapping[HourFigure, int]) -> int:
    """Return the blocks in custody from some figures of a log."""
    sums = Counter[tuple[str, str]]()
    for (kind, measure, *_), value in figures.items():
        sums[kind, measure] += value
    return held_blocks(sums)


def is_scraped(kind: str, measure: str) -> bool:
    """Return whether every scrape reads such a figure, summed over all tenants."""
    return measure == DENIED or kind == ORPHANS


def count_events(
    batch: LeafBatch, logs: Sequence[int], into: Figures | None = None, *, width_us: int = HOUR_US
) -> Figures:
    """Return the figures of a batch, given the log id of every leaf, added to `into` if given; no value is 0.

    `width_us`: how long a place's period is, an hour where the figures are kept in the ledger.
    """
    figures = Figures() if into is None else into
    names = {kind: (kind, LEAVES, "", "", "") for kind in set(batch.kinds)}
    scraped = map(ORPHANS.__eq__, batch.kinds)
    cells = map(figures.__getitem__, zip(scraped, logs, _starts(batch.at_us, width_us), strict=True))
    for cell, kind in zip(cells, batch.kinds, strict=True):
        name = names[kind]
        cell[name] = cell.get(name, 0) + 1
    for group in batch.groups:
        if group.kind != CHANGED:
            _count_group(figures, group, [logs[place] for place in group.places], width_us)
    return figures


class _Alike(NamedTuple):
    """Leaves by log, hour, outcome and classification: which of these each leaf is of, and for each where it stands."""

    which: list[int]
    cells: list[dict[HourFigure, int]]
    who: list[tuple[str, str]]

    def add(self, kind: str, measure: str, values: Iterable[int]) -> None:
        """Add up the values of leaves."""
        totals = [0] * len(self.cells)
        for at, value in zip(self.which, values, strict=False):
            totals[at] += value
        for cell, (of, classified), total in zip(self.cells, self.who, totals, strict=True):
            if total:
                name = (kind, measure, of, "", classified)
                cell[name] = cell.get(name, 0) + total


def _alike(
    figures: Figures,
    scraped: bool,
    logs: Sequence[int],
    hours: Sequence[int],
    named: Sequence[str],
    classes: Sequence[str],
) -> _Alike:
    numbers: dict[tuple[int, int, str, str], int] = {}
    each = zip(logs, hours, named, classes, strict=True)
    which = [numbers.setdefault(key, len(numbers)) for key in each]
    cells = [figures[scraped, log, hour] for log, hour, _, _ in numbers]
    return _Alike(which, cells, [key[2:] for key in numbers])


def _starts(at_us: Sequence[int], width_us: int) -> list[int]:
    first = at_us[0] // width_us * width_us
    if first <= min(at_us) and max(at_us) < first + width_us:  # the rule
        return [first] * len(at_us)
    return [moment // width_us * width_us for moment in at_us]


def _count_group(figures: Figures, group: LeafGroup, logs: Sequence[int], width_us: int) -> None:
    columns, kind = group.columns, group.kind
    hours, parts = _starts(columns["at_us"], width_us), columns["part"]
    nothing = [""] * len(logs)
    classes = columns.get("classification", nothing)
    named = columns[OUTCOMES[kind]] if kind in OUTCOMES else nothing
    alike = _alike(figures, kind == ORPHANS, logs, hours, named, classes)
    alike.add(kind, EVENTS, repeat(1) if max(parts) == 1 else (part == 1 for part in parts))
    if kind in ASKING:
        _count_requests(figures, group, alike, zip(logs, hours, strict=True))
    elif kind == ASSIGNMENT:
        _count_assigned(group, alike)
    elif kind in COPY_KINDS:
        _count_copies(group, alike)
    elif kind == "receipt":
        levels = [
            level if result == "ok" else FAILED
            for level, result in zip(columns["level"], columns["result"], strict=True)
        ]
        proved = _alike(figures, False, logs, hours, levels, classes)
        proved.add(kind, BLOCKS, group.extents[_RUNS].blocks)
        sizes = zip(columns["bytes"], parts, strict=True)
        proved.add(kind, BYTES, [size if part == 1 else 0 for size, part in sizes])
    elif kind == "blocks-released":
        sizes = zip(group.extents[_RUNS].blocks, columns["own"], strict=True)
        alike.add(kind, WRITTEN, [blocks if own else 0 for blocks, own in sizes])
    else:
        for measure, key in _SUMS.get(kind, {}).items():
            alike.add(kind, measure, group.extents[key].blocks if key in group.extents else columns[key])


def _count_requests(figures: Figures, group: LeafGroup, alike: _Alike, logs: Iterable[tuple[int, int]]) -> None:
    """Reuse that was decided: what hit, and what was denied by which rule, of whose blocks, under which revision."""
    columns, kind = group.columns, group.kind
    pairs = zip(columns["log"], columns[ASKING[kind]], strict=True)
    acting = [log == log_of(tenant) for log, tenant in pairs]
    requests = columns.get("requests", [1] * len(acting))
    if kind == HIT_COUNTERS:
        rules: Iterable[str] = columns["rule"]
        for measure in ("requests", "blocks", "tokens"):
            own = [value if counts else 0 for value, counts in zip(columns[measure], acting, strict=True)]
            alike.add(kind, measure, own)
    else:
        rules = (reasons[0] if reasons else DEFAULT_DENY for reasons in columns["reasons"])
    each = zip(acting, logs, alike.which, rules, columns["owner"], columns["revision"], requests, strict=True)
    for counts, (log, hour), at, rule, owner, revision, number in each:
        effect, classification = alike.who[at]
        if counts and effect == "deny" and number:
            cell = figures[True, log, hour]
            name = (kind, DENIED, rule, f"{revision} {owner}", classification)
            cell[name] = cell.get(name, 0) + number


def _count_assigned(group: LeafGroup, alike: _Alike) -> None:
    """Blocks that one tenant was handed and another holds: each log has its own side."""
    columns, sizes = group.columns, group.extents[_RUNS].blocks
    for measure, party in ((ASSIGNED, "owner"), (GIVEN, "tenant")):
        logs = zip(sizes, columns["log"], columns[party], strict=True)
        alike.add(group.kind, measure, [blocks * (log == log_of(name)) for blocks, log, name in logs])


def _count_copies(group: LeafGroup, alike: _Alike) -> None:
    columns, kind = group.columns, group.kind
    sizes = {COPIES: map(len, columns["numbers"])}
    sizes |= {measure: map(sum, columns[f"{measure}_each"]) for measure in (BLOCKS, BYTES)}
    for measure, values in sizes.items():
        own = map(any, columns["numbers"])  # not what an earlier process left
        each = zip(alike.which, columns["tier"], values, own, strict=True)
        for at, tier, value, counts in each:
            if value and counts:
                outcome, classification = alike.who[at]
                name, cell = (kind, measure, outcome, tier, classification), alike.cells[at]
                cell[name] = cell.get(name, 0) + value
