"""A second opinion on rows: every table that follows from leaves, in plain Python, from the bytes of leaves alone.

Nothing is shared with the product: the standard library and `coverage_oracle` (examples/reperform), which has nothing
else either. It is slow, and meant to be read beside docs/concepts/ledger/overview.md.

    opinion = Opinion(Stored(log, idx, leaf) …)
    opinion.rows["custody_ends"]      # {(log, idx, item): {column: value}}
    opinion.folds["incarnations"]     # {uuid: {column: value}}
    opinion.sums                      # {(log, hour, kind, measure, outcome, detail, classification): value}

1. *Rows* follow from one leaf. A process stands in them by its uuid, a log by its name.
2. *Folds* follow from leaves of several logs, in the order of the system log: processes, workers, tenants.
3. *Sums* are the figures of `counter_deltas` and `counters` together, by hour and log.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from coverage_oracle import items_of, listed

Body = dict[str, Any]
Row = dict[str, Any]
HOUR_US = 3_600_000_000
SYSTEM = "system"


class Stored(NamedTuple):
    """A leaf at its place."""

    log: str
    idx: int
    leaf: bytes


class Extent(NamedTuple):
    """How many blocks a list of runs has, and their lowest and highest generation."""

    blocks: int
    low: int
    high: int


def extent(runs: Iterable[list[Any]]) -> Extent:
    """Of no blocks (0, 0, -1). Blocks at generation 0 were never in custody, and stay at 0."""
    blocks, generations = 0, set[int]()
    for run in runs:
        if not isinstance(run[0], list) and isinstance(run[1], list) and not int(run[0]):
            blocks += sum(run[2]) if run[2] else len(run[1])
            generations.add(0)
            continue
        ones = [generation for (_, generation), _ in listed([run])]
        blocks += len(ones)
        generations.update(ones)
    return Extent(blocks, min(generations, default=0), max(generations, default=-1))


class Leaf(NamedTuple):
    """What a column is made of: the body of a leaf or of one of its items, and the leaf that holds it."""

    body: Body
    leaf_us: int
    offset_us: int  # of the process that the leaf is about

    def number(self, key: str) -> int:
        return int(self.body.get(key, 0))

    @property
    def size(self) -> Extent:
        return extent(self.body["runs"])

    @property
    def written(self) -> Extent:
        return extent(self.body.get("written", ()))

    @property
    def attached_or_written(self) -> Extent:
        both = [each for each in (self.size, self.written) if each.blocks]
        return Extent(
            sum(each.blocks for each in both),
            min((each.low for each in both), default=0),
            max((each.high for each in both), default=-1),
        )


Column = Callable[[Leaf], Any]


def _share_of_bytes(leaf: Leaf) -> int:
    """The bytes of a receipt are of all its parts, evenly over their blocks."""
    every = leaf.number("blocks")
    return leaf.number("bytes") * leaf.size.blocks // every if every else 0


def _about(body: Body) -> str:
    return str(body.get("of_incarnation") or body["incarnation"])


_EXTENT: dict[str, Column] = {
    "blocks": lambda leaf: leaf.size.blocks,
    "low": lambda leaf: leaf.size.low,
    "high": lambda leaf: leaf.size.high,
}
_PROCESS: dict[str, Column] = {"incarnation": lambda leaf: _about(leaf.body)}


def _numbers(*names: str) -> dict[str, Column]:
    """Numbers that a leaf may have as text, for they are large."""

    def number(name: str) -> Column:
        return lambda leaf: leaf.number(name)

    return {name: number(name) for name in names}


_COPIES: dict[str, Column] = {
    "step": lambda leaf: leaf.body["kind"],
    "cause": lambda leaf: leaf.body.get("cause", ""),
    "erasure": lambda leaf: leaf.body.get("erasure", ""),
    "copies": lambda leaf: len(leaf.body["numbers"]),
    "numbers": lambda leaf: sum(leaf.body["numbers"]),
    "blocks": lambda leaf: sum(leaf.body["blocks_each"]),
    "bytes": lambda leaf: sum(leaf.body["bytes_each"]),
    "low": lambda leaf: min(leaf.body["numbers"], default=0),
    "high": lambda leaf: max(leaf.body["numbers"], default=0),
}
_RELEASE: dict[str, Column] = {
    "released_us": lambda leaf: leaf.number("at_us"),
    "released_boot_us": lambda leaf: leaf.number("boot_us"),
    "at_us": lambda leaf: leaf.leaf_us,
    "low": _EXTENT["low"],
    "high": _EXTENT["high"],
    "final": lambda leaf: leaf.body["kind"] == "residency-released",
    "written": lambda leaf: leaf.body.get("own", True),
    "written_blocks": lambda leaf: leaf.size.blocks if leaf.body.get("own", True) else 0,
}


class Table(NamedTuple):
    """Kinds of leaves that a table has rows of, and its columns that are not simply the leaf's key of that name."""

    kinds: tuple[str, ...]
    plain: str
    derived: dict[str, Column] = {}  # noqa: RUF012 - a default that nobody writes to
    acting: str = ""  # of a leaf in two logs, the row is in that of this party


