"""The group-commit writer: events in from the engine, leaves out, nothing lost in silence.

1. `submit` runs no SQL and does no I/O: it appends to a bounded queue under a lock.
2. `durable_sequence` is the highest sequence up to which every event is committed, or fsynced in the spill, or was
   refused to its caller. An event at or below it survives kill -9.
3. `submit_durable` returns only after the commit; otherwise it raises `LedgerUnavailable` within its deadline, and a
   `Withdrawn` leaf accounts for the sequence.
4. When the database fails, or the queue is longer than its capacity, class B goes to the spill and is replayed
   exactly once. When the spill is full too, `admitting` turns False; events then wait in memory up to twice the
   capacity, and beyond that a `GapRecorded` leaf says which sequences are missing.
5. Recording never blocks scrubbing: no call here waits for the database except `submit_durable`, `flush` and `close`.
6. At start, spills are replayed and the custody of this worker's dead incarnations is closed as unproven. A worker
   name is one process at a time.
7. Used as a context manager, it records the orderly end of a process without memory of its own, whatever ended the
   block: such a process comes back as dead only where it was killed. One with memory records its end by itself, with
   its pool's counters, once its custody has ended.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.database.engine import WRITE, StoreGoneError, describe, ledger_error
from kvcustody.audit.events import Context, Event, GapRecorded, WorkerStopped
from kvcustody.audit.events.batch_encoder import NOTHING, BatchEncoder, Encoded, Entry, encoded_of
from kvcustody.audit.query.issuers import known_issuers
from kvcustody.audit.subjects.pseudonym_directory import SubjectDirectory, names_anybody
from kvcustody.audit.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.tlog.merkle import TreeError
from kvcustody.audit.tlog.root_sealer import INTERVAL_SECONDS, RootSealer
from kvcustody.audit.writer.append_leaves import register
from kvcustody.audit.writer.committer import Committer, refused
from kvcustody.audit.writer.crash_recovery import close_dead
from kvcustody.audit.writer.database_outage import DatabaseOutage
from kvcustody.audit.writer.durable_watermark import DurableWatermark
from kvcustody.audit.writer.event_queue import EventQueue, QueuedEvents
from kvcustody.audit.writer.spill_file import SpillFile
from kvcustody.audit.writer.tenant_shares import TenantShares
from kvcustody.audit.writer.worker_lock import lock_worker_name
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError, LedgerUnavailable
from kvcustody.tenants import Issuers

_UNWRITABLE = (LedgerError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)


_BEHIND = 4  # batches committed as one where so many wait: fewer waits for the disk, pages written once


class WriterSettings(NamedTuple):
    """Sizes and waits of a writer: `batch` events are committed together, four times as many when it is behind."""

    batch: int = 1000
    interval_seconds: float = 0.05
    capacity: int = 65_536
    durable_seconds: float = 5.0
    retry_seconds: float = 0.5
    count_seconds: float = 10.0
    spill_bytes: int = 256 << 20
    root_interval_seconds: float = INTERVAL_SECONDS


class WriterStatus(NamedTuple):
    """What a writer's health endpoint shows."""

    admitting: bool
    healthy: bool
    cause: str
    backlog: int
    submitted_sequence: int
    durable_sequence: int
    spilled_bytes: int


class Awaited(NamedTuple):
    """A class A event that was queued, and its ticket."""

    sequence: int
    event: Event
    ticket: QueuedEvents


