"""What leaves add up to: figures by log and hour, a function of the leaves alone.

    found = count_events(batch, logs)       # {(scraped, log, hour): {(kind, measure, …): value}}

1. The hour is that of the leaf's `at_us`, or of the item's where a leaf is a list.
2. `leaves` counts leaves, parts too, by their own kind; `events` counts events, and items of lists, by theirs.
3. Sizes are added up over parts, each with what is in it. What is written in two logs counts as an event in both, and
   with its requests, blocks and denials in the log of who acted, as its rows do (`project`, rule 3).
4. Copies off the device are counted by tier (`detail`).
5. A cause, outcome, level or rule has a figure of its own; a person, a session, an engine or free text has none.
6. Figures stand by the row that they become (`schema.counters`, rule 3); a leaf of a fleet's is the only one of its
   tenant in a commit as a rule, so each is put there once and by plain loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from kvcustody.audit.kinds import log_of
from kvcustody.audit.kinds.control_events import DecisionRecorded
from kvcustody.audit.kinds.custody_events import RequestMonitored
from kvcustody.audit.kinds.ledger_events import HitCounters
from kvcustody.audit.kinds.registry import KINDS
from kvcustody.audit.leaf.batch import LeafBatch, LeafGroup
from kvcustody.audit.leaf.change_items import CHANGED
from kvcustody.audit.leaf.leaf_schema import SCHEMAS
from kvcustody.times import HOUR_US

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
    """What a value is of (`schema.counters`)."""

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
Figures = dict[Place, dict[HourFigure, int]]
_Cells = Sequence[dict[HourFigure, int]]  # of each leaf, where its figures stand
_Who = Sequence[tuple[str, str]]  # outcome and classification of each

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
    """What is in a tenant's custody by the sums of its log, given by kind and measure."""
    signs = {WRITTEN: 1, ASSIGNED: 1, GIVEN: -1, CARRIED[1]: 1}
    return sum(
        -value if (kind, measure) == (ENDED, BLOCKS) else signs.get(measure, 0) * value
        for (kind, measure), value in figures.items()
    )


def custody_of(figures: Mapping[HourFigure, int]) -> int:
    """The same for some figures of a log."""
    sums = Counter[tuple[str, str]]()
    for (kind, measure, *_), value in figures.items():
        sums[kind, measure] += value
    return held_blocks(sums)


def is_scraped(kind: str, measure: str) -> bool:
    """Whether every scrape reads such a figure, over all tenants."""
    return measure == DENIED or kind == ORPHANS


def count_events(batch: LeafBatch, logs: Sequence[int], into: Figures | None = None) -> Figures:
    """The figures of a batch, given the log id of every leaf, added to those there are; no value is 0."""
    found: Figures = {} if into is None else into
    names = {kind: (kind, LEAVES, "", "", "") for kind in set(batch.kinds)}
    for log, hour, kind in zip(logs, _hours(batch.at_us), batch.kinds, strict=True):
        cell, name = _cell(found, (kind == ORPHANS, log, hour)), names[kind]
        cell[name] = cell.get(name, 0) + 1
    for group in batch.groups:
        if group.kind != CHANGED:
            _count_group(found, group, [logs[place] for place in group.places])
    return found


def _cell(found: Figures, place: Place) -> dict[HourFigure, int]:
    cell = found.get(place)
    if cell is None:
        cell = found[place] = {}
    return cell


