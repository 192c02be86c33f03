"""Custody from the bytes of leaves only: of an export, a database, or a state of it.

1. No row of any table counts: a field is the leaf's own. Earlier leaves lack fields that were added since; anything
   else that a leaf lacks is an error.
2. A leaf counts for the incarnation that it is about (`of_incarnation`, else the one that wrote it). A successor's
   release is put on that one's clock by way of UTC.
3. `unaccounted` lists what no other leaf accounts for; none of it can be seen in one custody alone.
4. `idx` of a row is the number of its leaf among those that were given; a leaf has no place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import orjson

from kvcustody.audit.evidence.coverage.block_uses import (
    BlockUses,
    ErasureAsked,
    ErasureDueTimes,
    Flags,
    ReceiptCells,
    UseRows,
    cells_of,
    due_times_of,
    unit_keys_of,
    uses_of,
)
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, IncarnationLife
from kvcustody.audit.evidence.query.evidence_columns import (
    GENERATION_MASK,
    POOL_SHIFT,
    Assignments,
    Evidence,
    EvidenceBuilder,
    assignments_of,
    distinct,
    is_among,
)
from kvcustody.audit.evidence.query.narrowed_holds import NarrowingAct, ended_by_acts
from kvcustody.audit.kinds.block_runs import Int64s, encoded_blocks
from kvcustody.audit.leaf.change_items import CHANGED, plain_bodies
from kvcustody.errors import LedgerError

_AT_ONCE = 1_000  # leaves, whose fields a processor's cache holds
_EVERY = ("incarnation", "at_us", "boot_us")
Fields = tuple[Any, ...]


class Unaccounted(NamedTuple):
    """Residencies without an opening; generations that nothing lists as handed out; wiped custody without an end.

    A pool's generations come from one counter, so that each below the highest was handed out. Growth of residencies
    that are still open is not listed yet, and counts among the generations.
    """

    residencies: int = 0
    generations: int = 0
    receipts: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything is accounted for."""
        return not any(self)


class _Kind(NamedTuple):
    """How leaves of a kind become rows: which fields are picked, the columns made of them, and their lists of runs.

    A column is a field as it is, or what `derive` makes of the picked columns. `is_number` is for a column of numbers.
    """

    table: str
    fields: Sequence[str]
    columns: Mapping[str, bool]
    derive: Callable[[Mapping[str, Sequence[Any]], str], Mapping[str, Sequence[Any]]]
    lists: Sequence[str] = ("runs",)


def _numbers(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, True)


def _texts(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, False)


def _recorders(said: Mapping[str, Sequence[Any]], life: str) -> dict[str, Sequence[Any]]:
    return {"by_successor": [writer != life for writer in said["incarnation"]]}