TABLES = {
    "policy_revisions": Table(("policy-activated",), "revision name profile digest actor previous at_us"),
    "residencies": Table(
        ("residency-opened",),
        "residency part tenant subject session asserted classification revision absolute_boot_us",
        _PROCESS
        | {
            "opened_us": lambda leaf: leaf.number("at_us"),
            "opened_boot_us": lambda leaf: leaf.number("boot_us"),
            "attached_blocks": lambda leaf: leaf.size.blocks,
            "written_blocks": lambda leaf: leaf.written.blocks,
            "low": lambda leaf: leaf.attached_or_written.low,
            "high": lambda leaf: leaf.attached_or_written.high,
        },
    ),
    "attachments": Table(
        ("blocks-attached",),
        "residency part tenant at_us",
        _PROCESS
        | {
            "attached_boot_us": lambda leaf: leaf.number("boot_us"),
            "attached_blocks": lambda leaf: leaf.size.blocks,
            "low": _EXTENT["low"],
            "high": _EXTENT["high"],
        },
    ),
    "releases": Table(
        ("residency-released", "blocks-released"),
        "residency part tenant cause hold_boot_us",
        _PROCESS | _RELEASE,
    ),
    "custody_ends": Table(
        ("custody-ended",),
        "tenant classification cause due_boot_us ended_boot_us retired_boot_us ceiling_boot_us scrub_within_us",
        _PROCESS
        | _EXTENT
        | {
            "due_us": lambda leaf: leaf.number("due_boot_us") + leaf.offset_us,
            "at_us": lambda leaf: leaf.leaf_us,
        },
    ),
    "receipts": Table(
        ("receipt",),
        "launch shard tenant method device started_boot_us ended_boot_us level share_ppm result",
        _PROCESS
        | _EXTENT
        | {
            "bytes": _share_of_bytes,
            "verified": lambda leaf: leaf.number("verified") if leaf.body["part"] == 1 else 0,
            "at_us": lambda leaf: leaf.leaf_us,
        },
    ),
    "decisions": Table(
        ("decision",),
        "action effect reader owner classification revision via at_us",
        {"rule": lambda leaf: leaf.body["reasons"][0] if leaf.body["reasons"] else "default-deny"},
        acting="reader",
    ),
    "hit_counters": Table(
        ("hit-counters",),
        "tenant owner action effect rule revision from_us at_us requests blocks tokens",
        {"from_us": lambda leaf: leaf.number("from_boot_us") + leaf.offset_us},
        acting="tenant",
    ),
    "erasures": Table(
        ("erasure-requested",),
        "erasure tenant selector subject session actor at_us deadline_boot_us detail",
        _PROCESS | {"at_boot_us": lambda leaf: leaf.number("boot_us")},
    ),
    "erasure_results": Table(
        ("erasure-completed",), "erasure outcome residencies blocks remaining reason at_us", _PROCESS
    ),
    "erasure_effects": Table(
        ("erasure-applied",), "erasure part requests finishing residencies at_us", _PROCESS | _EXTENT
    ),
    "erasure_remains": Table(("erasure-remaining",), "erasure part reason at_us", _PROCESS | _EXTENT),
    "erasure_rereads": Table(("erasure-reread",), "erasure checked changed nonzero at_us", _PROCESS),
    "epoch_raises": Table(("epoch-raised",), "erasure tenant scope number at_us"),
    "epochs_taken": Table(("epochs-taken",), "door version digest at_us", _PROCESS),
    "routes_sent": Table(
        ("route-sent",),
        "tenant receipt scope fleet_epoch tenant_epoch scope_epoch worker target status answer_ms requests uses "
        "promised_tokens score at_us",
        _PROCESS | _numbers("fleet_epoch", "tenant_epoch", "scope_epoch", "uses", "promised_tokens"),
    ),
    "routes_found": Table(
        ("route-found",),
        "tenant receipt asked prompt_tokens found_tokens queue free_blocks crosses agrees model at_us",
        _PROCESS | _numbers("prompt_tokens", "found_tokens", "free_blocks"),
    ),
    "orphan_scans": Table(
        ("orphan-scanned",),
        "scan mode started_boot_us ended_boot_us residencies blocks findings at_us",
        _PROCESS,
    ),
    "orphan_findings": Table(
        ("orphan-found",),
        "scan finding orphan cause tenant residency age_us action outcome at_us",
        _PROCESS | {"blocks": _EXTENT["blocks"]},
    ),
    "outages": Table(
        ("spill-started", "replay-completed", "gap", "withdrawn"),
        "kind at_us",
        _PROCESS
        | {
            "cause": lambda leaf: "refused" if leaf.body["kind"] == "withdrawn" else leaf.body.get("cause", ""),
            "first_sequence": lambda leaf: int(leaf.body.get("of_sequence", leaf.body.get("first_sequence", 0))),
            "last_sequence": lambda leaf: int(leaf.body.get("of_sequence", leaf.body.get("last_sequence", 0))),
            "added": lambda leaf: leaf.number("added"),
            "duplicates": lambda leaf: leaf.number("duplicates"),
        },
    ),
    "copy_steps": Table(
        ("copies-stored", "copies-ended", "copies-destroyed"),
        "tier tenant classification at_us",
        _PROCESS | _COPIES,
    ),
    "transfer_decisions": Table(
        ("transfer-decided",),
        "action tier tenant residency blocks bytes transfer_us recompute_us choice outcome actual_us reason at_us",
        _PROCESS
        | {
            "part_blocks": lambda leaf: leaf.number("part_blocks"),
            "latency_class": lambda leaf: leaf.body.get("latency_class", ""),
        },
    ),
    "cases": Table(
        ("case-opened",),
        "case_id tenant subject subject_right channel zone actor at_us",
        {
            "received_us": lambda leaf: leaf.number("received_utc"),
            "holidays": lambda leaf: " ".join(leaf.body["holidays"]),
            "ends": lambda leaf: " ".join(leaf.body.get("ends", ())) or None,
        },
    ),
    "case_steps": Table(("case-step",), "case_id step outcome ground about reason digest actor at_us"),
    "retention_purges": Table(("retention-purged",), "of_log first below size digest actor approver reason at_us"),
    "legal_holds": Table(("legal-hold",), "hold tenant action reason actor at_us subject"),
}
_NUMBERS = frozenset((  # columns of numbers, which a leaf has as decimal strings where they are large
    "absolute_boot_us", "actual_us", "age_us", "at_us", "below", "blocks", "bytes", "ceiling_boot_us",
    "changed", "checked", "deadline_boot_us", "due_boot_us", "ended_boot_us", "finding", "findings",
    "finishing", "first", "fleet_epoch", "found_tokens", "free_blocks", "hold_boot_us", "launch", "nonzero", "part",
    "previous", "promised_tokens", "prompt_tokens", "queue", "recompute_us", "remaining",
    "requests", "residencies", "residency", "retired_boot_us", "revision", "scan", "scope_epoch", "scrub_within_us",
    "sequence", "share_ppm", "shard", "size", "started_boot_us", "tenant_epoch", "tokens", "transfer_us", "uses",
))  # fmt: skip