class EventWriter:
    """Owns the thread that writes one incarnation's events; one a process, closed at its end."""

    def __init__(
        self,
        engine: Engine,
        *,
        worker: str,
        clock: Clock,
        spill_directory: Path,
        settings: WriterSettings | None = None,
        subject_keys: SubjectKeys | None = None,
        clear_names: bool = False,
    ) -> None:
        """`clear_names`: without `subject_keys`, subjects' names stand in the ledger; else no event may name one."""
        self._engine = engine
        self._worker = worker
        self._clock = clock
        self._settings = settings = settings or WriterSettings()
        self.incarnation = uuid.uuid4().hex
        self.offset_us = clock.utc_us() - clock.now_us()
        self.subject_keys = subject_keys
        self._directory = SubjectDirectory(subject_keys, clear_names=clear_names)
        self._context = Context(self.incarnation, self.offset_us, self._directory)
        self._encoder = BatchEncoder(self._context)
        self.shares = TenantShares(events=settings.capacity, spill_bytes=settings.spill_bytes)
        self._intake = EventQueue(
            clock,
            self.shares,
            capacity=settings.capacity,
            batch=settings.batch,
            count_seconds=settings.count_seconds,
        )
        self._mark = DurableWatermark()
        self._ahead = NOTHING  # encoded during the last commit
        self._stop_at = float("inf")
        self._end_recorded = False
        self._committer = Committer(engine, self._directory, clock)
        self._sealer = RootSealer(engine, clock, settings.root_interval_seconds)
        self._spill = SpillFile(spill_directory, self.incarnation, limit_bytes=settings.spill_bytes)
        self._outage = DatabaseOutage(
            engine,
            clock,
            self._context,
            intake=self._intake,
            mark=self._mark,
            directory=self._directory,
            committer=self._committer,
            spill=self._spill,
            shares=self.shares,
            retry_seconds=settings.retry_seconds,
            batch=settings.batch,
        )
        self._worker_lock = lock_worker_name(spill_directory, worker)
        try:
            self._start(worker)
        except BaseException:
            os.close(self._worker_lock)
            raise
        self._thread = threading.Thread(target=self._run, name="kvcustody-ledger", daemon=True)
        self._thread.start()

    def _start(self, worker: str) -> None:
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                register(connection, self.incarnation, worker, self.offset_us, self._clock.utc_us())
            self._outage.replay()
            with self._engine.connect() as connection:
                now_us = self._clock.now_us()
                self.submit(close_dead(connection, worker, self.incarnation, now_us, self.offset_us))
        except SQLAlchemyError as problem:
            raise ledger_error(self._engine, problem) from problem

    # -- the engine's side ----------------------------------------------------------------------------------

    @property
    def admitting(self) -> bool:
        """False while new custody could not be recorded: stop admitting, never stop scrubbing."""
        return (
            not self._outage.full and len(self._intake) <= self._settings.capacity and self._thread.is_alive()
        )

    @property
    def recording(self) -> bool:
        """False while events go to the spill, or nowhere: the database has them later."""
        return not (self._outage.active or self._outage.full)

    @property
    def engine(self) -> Engine:
        """The database that this writer writes to."""
        return self._engine

    @property
    def durable_sequence(self) -> int:
        """Rule 2."""
        return self._mark.sequence

    def status(self) -> WriterStatus:
        """A snapshot for health and metrics."""
        return WriterStatus(
            admitting=self.admitting,
            healthy=self.recording,
            cause=self._outage.cause,
            backlog=len(self._intake) + len(self._ahead.items) + len(self._outage.held),
            submitted_sequence=self._intake.sequence,
            durable_sequence=self._mark.sequence,
            spilled_bytes=self._spill.bytes(),
        )

    def issuers(self) -> Issuers:
        """Whose tenants the ledger names; raises `LedgerUnavailable` where it cannot be asked."""
        try:
            self._committer.check_there()
            with self._engine.connect() as connection:
                return known_issuers(connection)
        except (SQLAlchemyError, StoreGoneError) as problem:
            raise LedgerUnavailable(f"the ledger cannot be asked: {describe(problem)}") from problem

    def submit(self, events: Sequence[Event]) -> int:
        """Queue events of class B and C; returns the sequence of the last one."""
        return self._intake.submit(events)

    def submit_durable(self, event: Event, *, timeout_seconds: float | None = None) -> int:
        """Record a class A event before its act: returns its sequence once committed, else raises."""
        decided = threading.Event()
        awaited = self.begin_durable(event, decided.set)
        decided.wait(self._settings.durable_seconds if timeout_seconds is None else timeout_seconds)
        return self.end_durable(awaited)

    def begin_durable(self, event: Event, decided: Callable[[], object]) -> Awaited:
        """Queue a class A event: `decided` is called, on another thread, when `end_durable` need not be waited with."""
        sequence, ticket = self._intake.submit_ticket(event, decided)
        if not self._thread.is_alive():
            ticket.cause = "the ledger writer has stopped"
            decided()
        return Awaited(sequence, event, ticket)

    def end_durable(self, awaited: Awaited) -> int:
        """What became of an event by now: its sequence where it is committed; else it is given up, and this raises."""
        sequence, event, ticket = awaited
        if not self._intake.give_up(sequence, event, ticket):
            return sequence
        cause = ticket.cause or self._outage.down or "no commit within the deadline"
        raise LedgerUnavailable(f"not recorded, so not done: {cause}", sequence=sequence, cause=cause)

    @property
    def durable_seconds(self) -> float:
        """How long a class A event is waited for."""
        return self._settings.durable_seconds

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until everything submitted before is durable (or refused), and sealed; False when time ran out.

        What the database does not have yet is sealed later.
        """
        target = self._intake.seal()
        self._intake.hurry = True
        self._intake.wake.set()
        return self._mark.reached(target, timeout_seconds) and self.seal(timeout_seconds)

    def seal(self, timeout_seconds: float = 30.0) -> bool:
        """Have what is committed by now sealed at once, because somebody waits for a proof; False when time ran out."""
        done = self._sealer.ask()
        self._intake.hurry = True
        self._intake.wake.set()
        return done.wait(timeout_seconds) if self._thread.is_alive() else True

    def seal_soon(self) -> None:
        """The same within about a second, and nobody waits for it here."""
        self._sealer.soon()
        self._intake.wake.set()

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Drain and stop; raises `LedgerError` when events could be kept nowhere."""
        self._stop_at = time.monotonic() + timeout_seconds
        self._intake.wake.set()
        self._thread.join(timeout_seconds + 5 * self._settings.retry_seconds)
        self._spill.close()
        if self._worker_lock >= 0:
            os.close(self._worker_lock)
            self._worker_lock = -1
        missing = self._intake.sequence - self._mark.sequence
        if missing:
            cause = self._outage.cause or "the writer stopped"
            raise LedgerError(f"`{missing}` events are not recorded: {cause}", missing=missing, cause=cause)

    def record_end(self) -> None:
        """Put on record, once, that this process ends in order and held no memory of its own (rule 7)."""
        if not self._end_recorded:
            self._end_recorded = True
            self.submit([WorkerStopped(self._clock.now_us(), self._worker, "closed", 0, ())])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.record_end()
        finally:
            self.close()

    # -- the writer's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._wait()
                self._cycle()
                if self._stopping and self._drained():
                    return
        finally:
            self._intake.release_all("the ledger writer has stopped")
            self._sealer.end(seal=not self._outage.active)
            self._committer.close()

    @property
    def _stopping(self) -> bool:
        return self._stop_at < float("inf")

    def _drained(self) -> bool:
        if time.monotonic() > self._stop_at:
            return True
        return not (self._ahead.items or self._outage.held) and self._intake.empty

    def _wait(self) -> None:
        """Sleep until there is work, then a little longer so that a batch can form."""
        if self._ahead.items:
            return
        intake = self._intake
        if self._outage.held or not (len(intake) or self._stopping):
            retry_at = self._outage.retry_at if self._outage.spilled or self._outage.held else float("inf")
            seal_at = float("inf") if self._outage.active else time.monotonic() + self._sealer.due_seconds
            until = min(intake.counts_due, retry_at, seal_at)
            intake.idle = True
            if self._outage.held or not len(intake):
                intake.wake.wait(max(0.001, until - time.monotonic()))
            intake.idle = False
        intake.wake.clear()
        if not (self._stopping or intake.awaited or intake.hurry or len(intake) >= self._settings.batch):
            intake.wake.wait(self._settings.interval_seconds)
        intake.hurry = False

    def _cycle(self) -> None:
        if self._outage.active:
            self._sealer.give_up()
        else:
            self._sealer.turn()
        self._intake.flush_counts(now=self._stopping)
        if self._outage.held:
            self._intake.release_all(self._outage.cause)
            if not self._outage.due:
                return
            work, self._outage.held = encoded_of(self._outage.held), []
        elif self._ahead.items:
            work, self._ahead = self._ahead, NOTHING
        else:
            work = self._encode()
        # A full spill takes nothing, however long the queue is: then only the database can.
        behind = not self._outage.full and len(self._intake) > self._settings.capacity
        if self._outage.active and not behind and self._may_retry(work):
            self._outage.recover()
        if not work.items:
            return
        left = work.entries() if self._outage.active or behind else self._commit(work)
        if left:
            over = "the queue is over its capacity"
            cause = over if behind and not self._outage.down else self._outage.down
            self._outage.divert(left, cause, self._finish)

    def _may_retry(self, work: Encoded) -> bool:
        if self._outage.due or self._stopping:
            return True
        return any(self._intake.awaits(sequence) for sequence, _ in work.items)

    def _encode(self) -> Encoded:
        """The next events of the queue as leaves."""
        items, given_up = self._intake.take(_BEHIND * self._settings.batch)
        self._mark.advance(given_up)
        if not items:
            return NOTHING
        if not self._outage.down and names_anybody(event for _, event in items):
            try:
                self._committer.check_there()
                with self._engine.connect() as connection:
                    self._directory.prefetch(connection, (event for _, event in items))
            except (SQLAlchemyError, StoreGoneError) as problem:
                if not refused(problem):
                    self._outage.lost(problem)
        work = self._encoder.encode(items)
        for unwritten in work.refused:
            self._unwritable(*unwritten)
        return work

    def _encode_ahead(self) -> None:
        """While a transaction runs: the next batch, when there is a whole one."""
        if len(self._intake) >= self._settings.batch and not self._outage.held:
            self._ahead = self._encode()

    def _commit(self, work: Encoded) -> list[Entry]:
        """Commit as one transaction, or one by one when an entry is refused; returns what did not get in."""
        # Another thread for the commit is worth its price where there is something to do meanwhile.
        meanwhile = self._encode_ahead if len(work.items) >= self._settings.batch // 2 else None
        try:
            self._committer.write(work.batch, meanwhile=meanwhile)
        except (SQLAlchemyError, StoreGoneError, TreeError) as problem:
            if not refused(problem):
                self._outage.lost(problem)
                return work.entries()
        except _UNWRITABLE:
            pass  # one of them is not writable; the loop below finds out which
        else:
            self._finish(work.items)
            return []
        return self._commit_singly(work.entries())

    def _commit_singly(self, entries: list[Entry]) -> list[Entry]:
        for number, entry in enumerate(entries):
            try:  # a commit that failed may have arrived
                self._committer.write(entry.batch(), skip_known=True)
            except (SQLAlchemyError, StoreGoneError, TreeError) as problem:
                if not refused(problem):
                    self._outage.lost(problem)
                    return entries[number:]
                self._unwritable(entry.sequence, entry.event, problem)
            except _UNWRITABLE as problem:
                self._unwritable(entry.sequence, entry.event, problem)
            else:
                self._finish([(entry.sequence, entry.event)])
        return []

    def _unwritable(self, sequence: int, event: Event, problem: Exception) -> None:
        """An event that no retry can write becomes a gap; its submitter, if waiting, is refused."""
        cause = f"{type(event).__name__} could not be written: {type(problem).__name__}"
        self._intake.settle(sequence, "refused", describe(problem))
        self._intake.emit(GapRecorded(self._clock.now_us(), cause, sequence, sequence))

    def _finish(self, items: Sequence[tuple[int, Event]]) -> None:
        """These are durable: tell those who wait, and let a recorded gap stand for what it names."""
        done = [sequence for sequence, _ in items]
        if self._intake.awaited:
            for sequence in filter(self._intake.awaits, done):
                self._intake.settle(sequence, "committed")
        if GapRecorded in {event.__class__ for _, event in items}:
            for _, event in items:
                if isinstance(event, GapRecorded):
                    done.extend(range(event.first_sequence, event.last_sequence + 1))
        self._mark.advance(done)
