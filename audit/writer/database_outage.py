"""When the database is away: what is refused, spilled, held, and read back.

1. Class A is refused at once, and what accounts for a refusal is kept before the mark passes it.
2. Everything else goes to the spill; where the spill is full too it is held in memory, and nothing more is admitted.
3. The database counts as back only after every spill was replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import orjson
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.database.engine import describe
from kvcustody.audit.events import Context, Event, ReplayCompleted, SpillStarted, leaves
from kvcustody.audit.events.batch import read_leaves
from kvcustody.audit.events.batch_encoder import Entry
from kvcustody.audit.events.column_encoder import Item
from kvcustody.audit.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.writer.committer import Committer
from kvcustody.audit.writer.durable_watermark import DurableWatermark
from kvcustody.audit.writer.event_queue import EventQueue
from kvcustody.audit.writer.spill_file import SpillFile, SpillFullError
from kvcustody.audit.writer.spill_replay import SpillReplay, replay
from kvcustody.audit.writer.tenant_shares import TenantShares, sizes_of
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError


class DatabaseOutage:
    """The state of one writer's database, and what happens to entries that cannot be committed."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        context: Context,
        *,
        intake: EventQueue,
        mark: DurableWatermark,
        directory: SubjectDirectory,
        committer: Committer,
        spill: SpillFile,
        shares: TenantShares,
        retry_seconds: float,
        batch: int,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._context = context
        self._intake = intake
        self._mark = mark
        self._directory = directory
        self._committer = committer
        self._spill = spill
        self._shares = shares
        self._retry_seconds = retry_seconds
        self._batch = batch
        self.down = ""  # why the database is down; empty when it is not
        self.spilled = False
        self.full = ""  # why the spill takes no more
        self.held: list[Entry] = []  # refused by database and spill, waiting
        self.retry_at = 0.0

    @property
    def cause(self) -> str:
        """Why events are not committed; empty when they are, or when only a replay is due."""
        return self.full or self.down

    @property
    def active(self) -> bool:
        """Events go to the spill, or nowhere."""
        return bool(self.spilled or self.down)

    @property
    def due(self) -> bool:
        """The next try at the database is due."""
        return time.monotonic() >= self.retry_at

    def lost(self, problem: Exception) -> None:
        """The database failed."""
        self.down = describe(problem)
        self._wait()
        self._engine.dispose()

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
            self._wait()
            return False
        self._directory.settle(names)
        self._shares.spilled(sizes_of(entries, names))
        self.full = ""
        if not self.spilled:
            self.spilled = True
            self._wait()
        return True

    def _entry(self, event: Event) -> Entry:
        """An event of the writer's own, to be written at once."""
        sequence = self._intake.next_sequence()
        return Entry(sequence, event, [leaf.data for leaf in leaves(event, self._context, sequence)])

    def recover(self) -> None:
        """Try the database again: replay every spill, then go on."""
        try:
            self._committer.reopen()
            self.replay()
        except (SQLAlchemyError, LedgerError) as problem:
            self.down = describe(problem)
            self._wait()
        else:
            self.down = self.full = ""
            self.spilled = False
            self._shares.replayed()

    def replay(self) -> None:
        """Read every spill into the ledger; raises what the database raises."""
        replay(self._spill, self._committer, self._report, batch=self._batch)

    def _report(self, found: SpillReplay) -> None:
        """Commit what a replay found."""
        sequence = self._intake.next_sequence()
        done = ReplayCompleted(self._clock.now_us(), *found)
        try:
            self._committer.write(read_leaves([leaf.data for leaf in leaves(done, self._context, sequence)]))
        except BaseException:
            self._intake.requeue(sequence, done)
            raise
        self._mark.advance([sequence])

    def _wait(self) -> None:
        self.retry_at = time.monotonic() + self._retry_seconds
