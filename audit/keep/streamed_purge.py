"""A purge that writes its own export: some leaves at a time are written, read back, recorded and dropped.

    result = purge_to(engine, before_us, folder, keys, actor="ops", approver="dpo", reason="schedule")

1. The folder gets parts, `part-000001` and so on: each is an export by itself, with its own manifest, under the signed
   checkpoint. Together they hold exactly what goes. A part is durable and was read back whole and verified by the
   caller's keys before `RetentionPurged` names its manifest; that is committed before anything of it is dropped.
2. Memory and what is read a second time are bounded by a part, however large the ledger is. Parts run beside each
   other; those of one log drop their leaves in order, from the log's beginning. Where there are whole months to empty,
   that comes when all parts are on record, and each part then drops what is left of it.
3. To finish an interrupted purge, request it again with the same folder. A complete part is verified again and recorded
   if it is not yet, and its remaining leaves are dropped. An incomplete part is written anew.
4. What may go is what `purge_and_legal_hold` says, rules 1 and 5: holds win, and are asked for again in each
   transaction that deletes.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from sqlalchemy import Engine, select

from kvcustody.audit.evidence.processes.sequence_gaps import keep_spans
from kvcustody.audit.exports.export_writer import ExportSelection, LeafRange, write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.exports.manifest import MANIFEST, parse_manifest
from kvcustody.audit.exports.range_source import CheckpointContents
from kvcustody.audit.keep.counted_months import CountedMonths, ExpiredLeaves
from kvcustody.audit.keep.free_space import free_space
from kvcustody.audit.keep.purge_and_legal_hold import (
    LogPlan,
    PurgeFacts,
    RetentionError,
    check_exported,
    check_people,
    drop_runs,
    expired_leaves,
    is_any_there,
    plan_purge,
    purge_months,
    read_back,
    record_purges,
    thin_dropped,
)
from kvcustody.audit.keep.truncate_month import counted_months
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import retention_purges
from kvcustody.audit.tlog.proofs import TILE_WIDTH
from kvcustody.audit.tlog.tiles import read_plain_file
from kvcustody.audit.verify.verify_export import MANIFEST_BYTES_MAX
from kvcustody.clock import Clock, SystemClock
from kvcustody.files import evidence_folder

PART_LEAVES_MIN, PART_LEAVES_MAX = 1 << 14, 1 << 17
PART_LOGS = 2048
JOBS = 2  # parts beside each other on a server; a file has one writer
_TURNS = 4  # parts of each job, where there are leaves enough: the jobs then end at about the same time
_CHUNK_LEAVES = 1 << 13
_DROP_LEAVES = 1 << 13  # of one transaction
_DROP_LOGS = 512
_PART = re.compile(r"part-\d{6,}")
_PARTIAL = re.compile(r"\.part-\d{6,}\.partial")

_Made = TypeVar("_Made")
Progress = Callable[[str, int, int], None]  # "written", "verified" or "dropped", leaves done, leaves in all


class PurgedPart(NamedTuple):
    """A part of the export, and how many of its leaves were dropped now."""

    path: str
    digest: str
    leaves: int


class PurgeResult(NamedTuple):
    """A purge's result: the dropped leaves by log, and the parts that hold them."""

    plans: tuple[LogPlan, ...]
    parts: tuple[PurgedPart, ...]


@dataclass(slots=True)
class _Part:
    """A part that is to be dropped, its runs by name of their log; `after` are those that drop before it."""

    path: Path
    runs: dict[str, LeafRange]
    is_there: bool
    facts: PurgeFacts | None = None  # when it was verified
    after: list[_Part] = field(default_factory=list)
    dropped: threading.Event = field(default_factory=threading.Event)

    @property
    def leaves(self) -> int:
        return sum(run.end - run.first for run in self.runs.values())

    @property
    def verified(self) -> PurgeFacts:
        assert self.facts is not None
        return self.facts