class Opinion:
    """What every table should hold, of these leaves."""

    def __init__(self, leaves: Iterable[Stored]) -> None:
        self.leaves = [(stored, json.loads(stored.leaf)) for stored in leaves]
        self.offsets: dict[str, int] = {}
        for _, body in self.leaves:
            self.offsets.setdefault(body["incarnation"], int(body["at_us"]) - int(body["boot_us"]))
        self.rows: dict[str, dict[tuple[Any, ...], Row]] = defaultdict(dict)
        self.sums: Counter[tuple[Any, ...]] = Counter()
        for stored, body in self.leaves:
            self._place(stored, body)
            self._count(stored.log, body)
        self.sums = Counter({name: value for name, value in self.sums.items() if value})
        self.folds = {"incarnations": self._lives(), "workers": {}, "tenants": self._tenants()}
        self.folds["workers"] = {life["worker"]: {} for life in self.folds["incarnations"].values()}

    def _place(self, stored: Stored, body: Body) -> None:
        key = (stored.log, stored.idx)
        self.rows["events"][key] = {
            **{name: body[name] for name in ("incarnation", "kind", "outage")},
            **{name: int(body[name]) for name in ("sequence", "part", "parts", "at_us")},
            "leaf": stored.leaf,
        }
        if body.get("trace"):
            self.rows["event_traces"][key] = {"trace": body["trace"], "at_us": int(body["at_us"])}
        is_list = body["kind"] == "custody-changed"
        for number, item in enumerate(items_of(body), 1):
            for name, table in TABLES.items():
                if item["kind"] in table.kinds and self._is_here(stored.log, item, table):
                    leaf = Leaf(item, int(body["at_us"]), self.offsets.get(_about(item), 0))
                    has_items = name in ("releases", "custody_ends", "receipts")
                    place = (*key, number if is_list else 0) if has_items else key
                    self.rows[name][place] = self._row(leaf, table)

    @staticmethod
    def _is_here(log: str, body: Body, table: Table) -> bool:
        return not table.acting or log == f"tenant/{body[table.acting]}"

    @staticmethod
    def _row(leaf: Leaf, table: Table) -> Row:
        plain = {name: _plain(leaf.body.get(name), name) for name in table.plain.split()}
        return plain | {name: column(leaf) for name, column in table.derived.items()}

    def _lives(self) -> dict[str, Row]:
        """Each process as the leaves about it say, in the order of the system log."""
        lives: dict[str, Row] = {}
        for _, body in self.leaves:
            uuid = body["incarnation"]
            if uuid not in lives:
                lives[uuid] = {
                    "worker": "unknown",
                    "offset_us": self.offsets[uuid],
                    "ended_us": None,
                    "end": None,
                }
                lives[uuid] |= dict.fromkeys(("shards", "blocks", "bytes_per_block", "device", "software"))
        system = [body for stored, body in self.leaves if stored.log == SYSTEM]
        for body in system:
            life = lives.get(_about(body))
            if life is None:
                continue
            own = body["kind"] in ("worker-started", "worker-stopped", "observation-started")
            others = body["kind"] in ("worker-died", "worker-returned") and life["worker"] == "unknown"
            if own or others:
                life["worker"] = body["worker"]
            if body["kind"] == "worker-started":
                life |= {name: body[name] for name in ("device", "software")}
                life |= {name: int(body[name]) for name in ("shards", "blocks", "bytes_per_block")}
            elif body["kind"] in ("worker-stopped", "worker-died"):
                life |= {"end": body["kind"].removeprefix("worker-"), "ended_us": int(body["at_us"])}
            elif body["kind"] == "worker-returned":
                life |= {"end": None, "ended_us": None}
        return lives

    def _tenants(self) -> dict[str, Row]:
        """A log for each tenant that has leaves, or had some that a purge dropped."""
        logs = dict.fromkeys(stored.log for stored, _ in self.leaves if stored.log != SYSTEM)
        logs |= dict.fromkeys(body["of_log"] for _, body in self.leaves if body["kind"] == "retention-purged")
        return {log.removeprefix("tenant/"): {"log": log} for log in logs}

    # -- sums -----------------------------------------------------------------------------------------------------

    def _count(self, log: str, body: Body) -> None:
        hour = int(body["at_us"]) // HOUR_US * HOUR_US
        self.sums[log, hour, body["kind"], "leaves", "", "", ""] += 1
        for item in items_of(body):
            if item["kind"] == "custody-changed":
                continue
            hour = int(item["at_us"]) // HOUR_US * HOUR_US
            outcome, classification = _outcome(item), item.get("classification", "")
            if item["part"] == 1:
                self.sums[log, hour, item["kind"], "events", outcome, "", classification] += 1
            for measure, value, of, detail in _sizes(log, item):
                name = of if of is not None else outcome
                self.sums[log, hour, item["kind"], measure, name, detail, classification] += value


