"""The group-commit writer: events in from the engine, leaves out, nothing lost in silence.

W1 `submit` runs no SQL and does no I/O: it appends to a bounded queue under a lock.
W2 `durable_sequence` is the highest sequence up to which every event is committed, or fsynced in the spill,
or was refused to its caller. An event at or below it survives kill -9.
W3 `submit_durable` returns only after the commit; otherwise it raises `LedgerUnavailable` within its
deadline, and a `Withdrawn` leaf accounts for the sequence.
W4 When the database fails, or the queue is longer than its capacity, class B goes to the spill and is
replayed exactly once. When the spill is full too, `admitting` turns False; events then wait in memory up to
twice the capacity, and beyond that a `GapRecorded` leaf says which sequences are missing.
W5 Recording never blocks scrubbing: no call here waits for the database except `submit_durable`, `flush`
and `close`.
W6 At start, spills are replayed and the custody of this worker's dead incarnations is closed as unproven. A
worker name is one process at a time.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import orjson
from sqlalchemy import Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from kvcustody.audit.append import Appender, parse, register
from kvcustody.audit.events import (
    Context,
    Event,
    GapRecorded,
    HitCounted,
    HitCounters,
    Leaf,
    ReplayCompleted,
    SpillStarted,
    Withdrawn,
    leaves,
)
from kvcustody.audit.pseudonyms import SubjectDirectory, store_names
from kvcustody.audit.recovery import close_dead
from kvcustody.audit.spill import Segment, Spill, SpillFullError
from kvcustody.audit.store import GONE, WRITE, StoreGoneError, check_store, describe, failure, file_identity
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError, LedgerUnavailable


class WriterSettings(NamedTuple):
    """Sizes and waits of a writer."""

    batch: int = 1000
    interval_seconds: float = 0.01
    capacity: int = 65_536
    durable_seconds: float = 5.0
    retry_seconds: float = 0.5
    count_seconds: float = 10.0
    spill_bytes: int = 256 << 20


class WriterStatus(NamedTuple):
    """What a writer's health endpoint shows."""

    admitting: bool
    healthy: bool
    cause: str
    backlog: int
    submitted_sequence: int
    durable_sequence: int
    spilled_bytes: int


class _Entry(NamedTuple):
    sequence: int
    event: Event
    leaves: list[Leaf]


class _Ticket:
    """One class A event whose submitter waits: queued → taken → committed, or refused."""

    __slots__ = ("cause", "done", "state")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.state = "queued"
        self.cause = ""