_PLACE = _numbers("log", "idx")  # rule 4; only reports by rows cite places
_RELEASES = _PLACE | _numbers("residency", "released_us", "hold_boot_us", "final", "written", "part", "by_successor")
_KINDS = {
    "custody-ended": _Kind(
        "ends",
        ("tenant", "classification", "cause", "due_boot_us", "ended_boot_us", "retired_boot_us", "ceiling_boot_us",
         "scrub_within_us", "sequence", "part", "runs"),
        _PLACE | _texts("tenant", "classification", "cause") | _numbers(
            "due_boot_us", "ended_boot_us", "retired_boot_us", "ceiling_boot_us", "scrub_within_us", "sequence", "part",
            "by_successor"),
        _recorders,
    ),
    "residency-released": _Kind(
        "releases", ("residency", "hold_boot_us", "part", "tenant", "sequence", "runs"), _RELEASES,
        lambda said, life: {"released_us": said["at_us"], "final": _all(True, said), "written": _all(True, said),
                            **_recorders(said, life)},
    ),
    "blocks-released": _Kind(
        "releases", ("residency", "hold_boot_us", "part", "own", "runs"), _RELEASES,
        lambda said, life: {"released_us": said["at_us"], "final": _all(False, said), "written": said["own"],
                            **_recorders(said, life)},
    ),
    "residency-opened": _Kind(
        "residencies",
        ("residency", "part", "tenant", "classification", "subject", "session", "model", "runs", "written"),
        _PLACE | _numbers("residency", "part", "opened_boot_us") | _texts(
            "tenant", "classification", "subject", "session", "model"),
        lambda said, life: {"opened_boot_us": said["boot_us"]},
        ("runs", "written"),
    ),
    "blocks-attached": _Kind(
        "attachments", ("residency", "runs"), _PLACE | _numbers("residency", "attached_boot_us"),
        lambda said, life: {"attached_boot_us": said["boot_us"]},
    ),
    "receipt": _Kind(
        "receipts",
        ("shard", "started_boot_us", "ended_boot_us", "level", "verified", "part", "result", "bytes", "blocks", "runs"),
        _PLACE | _numbers("shard", "started_boot_us", "ended_boot_us", "bytes", "blocks", "verified") | _texts(
            "level", "result"),
        lambda said, life: _share_of_parts(said),
    ),
    "blocks-assigned": _Kind(
        "assignments", ("owner", "classification", "runs"), _PLACE | _texts("owner", "classification"),
        lambda said, life: {},
    ),
    "erasure-applied": _Kind(
        "effects", ("erasure", "runs"), _PLACE | _texts("erasure"), lambda said, life: {},
    ),
}  # fmt: skip
COPY_STEPS = ("copies-stored", "copies-ended", "copies-destroyed")
INHERITED = "tier-inherited"  # which process opened the tier that one before had left
_FEW = frozenset({"worker-started", "erasure-requested", "holds-narrowed"})  # bodies are kept whole


def _all(value: bool, said: Mapping[str, Sequence[Any]]) -> Any:
    return np.full(len(said["at_us"]), value)


