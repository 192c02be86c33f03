"""Handle an unavailable sink: what is refused, spilled, held, and submitted afterwards.

1. Class A is refused at once, and what accounts for a refusal is kept before the mark passes it.
2. Everything else goes to the spill; where the disk is full, what the sink keeps makes room for it. Where the spill is
   full too it is held in memory, and nothing more is admitted.
3. The sink is back once it took the first part of the own spill: to answer is not enough. Live batches go first then,
   and the spill is handed in behind them, a part at a time, in a bounded share of the time: each leaf once, however
   often. A segment goes only after all of it, and the leaf that reports its replay, were acknowledged. A leaf that is
   refused then becomes a gap and hinders none behind it; its segment is set aside.
4. Spills of dead predecessors are handed in before this process is put on record, which closes their custody: nothing
   of this process can go before them.
5. Tries are spaced: `retry_seconds`, doubled up to the sink's longest, each by a random share; never sooner than the
   sink asked for. Who waits for a class A event has a try brought forward, as soon as the sink may be asked again. It
   rests for twice what the last try took first, so that waiting takes a third of an engine's time at most.
6. Where a sink says that leaves it had acknowledged are gone (`rewind`), what it kept of them is spill once more.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import orjson

from kvcustody.audit.evidence.subjects.subject_table import Row, row_of
from kvcustody.audit.kinds import Event, GapRecorded, ReplayCompleted, SpillStarted
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.leaf.batch_encoder import Entry, Item
from kvcustody.audit.write.event_queue import DurableWatermark, EventQueue, TenantShares, sizes_of
from kvcustody.audit.write.sink import (
    BatchRefusedError,
    LedgerSink,
    Life,
    NotAcknowledgedError,
    SinkAwayError,
)
from kvcustody.audit.write.spill_file import SpillFile, SpillFullError, SpillSegment
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_REST, _REST_SECONDS_MAX = 2.0, 4.0  # of an early try (rule 5)
_PART_LEAVES = 250  # handed in of the own spill at once: what a live batch may have to wait for


class Spacing:
    """When to retry an unavailable sink (rule 5)."""

    def __init__(self, first_seconds: float, early_seconds: float, seconds_max: float) -> None:
        self._first_seconds = first_seconds
        self._early_seconds = early_seconds
        self._seconds_max = max(first_seconds, seconds_max)
        self._next_seconds = first_seconds
        self._told_until = 0.0
        self._early_at = 0.0
        self.due_at = 0.0

    @property
    def due(self) -> bool:
        """Whether a retry is due."""
        return time.monotonic() >= self.due_at

    @property
    def may_be_early(self) -> bool:
        """Whether somebody waits and a try is allowed now."""
        return self.may_at_the_end and time.monotonic() >= self._early_at

    @property
    def may_at_the_end(self) -> bool:
        """Whether a last try is allowed at the end: the sink did not ask for a pause."""
        return time.monotonic() >= self._told_until

    def wait(self) -> None:
        """Wait at least some time; nothing failed."""
        self.due_at = time.monotonic() + _about(self._first_seconds)

    def failed(self, told_seconds: float = 0.0, took_seconds: float = 0.0) -> None:
        """Record a failed try, its duration, and the pause that the sink requested."""
        now = time.monotonic()
        rest_seconds = min(_REST * took_seconds, _REST_SECONDS_MAX)
        self._early_at = now + _about(max(self._early_seconds, rest_seconds))
        self._told_until = now + told_seconds * random.uniform(1.0, 1.25)  # noqa: S311 - spacing, no secret
        self.due_at = max(now + _about(self._next_seconds), self._told_until)
        self._next_seconds = min(2 * self._next_seconds, self._seconds_max)

    def acknowledged(self) -> None:
        """Record that the sink accepted something."""
        self._next_seconds = self._first_seconds


def _about(seconds: float) -> float:
    return seconds * random.uniform(0.75, 1.25)  # noqa: S311 - spacing, no secret


class _Counts:
    """What a replay found."""

    def __init__(self) -> None:
        self.added = self.known = 0
        self.begun = False


Part = tuple[list[Row], list[bytes]]


class _Replay:
    """Own segments that are handed in behind live batches, and how far that is."""

    def __init__(self, segments: Sequence[SpillSegment]) -> None:
        self.left = deque(segments)
        self.parts: Iterator[Part] = iter(())
        self.counts = _Counts()
        self.handed_in_bytes = 0  # of the first one left
        self.due_at = 0.0

    def close(self) -> None:
        for segment in self.left:
            segment.close()


class Outage:
    """The state of one writer's sink, and the handling of entries that it cannot take."""

    def __init__(
        self,
        sink: LedgerSink,
        life: Life,
        clock: Clock,
        context: Context,
        *,
        intake: EventQueue,
        mark: DurableWatermark,
        spill: SpillFile,
        shares: TenantShares,
        retry_seconds: float,
        batch: int,
        replay_share: float,
    ) -> None:
        self._replay_share = replay_share
        self._sink = sink
        self._life = life
        self._clock = clock
        self._context = context
        self._intake = intake
        self._mark = mark
        self._directory = sink.directory
        self._spill = spill
        self._shares = shares
        self._batch = batch
        self._registered = False
        self.spacing = Spacing(retry_seconds, sink.early_seconds, sink.wait_seconds_max)
        self.down = ""  # why the sink takes nothing; empty when it does
        self.spilled = False  # there is something in the spill
        self._behind: _Replay | None = None
        self.replaying = False  # the own spill is handed in behind live batches (rule 3)
        self.active = False  # events go to the spill, or nowhere
        self.full = ""  # why the spill takes no more
        self.held: list[Entry] = []  # refused by sink and spill, waiting

    @property
    def cause(self) -> str:
        """Why events are not submitted; empty when they are, or when only a replay is due."""
        return self.full or self.down

    def _stand(self, *, down: str, spilled: bool, behind: _Replay | None) -> None:
        """The one place where these change, so that who asks at every batch reads an attribute."""
        self.down, self.spilled, self._behind = down, spilled, behind
        self.replaying = behind is not None
        self.active = bool(down or (spilled and behind is None))

    @property
    def replay_due_at(self) -> float:
        """When the next part of the replay may be submitted."""
        return self._behind.due_at if self._behind is not None else float("inf")

    @property
    def replayed_bytes(self) -> int:
        """How much of the current segment was acknowledged, in whole frames."""
        return self._behind.handed_in_bytes if self._behind is not None else 0

    def lost(self, problem: NotAcknowledgedError | LedgerError, took_seconds: float = 0.0) -> None:
        """Record that the sink failed, and how long that try took."""
        cause = problem.cause if isinstance(problem, NotAcknowledgedError) else problem.message
        if not self.down:
            self._sink.lost(cause)
        self._stop_replay(cause)
        told_seconds = problem.wait_seconds if isinstance(problem, SinkAwayError) else 0.0
        self.spacing.failed(told_seconds, took_seconds)

    def divert(self, entries: list[Entry], cause: str, finish: Callable[[Sequence[Item]], None]) -> None:
        """Refuse class A, spill the rest; if the spill refuses too, hold them and stop admitting."""
        to_spill = [entry for entry in entries if not self._intake.awaits(entry.sequence)]
        refused = [entry for entry in entries if self._intake.awaits(entry.sequence)]
        told = [entry for entry in refused if self._intake.settle(entry.sequence, "refused", cause)]
        to_spill += [self._entry(self._intake.withdrawal(entry.sequence, entry.event)) for entry in told]
        if to_spill and not (self.spilled or self.full):  # the first thing in a spill says why it began
            first = min(entry.sequence for entry in to_spill)
            to_spill.insert(0, self._entry(SpillStarted(self._clock.now_us(), cause, first)))
        if to_spill and self._keep(to_spill):
            finish([(entry.sequence, entry.event) for entry in to_spill])
        self._mark.advance([entry.sequence for entry in refused])  # after what accounts for them

    def _keep(self, entries: list[Entry]) -> bool:
        """Spill entries; False when the spill is full: they are held, and nothing more is admitted."""
        names = self._directory.fresh()
        records = [b"P" + orjson.dumps(row) for row in names]
        records += [b"L" + leaf for entry in entries for leaf in entry.leaves]
        try:
            taken_bytes = self._append(records)
        except SpillFullError as problem:
            self.full = problem.message
            self.held = entries
            if not self.down:
                self.spacing.wait()
            return False
        self._directory.settle(names)
        packed = taken_bytes / sum(map(len, records))
        self._shares.spilled((tenant, size * packed) for tenant, size in sizes_of(entries, names))
        self.full = ""
        if not self.spilled:
            self._stand(down=self.down, spilled=True, behind=self._behind)
            if not self.down:
                self.spacing.wait()
        return True

    def _append(self, records: list[bytes]) -> int:
        """Into the spill; on a full disk, at the price of what the sink keeps. Raises `SpillFullError`."""
        while True:
            try:
                return self._spill.append(records)
            except SpillFullError as problem:
                if "limit" in problem.operands or not self._sink.make_room():
                    raise

    def _entry(self, event: Event) -> Entry:
        """Return an event of the writer's own, for writing immediately."""
        sequence = self._intake.next_sequence()
        return Entry(sequence, event, [leaf.data for leaf in leaves(event, self._context, sequence)])

    # -- the sink is back -------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Retry the sink: submit every spill, then continue."""
        began = time.monotonic()
        try:
            self._sink.reopen()
            self.catch_up()
        except (NotAcknowledgedError, LedgerError) as problem:
            self.lost(problem, time.monotonic() - began)

    def catch_up(self) -> None:
        """Submit what dead predecessors spilled, register, and begin with the own spill (rules 3 and 4).

        Raises what the sink raises.
        """
        self._stop_replay(self.down)
        segments = self._spill.segments()
        counts = _Counts()
        own = [segment for segment in segments if self._is_own(segment)]
        others = [segment for segment in segments if segment not in own]
        try:
            for segment in others:
                for names, chunk in _parts(segment, self._batch):
                    self._hand_in(segment, names, chunk, counts)
            if not self._registered:
                self._sink.register(self._life)
                self._registered = True
            if others:
                self._report_and_retire(others, counts)
        except BaseException:
            for segment in own:
                segment.close()
            raise
        finally:
            for segment in others:
                segment.close()
        if own:
            behind = _Replay(own)
            self._stand(down=self.down, spilled=self.spilled, behind=behind)
            self._replay_part(behind)  # a sink that answers and takes no leaf is still away
        else:
            self._replayed()
        self.spacing.acknowledged()
        self.full = ""
        self._stand(down="", spilled=self.spilled, behind=self._behind)

    def rewind(self, why: str) -> None:
        """Submit what the sink kept once more (rule 6); record what preceded it, and why."""
        _log.error("the ledger lost what it had acknowledged; all that was kept is handed in again", reason=why)
        self._stop_replay(why)  # from here on nobody asks the sink for anything
        try:
            self._sink.rewind()
        except (OSError, LedgerError) as problem:
            self.lost(problem if isinstance(problem, LedgerError) else LedgerError(str(problem.strerror)))
            return
        self._registered = False
        self._stand(down=why, spilled=True, behind=None)
        self.spacing.due_at = 0.0
        self._intake.emit(SpillStarted(self._clock.now_us(), why, 0))

    def replay(self, *, hurry: bool = False) -> None:
        """Submit a part of the own spill, if it is time (rule 3)."""
        behind = self._behind
        if behind is None or (not hurry and time.monotonic() < behind.due_at):
            return
        began = time.monotonic()
        try:
            self._replay_part(behind)
        except (NotAcknowledgedError, LedgerError) as problem:
            self.lost(problem)
            return
        now = time.monotonic()
        behind.due_at = now + (now - began) * (1 / self._replay_share - 1)

    def _replay_part(self, behind: _Replay) -> None:
        if not behind.left:
            behind.left.extend(filter(self._is_own, self._spill.segments()))
            if not behind.left:
                self._replayed()
                return
        segment = behind.left[0]
        if not behind.counts.begun:
            behind.counts.begun = True
            behind.parts = _parts(segment, min(self._batch, _PART_LEAVES))
        part = next(behind.parts, None)
        if part is not None:
            self._hand_in(segment, *part, behind.counts)
            behind.handed_in_bytes = segment.read_bytes
            return
        self._report_and_retire([segment], behind.counts)
        behind.left.popleft()
        behind.handed_in_bytes = 0
        behind.counts = _Counts()

    def _replayed(self) -> None:
        self._stand(down=self.down, spilled=False, behind=None)
        self._shares.replayed()

    def _stop_replay(self, down: str) -> None:
        if self._behind is not None:
            self._behind.close()
        self._stand(down=down, spilled=self.spilled, behind=None)

    def _is_own(self, segment: SpillSegment) -> bool:
        return segment.path.name.startswith(self._life.incarnation)

    def _hand_in(self, segment: SpillSegment, names: Sequence[Row], data: Sequence[bytes], counts: _Counts) -> None:
        """Hand in spilled leaves; one that is refused becomes a gap (rule 3)."""
        try:
            added = self._sink.replay(names, data)
        except BatchRefusedError as problem:
            if len(data) > 1:
                half = len(data) // 2
                self._hand_in(segment, names, data[:half], counts)
                self._hand_in(segment, [], data[half:], counts)
                return
            _log.error("a spilled leaf was refused", reason=problem.cause, spill=segment.path.name)
            segment.refused += 1
            if self._is_own(segment):
                sequence = int(orjson.loads(data[0])["sequence"])
                cause = f"a spilled leaf was refused: {problem.kind}"
                self._intake.emit(GapRecorded(self._clock.now_us(), cause, sequence, sequence))
        else:
            counts.added += added
            counts.known += len(data) - added
            self.spacing.acknowledged()

    def _report_and_retire(self, segments: Sequence[SpillSegment], counts: _Counts) -> None:
        """Put on record what a replay found, before the evidence of the outage goes."""
        torn_bytes = sum(segment.torn_bytes for segment in segments)
        now_us = self._clock.now_us()
        entry = self._entry(ReplayCompleted(now_us, len(segments), counts.added, counts.known, torn_bytes))
        try:
            self._sink.commit([], read_leaves(entry.leaves))
        except BaseException:
            self._intake.requeue(entry.sequence, entry.event)
            raise
        self._mark.advance([entry.sequence])
        for segment in segments:
            segment.retire(keep=self._sink.keeps)


def _parts(segment: SpillSegment, leaves: int) -> Iterator[Part]:
    """Yield a segment's leaves in parts of about that size; the leaves of one event stay together."""
    names: list[Row] = []
    chunk: list[bytes] = []
    for record in segment.records():
        if record[:1] == b"P":
            names.append(row_of(orjson.loads(record[1:])))
        elif record[:1] == b"L":
            if len(chunk) >= leaves and sequence_of(record[1:]) != sequence_of(chunk[-1]):
                yield names, chunk
                names, chunk = [], []
            chunk.append(record[1:])
    if chunk:  # names that no whole leaf follows are nobody's
        yield names, chunk


def sequence_of(leaf: bytes) -> int:
    """Return the sequence of a leaf's event."""
    return int(orjson.loads(leaf)["sequence"])
