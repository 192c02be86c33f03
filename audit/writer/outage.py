"""When a sink is away: what is refused, spilled, held, and handed in afterwards.

1. Class A is refused at once, and what accounts for a refusal is kept before the mark passes it.
2. Everything else goes to the spill; where the spill is full too it is held in memory, and nothing more is admitted.
3. The sink counts as back only after every spill was handed in: each leaf once, however often, and a segment goes only
   after all of it, and the leaf that reports the replay, were acknowledged. A leaf that is refused then becomes a gap
   and hinders none behind it; its segment is set aside.
4. Spills of dead predecessors are handed in before this process is put on record, which closes their custody.
5. Tries are spaced: `retry_seconds`, doubled up to the sink's longest, each by a random share; never sooner than the
   sink asked for. Who waits for a class A event has a try brought forward, as soon as the sink may be asked again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import orjson
import structlog

from kvcustody.audit.events import Context, Event, GapRecorded, ReplayCompleted, SpillStarted, leaves
from kvcustody.audit.events.batch import read_leaves
from kvcustody.audit.events.batch_encoder import Entry
from kvcustody.audit.events.column_encoder import Item
from kvcustody.audit.subjects.subject_table import Row, row_of
from kvcustody.audit.writer.durable_watermark import DurableWatermark
from kvcustody.audit.writer.event_queue import EventQueue
from kvcustody.audit.writer.sink import (
    BatchRefusedError,
    LedgerSink,
    Life,
    NotAcknowledgedError,
    SinkAwayError,
)
from kvcustody.audit.writer.spill_file import SpillFile, SpillFullError, SpillSegment
from kvcustody.audit.writer.tenant_shares import TenantShares, sizes_of
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError

_log = structlog.get_logger(__name__)


class Spacing:
    """When a sink that is away is asked again (rule 5)."""

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
        """It is time."""
        return time.monotonic() >= self.due_at

    @property
    def may_be_early(self) -> bool:
        """Somebody waits: there may be a try now."""
        return self.may_at_the_end and time.monotonic() >= self._early_at

    @property
    def may_at_the_end(self) -> bool:
        """This is the last chance for a try: the sink did not ask to be left alone."""
        return time.monotonic() >= self._told_until

    def wait(self) -> None:
        """Not before some time from now; nothing failed."""
        self.due_at = time.monotonic() + _about(self._first_seconds)

    def failed(self, told_seconds: float = 0.0) -> None:
        """A try failed, and the sink asked for so many seconds."""
        now = time.monotonic()
        self._early_at = now + _about(self._early_seconds)
        self._told_until = now + told_seconds * random.uniform(1.0, 1.25)  # noqa: S311 - spacing, no secret
        self.due_at = max(now + _about(self._next_seconds), self._told_until)
        self._next_seconds = min(2 * self._next_seconds, self._seconds_max)

    def acknowledged(self) -> None:
        """The sink took something."""
        self._next_seconds = self._first_seconds


def _about(seconds: float) -> float:
    return seconds * random.uniform(0.75, 1.25)  # noqa: S311 - spacing, no secret


class _Counts:
    """What a replay found."""

    def __init__(self) -> None:
        self.added = self.known = 0


class Outage:
    """The state of one writer's sink, and what happens to entries that cannot be handed in."""

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
    ) -> None:
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
        self.spilled = False
        self.full = ""  # why the spill takes no more
        self.held: list[Entry] = []  # refused by sink and spill, waiting

    @property
    def cause(self) -> str:
        """Why events are not handed in; empty when they are, or when only a replay is due."""
        return self.full or self.down

    @property
    def active(self) -> bool:
        """Events go to the spill, or nowhere."""
        return bool(self.spilled or self.down)

    def lost(self, problem: NotAcknowledgedError | LedgerError) -> None:
        """The sink failed."""
        cause = problem.cause if isinstance(problem, NotAcknowledgedError) else problem.message
        if not self.down:
            self._sink.lost(cause)
        self.down = cause
        self.spacing.failed(problem.wait_seconds if isinstance(problem, SinkAwayError) else 0.0)

    def divert(self, entries: list[Entry], cause: str, finish: Callable[[Sequence[Item]], None]) -> None:
        """Refuse class A, spill the rest; where the spill refuses too, hold on to them and stop admitting."""
        kept = [entry for entry in entries if not self._intake.awaits(entry.sequence)]
        refused = [entry for entry in entries if self._intake.awaits(entry.sequence)]
        told = [entry for entry in refused if self._intake.settle(entry.sequence, "refused", cause)]
        kept += [self._entry(self._intake.withdrawal(entry.sequence, entry.event)) for entry in told]
        if kept and not (self.spilled or self.full):  # the first thing in a spill says why it began
            first = min(entry.sequence for entry in kept)
            kept.insert(0, self._entry(SpillStarted(self._clock.now_us(), cause, first)))
        if kept and self._keep(kept):
            finish([(entry.sequence, entry.event) for entry in kept])
        self._mark.advance([entry.sequence for entry in refused])  # after what accounts for them

    def _keep(self, entries: list[Entry]) -> bool:
        """Spill entries; False when the spill is full: they are held, and nothing more is admitted."""
        names = self._directory.fresh()
        records = [b"P" + orjson.dumps(row) for row in names]
        records += [b"L" + leaf for entry in entries for leaf in entry.leaves]
        try:
            self._spill.append(records)
        except SpillFullError as problem:
            self.full = problem.message
            self.held = entries
            if not self.down:
                self.spacing.wait()
            return False
        self._directory.settle(names)
        self._shares.spilled(sizes_of(entries, names))
        self.full = ""
        if not self.spilled:
            self.spilled = True
            if not self.down:
                self.spacing.wait()
        return True

    def _entry(self, event: Event) -> Entry:
        """An event of the writer's own, to be written at once."""
        sequence = self._intake.next_sequence()
        return Entry(sequence, event, [leaf.data for leaf in leaves(event, self._context, sequence)])

    # -- the sink is back -------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Try the sink again: hand in every spill, then go on."""
        try:
            self._sink.reopen()
            self.catch_up()
        except (NotAcknowledgedError, LedgerError) as problem:
            self.lost(problem)

    def catch_up(self) -> None:
        """Hand in every spill that no live process holds, and be on record; raises what the sink raises (rule 4)."""
        segments = self._spill.segments()
        counts = _Counts()
        own = [segment for segment in segments if self._is_own(segment)]
        try:
            for segment in [segment for segment in segments if segment not in own]:
                self._replay(segment, counts)
            if not self._registered:
                closing = self._sink.register(self._life)
                self._registered = True
                self._intake.submit(closing)
            for segment in own:
                self._replay(segment, counts)
            if segments:  # on record before the evidence of the outage goes
                torn_bytes = sum(segment.torn_bytes for segment in segments)
                self._report(len(segments), counts.added, counts.known, torn_bytes)
            for segment in segments:
                segment.retire()
        finally:
            for segment in segments:
                segment.close()
        self.down = self.full = ""
        self.spilled = False
        self.spacing.acknowledged()
        self._shares.replayed()

    def _is_own(self, segment: SpillSegment) -> bool:
        return segment.path.name.startswith(self._life.incarnation)

    def _replay(self, segment: SpillSegment, counts: _Counts) -> None:
        names: list[Row] = []
        chunk: list[bytes] = []
        for record in segment.records():
            if record[:1] == b"P":
                names.append(row_of(orjson.loads(record[1:])))
            elif record[:1] == b"L":
                chunk.append(record[1:])
            if len(chunk) >= self._batch:
                self._hand_in(segment, names, chunk, counts)
                names, chunk = [], []
        if chunk:  # names that no whole leaf follows are nobody's
            self._hand_in(segment, names, chunk, counts)

    def _hand_in(
        self, segment: SpillSegment, names: Sequence[Row], data: Sequence[bytes], counts: _Counts
    ) -> None:
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

    def _report(self, segments: int, added: int, known: int, torn_bytes: int) -> None:
        """Put on record what a replay found."""
        entry = self._entry(ReplayCompleted(self._clock.now_us(), segments, added, known, torn_bytes))
        try:
            self._sink.commit([], read_leaves(entry.leaves))
        except BaseException:
            self._intake.requeue(entry.sequence, entry.event)
            raise
        self._mark.advance([entry.sequence])