def _share_of_parts(said: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Bytes are of all parts of a receipt together, and even over its blocks; what was read is the first part's."""
    here = [sum(map(encoded_blocks, runs)) for runs in said["runs"]]  # of another form: `decode_flat` refuses it
    each = zip(map(int, said["bytes"]), here, map(int, said["blocks"]), strict=True)
    read = [count if part == 1 else 0 for count, part in zip(said["verified"], said["part"], strict=True)]
    return {
        "verified": read,
        "blocks": here,
        "bytes": [size * count // total if total else 0 for size, count, total in each],
    }


def _picker(fields: Sequence[str]) -> Callable[[Mapping[str, Any]], Fields]:
    return itemgetter(*_EVERY, *fields)


def _pick_opening(body: dict[str, Any]) -> Fields:
    """Return the fields of an opening; older leaves have neither a model nor the blocks handed out at once."""
    body.setdefault("model", "")
    body.setdefault("written", ())
    found: Fields = _OPENING(body)
    return found


_PICK: dict[str, Callable[[Any], Fields]] = {kind: _picker(each.fields) for kind, each in _KINDS.items()}
_OPENING = _PICK["residency-opened"]
_PICK["residency-opened"] = _pick_opening


class _Life:
    """What is about one incarnation."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.offset_us = 0
        self.start: dict[str, Any] = {}
        self.narrowings: list[dict[str, Any]] = []
        self._releases: list[tuple[Sequence[Any], ...]] = []
        self.tables: dict[str, EvidenceBuilder] = {}

    def add(self, kind: str, rows: list[Fields]) -> None:
        """Take leaves of one kind about it."""
        entry = _KINDS[kind]
        fields = dict(zip(("idx", *_EVERY, *entry.fields), zip(*rows, strict=True), strict=True))
        places: dict[str, Any] = {"log": np.zeros(len(rows), np.int64)}
        columns = places | fields | dict(entry.derive(fields, self.uuid))
        table = self.tables.get(entry.table)
        if table is None:
            table = self.tables[entry.table] = EvidenceBuilder(entry.columns, len(entry.lists))
        table.add([columns[name] for name in entry.columns], [fields[name] for name in entry.lists])
        if kind == "residency-released":
            names = ("incarnation", "residency", "part", "sequence", "tenant")
            self._releases.append(tuple(fields[name] for name in names))

    def settle(self) -> None:
        """No leaf comes after these: what only narrowing acts ask for goes where there is none."""
        if not self.narrowings:
            self._releases.clear()

    def narrowed(self) -> dict[int, int]:
        """By residency: when an act of its process ended its hold at the latest."""
        if not self.narrowings:
            return {}
        last_releases: dict[int, tuple[int, str]] = {}
        for writer, residency, part, sequence, tenant in chain.from_iterable(
            zip(*columns, strict=True) for columns in self._releases
        ):
            if writer == self.uuid and part == 1:
                known = last_releases.get(int(residency), (0, ""))
                last_releases[int(residency)] = max(known, (int(sequence), tenant))
        return ended_by_acts(_acts(self.narrowings), {each: (who, at) for each, (at, who) in last_releases.items()})

    def evidence(self, table: str) -> list[Evidence]:
        """Return the rows of a table, once for each of its lists."""
        found = self.tables.get(table)
        if found is None:
            entry = next(each for each in _KINDS.values() if each.table == table)
            found = EvidenceBuilder(entry.columns, len(entry.lists))
        return found.evidence()


class LeafRecord:
    """All custody in a set of leaves. `leaves` is how many were read, `last_us` when the last was written."""

    def __init__(self, leaves: Iterable[bytes]) -> None:
        """Raises `LedgerError` for bytes that are no leaf."""
        self.leaves = 0
        self.last_us = 0
        self.told: list[int] = []  # the numbers of leaves that say something of whole processes, or of people
        self.copies: list[dict[str, Any]] = []  # leaves of copies off the device
        self._lives: dict[str, _Life] = {}
        self._uses: dict[str, BlockUses] = {}
        self._erasures: list[ErasureAsked] = []
        self._asked: list[tuple[int, int]] = []  # by the number of its leaf: when an erasure was asked for
        source = iter(leaves)
        try:
            while some := list(islice(source, _AT_ONCE)):
                self._take(some)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as problem:
            raise LedgerError(f"a leaf cannot be read: {problem!r}") from problem
        self._erasures.sort(key=lambda each: each.at_us)
        for life in self._lives.values():
            life.settle()
        self._tables = {uuid: _Tables(life) for uuid, life in self._lives.items()}

    def _take(self, leaves: list[bytes]) -> None:
        by_process: dict[str, dict[str, list[Fields]]] = {}
        writers: dict[str, dict[str, Any]] = {}
        last, known, subject = self.last_us, "", ""
        kinds: dict[str, list[Fields]] = {}
        # Millions: what every leaf needs is done here.
        for number, body in enumerate(map(orjson.loads, leaves), self.leaves):
            writer, kind, at_us = body["incarnation"], body["kind"], body["at_us"]
            if at_us > last:
                last = at_us
            if writer != known:
                known, writers[writer] = writer, body
            pick = _PICK.get(kind)
            if pick is not None:
                about = body.get("of_incarnation") or writer
                if about != subject:
                    subject, kinds = about, by_process.setdefault(about, {})
                rows = kinds.get(kind)
                if rows is None:
                    rows = kinds[kind] = []
                rows.append((number, *pick(body)))
            elif kind == CHANGED:
                kinds = by_process.setdefault(writer, {})
                subject = writer
                for item in plain_bodies(body):
                    kinds.setdefault(item["kind"], []).append((number, *_PICK[item["kind"]](item)))
            elif kind in _FEW:
                self.told.append(number)
                if kind == "erasure-requested":
                    self._asked.append((number, int(at_us)))
                self._take_one(kind, body)
            elif kind in COPY_STEPS or kind == INHERITED:
                self.copies.append(body)
        self.leaves += len(leaves)
        self.last_us = last
        for uuid, body in writers.items():
            self._life(uuid).offset_us = int(body["at_us"]) - int(body["boot_us"])
        for uuid, kinds in by_process.items():
            for kind, rows in kinds.items():
                self._life(uuid).add(kind, rows)

    def _take_one(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "erasure-requested":
            who = (body[name] for name in ("selector", "tenant", "subject", "session"))
            self._erasures.append(ErasureAsked(body["erasure"], int(body["at_us"]), *who))
            return
        life = self._life(body["incarnation"])
        if kind == "holds-narrowed":
            life.narrowings.append(body)
        elif not life.start or _order(body) > _order(life.start):
            life.start = body

    def _life(self, uuid: str) -> _Life:
        found = self._lives.get(uuid)
        if found is None:
            found = self._lives[uuid] = _Life(uuid)
        return found

    # -- what coverage asks of a record ---------------------------------------------------------------------

    def worker(self, incarnation: str) -> str:
        """Return the worker's name from a process's start; empty if no leaf has it."""
        life = self._lives.get(incarnation)
        return "" if life is None else str(life.start.get("worker", ""))

    def lives(self) -> list[IncarnationLife]:
        """Return every incarnation, by uuid."""
        return [
            IncarnationLife(0, uuid, life.offset_us, int(life.start.get("shards") or 0))
            for uuid, life in sorted(self._lives.items())
        ]

    def ends(self, life: IncarnationLife, chosen: CustodySelection) -> Evidence:
        """Return every end of custody; `chosen` does not narrow it."""
        return self._tables[life.uuid].ends

    def ended(self, life: IncarnationLife, ends: Evidence, chosen: CustodySelection) -> Int64s:
        """Return the keys of everything that ended."""
        return distinct(unit_keys_of(ends))

    def uses(self, life: IncarnationLife) -> BlockUses:
        """Return who used which block until when."""
        if life.uuid in self._uses:
            return self._uses[life.uuid]
        found, tables = self._lives[life.uuid], self._tables[life.uuid]
        rows = UseRows(life.offset_us, *tables.uses, found.narrowed(), self._erasures, tables.assignments())
        made = self._uses[life.uuid] = uses_of(rows)
        return made

    def receipts(self, life: IncarnationLife, ends: Evidence) -> ReceiptCells:
        """Return every receipt; `ends` does not narrow them."""
        return cells_of(self._tables[life.uuid].receipts)

    def erasure_due_times(self, life: IncarnationLife) -> ErasureDueTimes:
        """Return what erasures covered, without those whose request is missing."""
        asked: dict[str, int] = {}
        for each in self._erasures:
            asked.setdefault(each.erasure, each.at_us)
        found = self._tables[life.uuid].effects
        at = np.array([asked.get(name, -1) for name in found.texts("erasure")], np.int64)
        return due_times_of(found.kept(at >= 0)._replace(columns={"asked_us": at[at >= 0]}), life.offset_us)

    def models(self, life: IncarnationLife) -> dict[int, str]:
        """Return the model of every residency whose leaf names one."""
        opened = self._tables[life.uuid].opened
        rows = zip(
            opened.column("residency").tolist(),
            opened.column("part").tolist(),
            opened.texts("model"),
            strict=True,
        )
        return {residency: model for residency, part, model in rows if part == 1 and model}

    def asked_before(self, number: int, at_us: int) -> bool:
        """Return whether a leaf of this number or later requests an erasure as of a moment before that."""
        return any(asked >= number and when < at_us for asked, when in self._asked)

    def names_any(self, life: IncarnationLife, number: int, has: Callable[[Int64s], Flags]) -> bool:
        """Return whether a leaf of this number or later names custody for which `has` is true."""
        return any(
            bool(has(unit_keys_of(table)[table.column("idx")[table.owner] >= number]).any())
            for table in self._tables[life.uuid].every
        )

    def needed(self, life: IncarnationLife, is_over: Callable[[Int64s], Flags], since_boot_us: int) -> Int64s:
        """Return the numbers of leaves about unfinished custody, and about residencies that use it or continue.

        Receipts that name nothing else are left out once they are older than `since_boot_us`.
        """
        tables = self._tables[life.uuid]
        released = tables.releases.column("residency")[
            (tables.releases.column("final") == 1) & (tables.releases.column("part") == 1)
        ]
        released = distinct(released)
        holding = []
        for table in tables.uses:
            residency = table.column("residency")
            holding += [
                residency[table.owner[~is_over(unit_keys_of(table))]],
                residency[~is_among(residency, released)],
            ]
        residencies = distinct(np.concatenate(holding))
        places = [table.column("idx")[is_among(table.column("residency"), residencies)] for table in tables.uses]
        for table in (tables.ends, tables.receipts, tables.effects, tables.assigned):
            open_ = ~is_over(unit_keys_of(table))
            if table is tables.receipts:
                open_ &= (table.column("ended_boot_us") >= since_boot_us)[table.owner]
            places.append(table.column("idx")[table.owner[open_]])
        return distinct(np.concatenate(places))

    def unaccounted(self) -> Unaccounted:
        """Return everything that no leaf accounts for, over all incarnations (rule 3)."""
        found = [self._unaccounted(life) for life in self.lives()]
        return Unaccounted(*(sum(column) for column in zip(*found, strict=True))) if found else Unaccounted()

    def _unaccounted(self, life: IncarnationLife) -> Unaccounted:
        tables, uses = self._tables[life.uuid], self.uses(life)
        released, opened = tables.releases, tables.opened
        is_left = (released.column("final") == 1) & (released.column("part") == 1)
        about = distinct(np.concatenate((uses.residency, released.column("residency")[is_left])))
        people = distinct(opened.column("residency")[opened.column("part") == 1])
        ended, wiped, covered = (
            distinct(unit_keys_of(part)) for part in (tables.ends, tables.receipts, tables.effects)
        )
        named = distinct(np.concatenate((uses.keys, ended, wiped, covered)))
        named, wiped = (keys[keys & GENERATION_MASK > 0] for keys in (named, wiped))
        handed_out = is_among(named, distinct(uses.keys[uses.written]))
        start = int(self._lives[life.uuid].start.get("generation") or 0)
        return Unaccounted(
            int((~is_among(about, people)).sum()),
            _gaps(named, start) + int((~handed_out).sum()),
            int((~is_among(wiped, ended)).sum()),
        )


class _Tables:
    """The evidence of one incarnation, table by table."""

    def __init__(self, life: _Life) -> None:
        (self.ends,), (self.releases,) = life.evidence("ends"), life.evidence("releases")
        self.opened, self.handed = life.evidence("residencies")
        (self.attachments,), (self.receipts,) = life.evidence("attachments"), life.evidence("receipts")
        (self.effects,), (self.assigned,) = life.evidence("effects"), life.evidence("assignments")
        self.uses = (self.releases, self.opened, self.handed, self.attachments)
        self.every = (*self.uses, self.ends, self.receipts, self.effects, self.assigned)
        life.tables.clear()

    def assignments(self) -> Assignments:
        """Blocks whose custody is another tenant's than the one that was handed them."""
        parties = zip(self.assigned.texts("owner"), self.assigned.texts("classification"), strict=True)
        return assignments_of(self.assigned.owner, self.assigned.pairs, [*parties])


def _gaps(named: Int64s, start: int) -> int:
    """Return how many generations are missing between the named ones, in each pool from `start` on."""
    pools, generations = named >> POOL_SHIFT, named & GENERATION_MASK
    is_first = np.diff(pools, prepend=-1) > 0
    before = np.where(is_first, start, np.roll(generations, 1))
    return int(np.maximum(0, generations - np.maximum(before, start) - 1).sum())


def _acts(bodies: Iterable[dict[str, Any]]) -> dict[str, list[NarrowingAct]]:
    """Acts by tenant, in their order; the parts of each together."""
    acts: dict[str, list[NarrowingAct]] = {}
    for body in sorted(bodies, key=_order):
        every = acts.setdefault(body["tenant"], [])
        if not every or every[-1].sequence != int(body["sequence"]):
            every.append(NarrowingAct(int(body["sequence"]), int(body["boot_us"]), {}))
        every[-1].holds.update(zip(map(int, body["holds"]), map(int, body["until_boot_us"]), strict=True))
    return acts


def _order(body: Mapping[str, Any]) -> tuple[int, int]:
    return int(body["sequence"]), int(body["part"])
