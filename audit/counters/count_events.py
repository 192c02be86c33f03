"""What leaves add up to: figures by log and hour, a function of the leaves alone.

    found = count_events(batch, logs)       # {(log, FigureName): value}

1. The hour is that of the leaf's `at_us`, or of the item's where a leaf is a list.
2. `leaves` counts leaves, parts too, by their own kind; `events` counts events, and items of lists, by theirs.
3. Sizes are added up over parts, each with what is in it. What is written in two logs counts as an event in both, and
   with its requests, blocks and denials in the log of who acted, as its rows do (`projection`, rule 3).
4. Copies off the device are counted by tier (`detail`).
5. A cause, outcome, level or rule has a figure of its own; a person, a session, an engine or free text has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from kvcustody.audit.events import log_of
from kvcustody.audit.events.batch import LeafBatch, LeafGroup
from kvcustody.audit.events.change_items import CHANGED
from kvcustody.times import HOUR_US

LEAVES, EVENTS, DENIED = "leaves", "events", "denied"
ATTACHED, WRITTEN, BLOCKS, BYTES = "attached_blocks", "written_blocks", "blocks", "bytes"
COPIES = "copies"
COPY_KINDS = ("copies-stored", "copies-ended", "copies-destroyed")
MONITORED = "request-monitored"
MONITORED_TOKENS = ("prompt_tokens", "reused_tokens", "refused_tokens", "forecast_tokens")
FAILED = "failed"  # in place of a level: a receipt that proves nothing


class FigureName(NamedTuple):
    """What a value is of (`schema.counters`)."""

    hour_us: int
    kind: str
    measure: str
    outcome: str = ""
    detail: str = ""
    classification: str = ""


Figure = tuple[
    int, str, str, str, str, str
]  # a `FigureName`, and equal to one; made for every tenant of a batch
Figures = Counter[tuple[int, Figure]]
_Who = tuple[int, int, str, str]  # log, hour, outcome, classification

OUTCOMES = {
    **dict.fromkeys(("decision", "hit-counters", MONITORED), "effect"),
    **dict.fromkeys(("residency-released", "blocks-released", "custody-ended"), "cause"),
    **dict.fromkeys(("erasure-requested",), "selector"),
    **dict.fromkeys(("erasure-completed",), "outcome"),
    "case-opened": "subject_right",
    "case-step": "step",
    **dict.fromkeys(COPY_KINDS[1:], "cause"),
    "receipt": "result",
    "transfer-decided": "choice",
    "orphan-found": "orphan",
    "observed-removed": "cause",
}
_ACTING = {"decision": "reader", "hit-counters": "tenant"}
_RUNS = "runs"


def count_events(batch: LeafBatch, logs: Sequence[int]) -> Figures:
    """The figures of a batch, given the log id of every leaf; those of value 0 are left out."""
    found: Figures = Counter()
    for (log, hour, kind), leaves in Counter(
        zip(logs, _hours(batch.at_us), batch.kinds, strict=True)
    ).items():
        found[log, (hour, kind, LEAVES, "", "", "")] += leaves
    for group in batch.groups:
        if group.kind != CHANGED:
            _count_group(found, group, [logs[place] for place in group.places])
    return found


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
    who = list(zip(logs, hours, named, classes, strict=True))
    first = who if max(parts) == 1 else compress(who, [part == 1 for part in parts])
    for (log, hour, outcome, classification), events in Counter(first).items():
        found[log, (hour, kind, EVENTS, outcome, "", classification)] += events
    if kind in _ACTING:
        _count_requests(found, group, who)
    elif kind in COPY_KINDS:
        _count_copies(found, group, who)
    elif kind == "receipt":
        levels = [
            level if result == "ok" else FAILED
            for level, result in zip(columns["level"], columns["result"], strict=True)
        ]
        proved = list(zip(logs, hours, levels, classes, strict=True))
        _add(found, kind, BLOCKS, proved, group.extents[_RUNS].blocks)
        sizes = zip(columns["bytes"], parts, strict=True)
        _add(found, kind, BYTES, proved, [size if part == 1 else 0 for size, part in sizes])
    elif kind in _SIZES:
        for measure, values in _SIZES[kind](group).items():
            _add(found, kind, measure, who, values)


def _count_requests(found: Figures, group: LeafGroup, who: Sequence[_Who]) -> None:
    """Reuse that was decided: what hit, and what was denied by which rule, of whose blocks, under which revision."""
    columns, kind = group.columns, group.kind
    pairs = zip(columns["log"], columns[_ACTING[kind]], strict=True)
    acting = [log == log_of(tenant) for log, tenant in pairs]
    requests = columns.get("requests", [1] * len(acting))
    if kind == "hit-counters":
        rules: Iterable[str] = columns["rule"]
        for measure in ("requests", "blocks", "tokens"):
            _add(found, kind, measure, list(compress(who, acting)), list(compress(columns[measure], acting)))
    else:
        rules = (reasons[0] if reasons else "default-deny" for reasons in columns["reasons"])
    each = zip(acting, who, rules, columns["owner"], columns["revision"], requests, strict=True)
    for counts, (log, hour, effect, classification), rule, owner, revision, number in each:
        if counts and effect == "deny":
            found[log, (hour, kind, DENIED, rule, f"{revision} {owner}", classification)] += number


def _count_copies(found: Figures, group: LeafGroup, who: Sequence[_Who]) -> None:
    columns, kind = group.columns, group.kind
    sizes = {COPIES: map(len, columns["numbers"])}
    sizes |= {measure: map(sum, columns[f"{measure}_each"]) for measure in (BLOCKS, BYTES)}
    for measure, values in sizes.items():
        own = map(any, columns["numbers"])  # not what an earlier process left
        each = zip(who, columns["tier"], values, own, strict=True)
        for (log, hour, outcome, classification), tier, value, counts in each:
            if value and counts:
                found[log, (hour, kind, measure, outcome, tier, classification)] += value


def _add(found: Figures, kind: str, measure: str, who: Sequence[_Who], values: Sequence[int]) -> None:
    sums: dict[_Who, int] = {}
    for key, value in zip(who, values, strict=True):
        sums[key] = sums.get(key, 0) + value
    for (log, hour, outcome, classification), total in sums.items():
        if total:
            found[log, (hour, kind, measure, outcome, "", classification)] += total


def _opened(group: LeafGroup) -> Mapping[str, Sequence[int]]:
    return {ATTACHED: group.extents[_RUNS].blocks, WRITTEN: group.extents["written"].blocks}


def _of_own(group: LeafGroup) -> Mapping[str, Sequence[int]]:
    sizes = zip(group.extents[_RUNS].blocks, group.columns["own"], strict=True)
    return {WRITTEN: [blocks if own else 0 for blocks, own in sizes]}


_SIZES: dict[str, Callable[[LeafGroup], Mapping[str, Sequence[int]]]] = {
    "residency-opened": _opened,
    "blocks-attached": lambda group: {ATTACHED: group.extents[_RUNS].blocks},
    "residency-released": lambda group: {WRITTEN: group.extents[_RUNS].blocks},
    "blocks-released": _of_own,
    "custody-ended": lambda group: {BLOCKS: group.extents[_RUNS].blocks},
    MONITORED: lambda group: {name: group.columns[name] for name in MONITORED_TOKENS},
}