def _hours(at_us: Sequence[int]) -> list[int]:
    first = at_us[0] // HOUR_US * HOUR_US
    if first <= min(at_us) and max(at_us) < first + HOUR_US:  # the rule
        return [first] * len(at_us)
    return [moment // HOUR_US * HOUR_US for moment in at_us]


def _count_group(found: Figures, group: LeafGroup, logs: Sequence[int]) -> None:
    columns, kind = group.columns, group.kind
    hours, parts = _hours(columns["at_us"]), columns["part"]
    nothing = [""] * len(logs)
    classes = columns.get("classification", nothing)
    named = columns[OUTCOMES[kind]] if kind in OUTCOMES else nothing
    who = list(zip(named, classes, strict=True))
    places = zip(repeat(kind == ORPHANS), logs, hours, strict=False)
    cells = [_cell(found, place) for place in places]
    first = repeat(1) if max(parts) == 1 else (part == 1 for part in parts)
    _add(cells, kind, EVENTS, who, first)
    if kind in ASKING:
        _count_requests(found, group, cells, who, zip(logs, hours, strict=True))
    elif kind == ASSIGNMENT:
        _count_assigned(group, cells, who)
    elif kind in COPY_KINDS:
        _count_copies(group, cells, who)
    elif kind == "receipt":
        levels = [
            level if result == "ok" else FAILED
            for level, result in zip(columns["level"], columns["result"], strict=True)
        ]
        proved = list(zip(levels, classes, strict=True))
        _add(cells, kind, BLOCKS, proved, group.extents[_RUNS].blocks)
        sizes = zip(columns["bytes"], parts, strict=True)
        _add(cells, kind, BYTES, proved, [size if part == 1 else 0 for size, part in sizes])
    elif kind == "blocks-released":
        sizes = zip(group.extents[_RUNS].blocks, columns["own"], strict=True)
        _add(cells, kind, WRITTEN, who, [blocks if own else 0 for blocks, own in sizes])
    else:
        for measure, key in _SUMS.get(kind, {}).items():
            sums = group.extents[key].blocks if key in group.extents else columns[key]
            _add(cells, kind, measure, who, sums)


def _count_requests(
    found: Figures, group: LeafGroup, cells: _Cells, who: _Who, logs: Iterable[tuple[int, int]]
) -> None:
    """Reuse that was decided: what hit, and what was denied by which rule, of whose blocks, under which revision."""
    columns, kind = group.columns, group.kind
    pairs = zip(columns["log"], columns[ASKING[kind]], strict=True)
    acting = [log == log_of(tenant) for log, tenant in pairs]
    requests = columns.get("requests", [1] * len(acting))
    if kind == HIT_COUNTERS:
        rules: Iterable[str] = columns["rule"]
        for measure in ("requests", "blocks", "tokens"):
            own = [value if counts else 0 for value, counts in zip(columns[measure], acting, strict=True)]
            _add(cells, kind, measure, who, own)
    else:
        rules = (reasons[0] if reasons else DEFAULT_DENY for reasons in columns["reasons"])
    each = zip(acting, logs, who, rules, columns["owner"], columns["revision"], requests, strict=True)
    for counts, (log, hour), (effect, classification), rule, owner, revision, number in each:
        if counts and effect == "deny" and number:
            cell = _cell(found, (True, log, hour))
            name = (kind, DENIED, rule, f"{revision} {owner}", classification)
            cell[name] = cell.get(name, 0) + number


def _count_assigned(group: LeafGroup, cells: _Cells, who: _Who) -> None:
    """Blocks that one tenant was handed and another holds: each log has its own side."""
    columns, sizes = group.columns, group.extents[_RUNS].blocks
    for measure, party in ((ASSIGNED, "owner"), (GIVEN, "tenant")):
        logs = zip(sizes, columns["log"], columns[party], strict=True)
        _add(cells, group.kind, measure, who, [blocks * (log == log_of(name)) for blocks, log, name in logs])


def _count_copies(group: LeafGroup, cells: _Cells, who: _Who) -> None:
    columns, kind = group.columns, group.kind
    sizes = {COPIES: map(len, columns["numbers"])}
    sizes |= {measure: map(sum, columns[f"{measure}_each"]) for measure in (BLOCKS, BYTES)}
    for measure, values in sizes.items():
        own = map(any, columns["numbers"])  # not what an earlier process left
        each = zip(cells, who, columns["tier"], values, own, strict=True)
        for cell, (outcome, classification), tier, value, counts in each:
            if value and counts:
                name = (kind, measure, outcome, tier, classification)
                cell[name] = cell.get(name, 0) + value


def _add(cells: _Cells, kind: str, measure: str, who: _Who, values: Iterable[int]) -> None:
    names = {(of, classified): (kind, measure, of, "", classified) for of, classified in set(who)}
    for cell, of, value in zip(cells, who, values, strict=False):
        if value:
            name = names[of]
            cell[name] = cell.get(name, 0) + value