def purge_to(
    engine: Engine,
    before_us: int,
    folder: Path,
    keys: Sequence[str],
    *,
    actor: str,
    approver: str,
    reason: str,
    jobs: int = JOBS,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> PurgeResult:
    """Export to `folder`, verify and drop the content of old leaves (rules 1 to 4); return what was dropped.

    Raises `RetentionError` for a part that is not sound, under a hold, and where one person is both actor and approver.
    """
    check_people(actor, approver)
    numbers = _parts_there(folder)
    with engine.connect() as connection:
        plans = [plan for plan in plan_purge(connection, before_us) if plan.leaves]
    going = expired_leaves(engine, plans)
    jobs = 1 if dialect_of(engine).one_writer else max(1, jobs)
    fair = sum(plan.leaves for plan in plans) // (_TURNS * jobs)
    parts = _plan_parts(folder, numbers, plans, min(PART_LEAVES_MAX, max(PART_LEAVES_MIN, fair)))
    if parts:
        keep_spans(engine)  # all that goes is there: it is under a signed checkpoint
        contents = CheckpointContents(LedgerSource(engine))
        evidence_folder(folder)
        for draft in folder.glob(".part-*.partial"):  # of a try that was killed; nothing reads it
            shutil.rmtree(draft)
        people = (actor, approver, reason)
        with counted_months(engine, before_us, going, folder.parent) as counted:
            purge = _Purge(engine, contents, keys, people, parts, counted, progress, clock or SystemClock())
            made = purge.run(jobs, going)
    else:
        made = []
    thin_dropped(engine)
    free_space(engine, before_us)
    return PurgeResult(tuple(plans), tuple(made))


def _parts_there(folder: Path) -> list[int]:
    """Return the numbers of the parts in a folder; raises `RetentionError` if it contains anything else."""
    if not folder.exists():
        return []
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if not (_PART.fullmatch(name) or _PARTIAL.fullmatch(name)):
            raise RetentionError(f"`{folder}` holds `{name}`: export a purge to an empty folder", path=folder)
    return sorted(int(name.removeprefix("part-")) for name in names if _PART.fullmatch(name))


def _plan_parts(folder: Path, numbers: Sequence[int], plans: Sequence[LogPlan], leaves_max: int) -> list[_Part]:
    """What is left of the parts that are there, and new ones for the rest, in the order in which they begin."""
    rest = {plan.log: [LeafRange(plan.log, plan.first, plan.below)] for plan in plans}
    parts = []
    for number in numbers:
        part = _Part(folder / f"part-{number:06d}", {}, True)
        for log in parse_manifest(read_plain_file(part.path, MANIFEST, MANIFEST_BYTES_MAX)).logs:
            remaining: list[LeafRange] = []
            for run in rest.get(log.name, ()):
                first, end = max(run.first, log.range.first), min(run.end, log.range.end)
                if first < end and log.name not in part.runs:
                    part.runs[log.name] = LeafRange(log.name, first, end)
                    remaining += [run._replace(end=first), run._replace(first=end)]
                else:
                    remaining.append(run)
            rest[log.name] = [run for run in remaining if run.first < run.end]
        parts += [part] if part.runs else []
    number = max(numbers, default=0)
    for runs in _packed([run for some in rest.values() for run in some], leaves_max // TILE_WIDTH * TILE_WIDTH):
        number += 1
        parts.append(_Part(folder / f"part-{number:06d}", {run.log: run for run in runs}, False))
    _order(parts)
    return parts


def _packed(runs: Sequence[LeafRange], leaves_max: int) -> Iterator[list[LeafRange]]:
    """Runs by part: long ones cut at a tile, and taking turns so that logs are dropped beside each other."""
    pieces = [
        (turn, LeafRange(run.log, max(run.first, first), min(run.end, first + leaves_max)))
        for run in runs
        for turn, first in enumerate(range(run.first // TILE_WIDTH * TILE_WIDTH, run.end, leaves_max))
    ]
    part: dict[str, LeafRange] = {}
    leaves = 0
    for _, piece in sorted(pieces):
        length = piece.end - piece.first
        if part and (piece.log in part or leaves + length > leaves_max or len(part) == PART_LOGS):
            yield list(part.values())
            part, leaves = {}, 0
        part[piece.log] = piece
        leaves += length
    if part:
        yield list(part.values())


def _order(parts: list[_Part]) -> None:
    """Of each log the runs that come first are dropped first."""
    runs = [(run.log, run.first, part) for part in parts for run in part.runs.values()]
    before: dict[str, _Part] = {}
    for log, _, part in sorted(runs, key=lambda run: run[:2]):
        if log in before:
            part.after.append(before[log])
        before[log] = part


class _StoppedError(RetentionError):
    """Another part failed."""


class _Purge:
    """Runs the parts of one purge."""

    def __init__(
        self,
        engine: Engine,
        contents: CheckpointContents,
        keys: Sequence[str],
        people: tuple[str, str, str],
        parts: Sequence[_Part],
        counted: CountedMonths,
        progress: Progress | None,
        clock: Clock,
    ) -> None:
        self._counted = counted
        self._engine = engine
        self._contents = contents
        self._keys = keys
        self._people = people
        self._parts = parts
        self._progress = progress
        self._clock = clock
        self._telling = threading.Lock()
        self._done = dict.fromkeys(("written", "verified", "dropped"), 0)
        self._stop = threading.Event()

    def run(self, jobs: int, going: Mapping[str, ExpiredLeaves]) -> list[PurgedPart]:
        """Work through all parts; raises what the first one that failed raised."""
        if not self._counted.months:
            return self._each(jobs, self._whole)
        self._each(jobs, self._prepare)
        for part in self._parts:
            self._record(part)
        purge_months(self._engine, going, self._counted)
        return self._each(jobs, self._drop)

    def _each(self, jobs: int, work: Callable[[_Part], _Made]) -> list[_Made]:
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self._guarded, work, part) for part in self._parts]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                failed = [future.exception() for future in futures if future.done() and not future.cancelled()]
                cause = next((each for each in failed if each and not isinstance(each, _StoppedError)), None)
                if cause is not None:
                    raise cause from None
                raise

    def _guarded(self, work: Callable[[_Part], _Made], part: _Part) -> _Made:
        try:
            self._check_going_on()
            return work(part)
        except BaseException:
            self._stop.set()
            raise

    def _whole(self, part: _Part) -> PurgedPart:
        self._prepare(part)
        self._wait(part)
        self._record(part)
        return self._drop(part)

    def _prepare(self, part: _Part) -> None:
        """Have it written and verified."""
        if not part.is_there:
            self._write(part)
        self._tell("written", part.leaves)
        part.facts = self._verify(part)
        self._tell("verified", part.leaves)

    def _wait(self, part: _Part) -> None:
        for before in part.after:
            while not before.dropped.wait(0.1):
                self._check_going_on()

    def _check_going_on(self) -> None:
        if self._stop.is_set():
            raise _StoppedError("another part of the purge failed")

    def _tell(self, what: str, leaves: int) -> None:
        with self._telling:
            self._done[what] += leaves
            if self._progress is not None:
                self._progress(what, self._done[what], sum(part.leaves for part in self._parts))

    def _write(self, part: _Part) -> None:
        runs = tuple(part.runs.values())
        with self._contents.ranges(runs) as source:
            write_export(
                part.path,
                source,
                ExportSelection(ranges=runs),
                made_at_us=self._clock.utc_us(),
                chunk_leaves=_CHUNK_LEAVES,
                resumable=False,
            )

    def _verify(self, part: _Part) -> PurgeFacts:
        """Read the part back, by the caller's keys (rule 1); raises `RetentionError`."""
        verdict, facts = read_back(self._engine, part.path, self._keys, self._people, self._counted)
        for run in part.runs.values():
            check_exported(LogPlan(run.log, run.first, run.end, ""), verdict)
        return facts

    def _record(self, part: _Part) -> None:
        """Put on record what goes, but for what an interrupted purge already did (rule 3)."""
        facts = part.verified
        column = retention_purges.c
        known: dict[str, int] = {}
        if part.is_there:
            query = select(column.of_log, column.below).where(column.digest == facts.digest, has_leaf(retention_purges))
            with self._engine.connect() as connection:
                known = {row.of_log: row.below for row in connection.execute(query.order_by(column.idx))}
        plans = [
            LogPlan(run.log, run.first, run.end, "") for run in part.runs.values() if known.get(run.log, -1) < run.end
        ]
        if plans:
            record_purges(self._engine, plans, facts, self._clock)

    def _drop(self, part: _Part) -> PurgedPart:
        """Drop what is there of it, after those that come before it."""
        self._wait(part)
        group: dict[str, ExpiredLeaves] = {}
        leaves = 0
        for run in part.runs.values():
            first = run.first
            while first < run.end:
                end = min(run.end, first // TILE_WIDTH * TILE_WIDTH + _DROP_LEAVES)
                if run.log in group or leaves + end - first > _DROP_LEAVES or len(group) == _DROP_LOGS:
                    self._drop_group(group)
                    group, leaves = {}, 0
                group[run.log] = ExpiredLeaves(self._contents.ids[run.log], first, end)
                leaves += end - first
                first = end
        self._drop_group(group)
        part.dropped.set()
        return PurgedPart(part.path.name, part.verified.digest, part.leaves)

    def _drop_group(self, group: dict[str, ExpiredLeaves]) -> None:
        self._check_going_on()
        if group:
            if not self._counted.months or is_any_there(self._engine, list(group.values())):
                drop_runs(self._engine, group)
            self._tell("dropped", sum(run.below - run.first for run in group.values()))