_YIELD_EVERY = 32  # encoded events between offers of the interpreter lock to the engine's thread
_COUNT_KEYS_MAX = 10_000


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
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._settings = settings or WriterSettings()
        self.incarnation = uuid.uuid4().hex
        self.offset_us = clock.utc_us() - clock.now_us()
        self._directory = SubjectDirectory()
        self._context = Context(self.incarnation, self.offset_us, self._directory)
        self._appender = Appender()
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, Event]] = deque()
        self._held: list[_Entry] = []  # encoded, refused by database and spill, waiting
        self._tickets: dict[int, _Ticket] = {}
        self._counts: dict[tuple[str, str, str, str, str, int], list[int]] = {}
        self._counts_due = time.monotonic() + self._settings.count_seconds
        self._sequence = 0
        self._durable = 0
        self._finished: set[int] = set()
        self._progress = threading.Condition()
        self._dropped: tuple[int, int] | None = None
        self._wake = threading.Event()
        self._idle = False
        self._stop_at = float("inf")
        self._cause = ""  # why the database is down; empty when it is not
        self._spilled = False
        self._full = ""
        self._retry_at = 0.0
        self._retried = False
        check_store(engine)
        self._identity = file_identity(engine)
        self._spill = Spill(spill_directory, self.incarnation, limit_bytes=self._settings.spill_bytes)
        self._worker_lock = _claim(spill_directory, worker)
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
            self._replay()
            with self._engine.connect() as connection:
                now_us = self._clock.now_us()
                self.submit(close_dead(connection, worker, self.incarnation, now_us, self.offset_us))
        except SQLAlchemyError as problem:
            raise failure(self._engine, problem) from problem

    # -- the engine's side ----------------------------------------------------------------------------------

    @property
    def admitting(self) -> bool:
        """False while new custody could not be recorded: stop admitting, never stop scrubbing."""
        return not self._full and len(self._queue) <= self._settings.capacity and self._thread.is_alive()

    @property
    def durable_sequence(self) -> int:
        """W2."""
        return self._durable

    def status(self) -> WriterStatus:
        """A snapshot for health and metrics."""
        return WriterStatus(
            admitting=self.admitting,
            healthy=not (self._cause or self._spilled or self._full),
            cause=self._full or self._cause,
            backlog=len(self._queue) + len(self._held),
            submitted_sequence=self._sequence,
            durable_sequence=self._durable,
            spilled_bytes=self._spill.bytes(),
        )

    def submit(self, events: Sequence[Event]) -> int:
        """Queue events of class B and C; returns the sequence of the last one."""
        with self._lock:
            if HitCounted in map(type, events):
                events = self._count(events)
            first = self._sequence + 1
            self._sequence += len(events)
            if len(self._queue) + len(events) > 2 * self._settings.capacity:
                self._dropped = (self._dropped[0] if self._dropped else first, self._sequence)
            else:
                self._queue.extend(enumerate(events, first))
            last = self._sequence
        if self._idle or len(self._queue) >= self._settings.batch:
            self._wake.set()
        return last

    def submit_durable(self, event: Event, *, timeout_seconds: float | None = None) -> int:
        """Record a class A event before its act: returns its sequence once committed, else raises."""
        ticket = _Ticket()
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
            self._tickets[sequence] = ticket
            self._queue.append((sequence, event))
        self._wake.set()
        if not self._thread.is_alive():
            ticket.cause = "the ledger writer has stopped"
        elif not ticket.done.wait(
            self._settings.durable_seconds if timeout_seconds is None else timeout_seconds
        ):
            ticket.cause = ticket.cause or self._cause or "no commit within the deadline"
        with self._lock:
            if ticket.state == "committed":
                return sequence
            in_flight = ticket.state != "refused"
            ticket.state = "refused"  # the writer drops the ticket when it meets it
        if in_flight:  # still queued, or being committed: account for the sequence either way
            self._emit(Withdrawn(self._clock.now_us(), sequence, getattr(event, "tenant", None)))
        raise LedgerUnavailable(
            f"not recorded, so not done: {ticket.cause}", sequence=sequence, cause=ticket.cause
        )

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until everything submitted before is durable (or refused); False when time ran out."""
        with self._lock:
            target = self._sequence
        self._wake.set()
        with self._progress:
            return self._progress.wait_for(lambda: self._durable >= target, timeout_seconds)

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Drain and stop; raises `LedgerError` when events could be kept nowhere."""
        self._stop_at = time.monotonic() + timeout_seconds
        self._wake.set()
        self._thread.join(timeout_seconds + 5 * self._settings.retry_seconds)
        self._spill.close()
        if self._worker_lock >= 0:
            os.close(self._worker_lock)
            self._worker_lock = -1
        missing = self._sequence - self._durable
        if missing:
            cause = self._full or self._cause or "the writer stopped"
            raise LedgerError(f"`{missing}` events are not recorded: {cause}", missing=missing, cause=cause)

    def _count(self, events: Sequence[Event]) -> list[Event]:
        """Add up the class C events; the others are returned. The caller holds the lock."""
        rest: list[Event] = []
        for event in events:
            if not isinstance(event, HitCounted):
                rest.append(event)
                continue
            key = (event.tenant, event.owner, event.action, event.effect, event.rule, event.revision)
            total = self._counts.get(key)
            if total is None:
                total = self._counts[key] = [event.at_us, 0, 0, 0]
            total[1] += event.requests
            total[2] += event.blocks
            total[3] += event.tokens
        return rest

    def _emit(self, event: Event) -> None:
        """Queue an event of the writer's own, past every limit."""
        with self._lock:
            self._sequence += 1
            self._queue.append((self._sequence, event))

    # -- the writer's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._wait()
                self._cycle()
                if self._stop_at < float("inf") and self._drained():
                    return
        finally:
            with self._lock:
                waiting = list(self._tickets.values())
            for ticket in waiting:
                ticket.cause = "the ledger writer has stopped"
                ticket.done.set()

    def _drained(self) -> bool:
        if time.monotonic() > self._stop_at:
            return True
        with self._lock:
            return not (self._queue or self._held or self._counts or self._dropped)

    def _wait(self) -> None:
        """Sleep until there is work, then a little longer so that a batch can form."""
        if self._held or (not self._queue and self._stop_at == float("inf")):
            until = min(self._counts_due, self._retry_at if self._spilled or self._held else float("inf"))
            self._idle = True
            if self._held or not self._queue:
                self._wake.wait(max(0.001, until - time.monotonic()))
            self._idle = False
        self._wake.clear()
        stopping = self._stop_at < float("inf")
        if not (stopping or self._tickets or len(self._queue) >= self._settings.batch):
            self._wake.wait(self._settings.interval_seconds)

    def _cycle(self) -> None:
        self._flush_counts()
        if self._held:
            self._refuse_waiting()
            if time.monotonic() < self._retry_at:
                return
            entries, self._held = self._held, []
        else:
            entries = self._encode(self._take())
        behind = len(self._queue) > self._settings.capacity
        if (self._spilled or self._cause) and not behind and self._may_retry(entries):
            self._recover()
        if entries and not (self._spilled or self._cause or behind):
            entries = self._commit(entries)
        if entries:
            self._divert(
                entries, "the queue is over its capacity" if behind and not self._cause else self._cause
            )

    def _may_retry(self, entries: list[_Entry]) -> bool:
        if time.monotonic() >= self._retry_at or self._stop_at < float("inf"):
            return True
        return any(entry.sequence in self._tickets for entry in entries)

    def _take(self) -> list[tuple[int, Event]]:
        taken: list[tuple[int, Event]] = []
        given_up: list[int] = []
        with self._lock:
            if self._dropped:
                first, last = self._dropped
                self._dropped = None
                self._sequence += 1
                cause = "events arrived faster than any store could keep them"
                gap = GapRecorded(self._clock.now_us(), cause, first, last)
                self._queue.appendleft((self._sequence, gap))
            while self._queue and len(taken) < self._settings.batch:
                sequence, event = self._queue.popleft()
                ticket = self._tickets.get(sequence)
                if ticket is not None and ticket.state == "refused":
                    del self._tickets[sequence]
                    given_up.append(sequence)
                    continue
                if ticket is not None:
                    ticket.state = "taken"
                taken.append((sequence, event))
        self._advance(given_up)
        return taken

    def _encode(self, items: list[tuple[int, Event]]) -> list[_Entry]:
        if not items:
            return []
        if not self._cause:
            try:
                with self._engine.connect() as connection:
                    self._directory.prefetch(connection, (event for _, event in items))
            except SQLAlchemyError as problem:
                if not _refused(problem):
                    self._lost(problem)
        entries = []
        for number, (sequence, event) in enumerate(items):
            if number % _YIELD_EVERY == 0:
                time.sleep(0)
            try:
                entries.append(_Entry(sequence, event, leaves(event, self._context, sequence)))
            except (LedgerError, TypeError, ValueError, AttributeError) as problem:
                self._unwritable(sequence, event, problem)
        return entries

    def _commit(self, entries: list[_Entry]) -> list[_Entry]:
        """Commit as one transaction, or one by one when an entry is refused; returns what did not get in."""
        try:
            self._write([leaf for entry in entries for leaf in entry.leaves])
        except (SQLAlchemyError, StoreGoneError) as problem:
            if not _refused(problem):
                self._lost(problem)
                return entries
        except (LedgerError, KeyError, TypeError, ValueError, OverflowError):
            pass  # one of them is not writable; the loop below finds out which
        else:
            self._finish(entries)
            return []
        for number, entry in enumerate(entries):
            try:
                self._write(entry.leaves, skip_known=True)  # a commit that failed may have arrived
            except (SQLAlchemyError, StoreGoneError) as problem:
                if not _refused(problem):
                    self._lost(problem)
                    return entries[number:]
                self._unwritable(entry.sequence, entry.event, problem)
            except (LedgerError, KeyError, TypeError, ValueError, OverflowError) as problem:
                self._unwritable(entry.sequence, entry.event, problem)
            else:
                self._finish([entry])
        return []

    def _write(self, made: list[Leaf], *, skip_known: bool = False) -> int:
        names = self._directory.fresh()
        retried = self._retried
        self._guard()
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                store_names(connection, names, skip_known=retried)
                added = self._appender.append(connection, made, skip_known=skip_known).added
        except BaseException:
            self._appender.forget()
            self._retried = True  # the commit may have arrived all the same
            raise
        self._retried = False
        self._directory.settle(names)
        return added

    def _unwritable(self, sequence: int, event: Event, problem: Exception) -> None:
        """An event that no retry can write becomes a gap; its submitter, if waiting, is refused."""
        cause = f"{type(event).__name__} could not be written: {type(problem).__name__}"
        ticket = self._tickets.get(sequence)
        if ticket is not None:
            self._settle(sequence, ticket, "refused", describe(problem))
        self._emit(GapRecorded(self._clock.now_us(), cause, sequence, sequence))

    def _divert(self, entries: list[_Entry], cause: str) -> None:
        """Refuse class A, spill the rest; where the spill refuses too, hold on to them and stop admitting."""
        kept = []
        for entry in entries:
            ticket = self._tickets.get(entry.sequence)
            if ticket is None:
                kept.append(entry)
            else:
                if self._settle(entry.sequence, ticket, "refused", cause):
                    tenant = getattr(entry.event, "tenant", None)
                    self._emit(Withdrawn(self._clock.now_us(), entry.sequence, tenant))
                self._advance([entry.sequence])
        if not kept:
            return
        if not (self._spilled or self._full):  # the first thing in a spill says why it began
            with self._lock:
                self._sequence += 1
                sequence = self._sequence
            started = SpillStarted(self._clock.now_us(), cause, kept[0].sequence)
            kept.insert(0, _Entry(sequence, started, leaves(started, self._context, sequence)))
        names = self._directory.fresh()
        records = [b"P" + orjson.dumps(row) for row in names]
        records += [b"L" + leaf.data for entry in kept for leaf in entry.leaves]
        try:
            self._spill.append(records)
        except SpillFullError as problem:
            self._full = problem.message
            self._held = kept
            self._retry_at = time.monotonic() + self._settings.retry_seconds
            return
        self._directory.settle(names)
        self._full = ""
        if not self._spilled:
            self._spilled = True
            self._retry_at = time.monotonic() + self._settings.retry_seconds
        self._finish(kept)

    def _refuse_waiting(self) -> None:
        """Nothing can be recorded now: refuse those who wait for it at once."""
        with self._lock:
            waiting = list(self._tickets.items())
        for _, ticket in waiting:
            ticket.cause = self._full or self._cause
            ticket.done.set()

    def _settle(self, sequence: int, ticket: _Ticket, state: str, cause: str = "") -> bool:
        """Decide a ticket unless its submitter has given up; False when that came first."""
        with self._lock:
            self._tickets.pop(sequence, None)
            if ticket.state == "refused":
                return False
            ticket.state, ticket.cause = state, cause
        ticket.done.set()
        return True

    def _finish(self, entries: Iterable[_Entry]) -> None:
        """These entries are durable: tell those who wait, and let a recorded gap stand for what it names."""
        done: list[int] = []
        for entry in entries:
            done.append(entry.sequence)
            if isinstance(entry.event, GapRecorded):
                done.extend(range(entry.event.first_sequence, entry.event.last_sequence + 1))
            ticket = self._tickets.get(entry.sequence)
            if ticket is not None:
                self._settle(entry.sequence, ticket, "committed")
        self._advance(done)

    def _advance(self, sequences: list[int]) -> None:
        """Move W2's mark over everything finished without a hole."""
        if not sequences:
            return
        self._finished.update(sequences)
        mark = self._durable
        while mark + 1 in self._finished:
            mark += 1
            self._finished.discard(mark)
        with self._progress:
            self._durable = mark
            self._progress.notify_all()

    def _guard(self) -> None:
        """A ledger file that was deleted or replaced under an open connection would swallow commits."""
        if file_identity(self._engine) != self._identity:
            raise StoreGoneError("the ledger's file was removed or replaced")

    def _lost(self, problem: Exception) -> None:
        self._cause = describe(problem)
        self._retry_at = time.monotonic() + self._settings.retry_seconds
        self._engine.dispose()

    def _recover(self) -> None:
        try:
            self._identity = file_identity(self._engine)
            if self._identity == GONE:
                raise StoreGoneError("the ledger's file is missing")
            check_store(self._engine)
            self._replay()
        except (SQLAlchemyError, LedgerError) as problem:
            self._cause = describe(problem)
            self._retry_at = time.monotonic() + self._settings.retry_seconds
        else:
            self._cause = self._full = ""
            self._spilled = False

    def _replay(self) -> None:
        """Read every spill into the ledger, each leaf once, and delete it only after its last commit."""
        segments = self._spill.segments()
        added = duplicates = torn = 0
        try:
            for segment in segments:
                new, known = self._replay_one(segment)
                added, duplicates, torn = added + new, duplicates + known, torn + segment.torn_bytes
            if segments:  # on record before the evidence of the outage goes
                with self._lock:
                    self._sequence += 1
                    sequence = self._sequence
                done = ReplayCompleted(self._clock.now_us(), len(segments), added, duplicates, torn)
                try:
                    self._write(leaves(done, self._context, sequence))
                except BaseException:
                    self._queue.append((sequence, done))
                    raise
                self._advance([sequence])
            for segment in segments:
                segment.retire()
        finally:
            for segment in segments:
                segment.close()

    def _replay_one(self, segment: Segment) -> tuple[int, int]:
        added = total = 0
        chunk: list[bytes] = []

        def commit() -> int:
            rows = [tuple(orjson.loads(record[1:])) for record in chunk if record[:1] == b"P"]
            made = [parse(record[1:]) for record in chunk if record[:1] == b"L"]
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                store_names(connection, rows, skip_known=True)
            return self._write(made, skip_known=True)

        for record in segment.records():
            chunk.append(record)
            total += record[:1] == b"L"
            if len(chunk) >= self._settings.batch:
                added += commit()
                chunk.clear()
        if chunk:
            added += commit()
        return added, total - added

    def _flush_counts(self) -> None:
        """Turn the added-up class C events into counters, on time, at the end, or when they are many."""
        due = time.monotonic() >= self._counts_due or self._stop_at < float("inf")
        if not due and len(self._counts) < _COUNT_KEYS_MAX:
            return
        self._counts_due = time.monotonic() + self._settings.count_seconds
        with self._lock:
            counts, self._counts = self._counts, {}
        now = self._clock.now_us()
        for key, (since, requests, blocks, tokens) in counts.items():
            self._emit(HitCounters(now, *key, since, requests, blocks, tokens))


def _refused(problem: Exception) -> bool:
    """True when the statement, not the database, is at fault."""
    if isinstance(problem, StoreGoneError):
        return False
    return isinstance(problem, (IntegrityError, DataError)) or not isinstance(problem, DBAPIError)


def _claim(directory: Path, worker: str) -> int:
    """Hold the worker's name on this machine for the life of the process."""
    path = directory / f"worker-{quote(worker, safe='')}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as problem:
        raise LedgerError(f"spill directory `{directory}`: {problem.strerror}", path=directory) from problem
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(descriptor)
        raise LedgerError(f"worker `{worker}` is already running", worker=worker) from problem
    return descriptor