def _plain(value: Any, name: str) -> Any:
    """A value of a leaf; large numbers are decimal strings there."""
    return int(value) if name in _NUMBERS and value is not None else value


_OUTCOMES = {
    "decision": "effect",
    "hit-counters": "effect",
    "request-monitored": "effect",
    "residency-released": "cause",
    "blocks-released": "cause",
    "custody-ended": "cause",
    "erasure-requested": "selector",
    "erasure-completed": "outcome",
    "case-opened": "subject_right",
    "case-step": "step",
    "processing-restricted": "change",
    "copies-ended": "cause",
    "copies-destroyed": "cause",
    "receipt": "result",
    "transfer-decided": "choice",
    "orphan-found": "orphan",
    "observed-removed": "cause",
}


def _outcome(body: Body) -> str:
    return str(body[_OUTCOMES[body["kind"]]]) if body["kind"] in _OUTCOMES else ""


def _sizes(log: str, body: Body) -> Iterator[tuple[str, int, str | None, str]]:
    """Measure, value, outcome (None: the event's) and detail of what an event adds beside being one."""
    kind = body["kind"]
    if kind in ("decision", "hit-counters"):
        yield from _requests(log, body)
    elif kind == "blocks-assigned":
        blocks = extent(body["runs"]).blocks
        yield "assigned_blocks", blocks if log == f"tenant/{body['owner']}" else 0, None, ""
        yield "given_blocks", blocks if log == f"tenant/{body['tenant']}" else 0, None, ""
    elif kind in ("copies-stored", "copies-ended", "copies-destroyed"):
        if any(body["numbers"]):
            yield "copies", len(body["numbers"]), None, body["tier"]
            yield "blocks", sum(body["blocks_each"]), None, body["tier"]
            yield "bytes", sum(body["bytes_each"]), None, body["tier"]
    elif kind == "receipt":
        level = body["level"] if body["result"] == "ok" else "failed"
        yield "blocks", extent(body["runs"]).blocks, level, ""
        yield "bytes", int(body["bytes"]) if body["part"] == 1 else 0, level, ""
    elif kind == "residency-opened":
        yield "attached_blocks", extent(body["runs"]).blocks, None, ""
        yield "written_blocks", extent(body.get("written", ())).blocks, None, ""
    elif kind == "blocks-attached":
        yield "attached_blocks", extent(body["runs"]).blocks, None, ""
    elif kind == "residency-released" or (kind == "blocks-released" and body["own"]):
        yield "written_blocks", extent(body["runs"]).blocks, None, ""
    elif kind == "custody-ended":
        yield "blocks", extent(body["runs"]).blocks, None, ""
    elif kind == "request-monitored":
        for name in ("prompt_tokens", "reused_tokens", "refused_tokens", "forecast_tokens"):
            yield name, int(body[name]), None, ""


def _requests(log: str, body: Body) -> Iterator[tuple[str, int, str | None, str]]:
    is_decision = body["kind"] == "decision"
    if log != f"tenant/{body['reader' if is_decision else 'tenant']}":
        return
    if not is_decision:
        for name in ("requests", "blocks", "tokens"):
            yield name, int(body[name]), None, ""
    rule = body["rule"] if not is_decision else body["reasons"][0] if body["reasons"] else "default-deny"
    if body["effect"] == "deny":
        number = 1 if is_decision else int(body["requests"])
        yield "denied", number, rule, f"{int(body['revision'])} {body['owner']}"
