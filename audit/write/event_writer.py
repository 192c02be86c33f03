"""The group-commit writer: events in from the engine, leaves out to a sink, no silent loss.

1. `submit` runs no SQL and does no I/O: it appends to a bounded queue under a lock.
2. `durable_sequence` is the highest sequence up to which every event was acknowledged by the sink, fsynced in the
   spill, or refused to its caller. An event at or below it survives kill -9.
3. `submit_durable` returns only after the sink's acknowledgement, which means committed. Otherwise it raises
   `LedgerUnavailable` within its deadline, and a `Withdrawn` leaf accounts for the sequence. While the sink has not
   answered for longer than that, it raises at once and queues nothing. So a caller waits only once.
4. When the sink fails, or the queue is longer than its capacity, class B goes to the spill and is replayed exactly
   once. When the spill is full too, `admitting` turns False. Events then wait in memory up to twice the capacity.
   Beyond that, a `GapRecorded` leaf names the missing sequences.
5. Recording never blocks scrubbing: no call here waits for the sink except `submit_durable`, `flush`, `issuers` and
   `close`.
6. At start, spills are replayed and the custody of this worker's dead incarnations is closed as unproven; where the
   sink may be away then, both happen when it is back. Only one process at a time may use a worker name.
7. Used as a context manager, it records the orderly end of a process without memory of its own, whatever ended the
   block. So such a process counts as dead only if it was killed. A process with memory records its end itself, with its
   pool's counters, once its custody has ended.
8. `close` drains, and asks the sink once more if events are in the spill.
9. Spilled events are handed in after live batches, in at most `replay_share` of the time.
10. An order that no worker would follow is refused with `UnsignedOrderError`, and nothing that came with it is queued
    (`audit.store.database.signed_orders`, 5).
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Final, NamedTuple, Self

from sqlalchemy import Engine

from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.kinds import Event, GapRecorded, WorkerStopped
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch_encoder import NOTHING, BatchEncoder, Encoded, Entry, encoded_of
from kvcustody.audit.store.database.engine import describe
from kvcustody.audit.store.database.signed_orders import SignedOrders, check_orders, orders_of
from kvcustody.audit.tlog.root_sealer import INTERVAL_SECONDS
from kvcustody.audit.write.committer import DatabaseSink, closing_committer
from kvcustody.audit.write.crash_recovery import close_predecessors
from kvcustody.audit.write.event_queue import DurableWatermark, EventQueue, QueuedEvents, TenantShares
from kvcustody.audit.write.outage import Outage
from kvcustody.audit.write.sink import BatchRefusedError, LedgerSink, Life, SinkAwayError
from kvcustody.audit.write.spill_file import SpillFile, lock_worker_name
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError, LedgerUnavailable
from kvcustody.guarding_thread import GuardingThread, not_guarding
from kvcustody.tenants import Issuers

Call = Callable[[], None]

_BEHIND = 4  # batches handed in as one where so many wait: fewer waits for the disk, pages written once
_END_SECONDS = 5.0  # what a call that is under way at the end may take


ENGINE_DURABLE_SECONDS: Final = 2.0
"""`durable_seconds` of a worker: its engine's thread waits, and every request with it."""


class WriterSettings(NamedTuple):
    """Sizes and waits of a writer: `batch` events are committed together, four times as many when it is behind."""

    batch: int = 1000
    interval_seconds: float = 0.05
    capacity: int = 65_536
    durable_seconds: float = 5.0
    retry_seconds: float = 0.5
    count_seconds: float = 10.0
    spill_bytes: int = 2 << 30
    root_interval_seconds: float = INTERVAL_SECONDS
    replay_share: float = 0.5


class WriterStatus(NamedTuple):
    """The writer's health.

    `spill_seconds`: how long the spill takes what comes at the rate of the last minute; None where nothing is written
    that says so. `replaying`: what was spilled is being handed in, and `spilled_bytes` of it are left.
    """

    admitting: bool
    healthy: bool
    cause: str
    backlog: int
    submitted_sequence: int
    durable_sequence: int
    spilled_bytes: int
    spill_seconds: float | None = None
    replaying: bool = False


class Awaited(NamedTuple):
    """A class A event that was queued, and its ticket."""

    sequence: int
    event: Event
    ticket: QueuedEvents


class LedgerWriter:
    """Owns the thread that writes one incarnation's events; one for each process, closed at its end."""

    def __init__(
        self,
        sink: LedgerSink,
        *,
        worker: str,
        clock: Clock,
        spill_directory: Path,
        settings: WriterSettings | None = None,
        may_be_away: bool = False,
        orders: SignedOrders | None = None,
    ) -> None:
        """`may_be_away`: where the sink cannot be reached, begin with the spill. The sink is closed with the writer.

        `orders` signs the leaves of orders (rule 10).
        """
        self._orders = orders
        self._sink = sink
        self._worker = worker
        self._clock = clock
        self._settings = settings = settings or WriterSettings()
        self.incarnation = uuid.uuid4().hex
        self.offset_us = clock.utc_us() - clock.now_us()
        self._directory = sink.directory
        sign = None if orders is None else orders.sign
        context = Context(self.incarnation, self.offset_us, self._directory, sign)
        self._encoder = BatchEncoder(context)
        self.shares = TenantShares(events=settings.capacity, spill_bytes=settings.spill_bytes)
        self._intake = EventQueue(
            clock,
            self.shares,
            capacity=settings.capacity,
            batch=settings.batch,
            count_seconds=settings.count_seconds,
            offset_us=self.offset_us,
        )
        self._mark = DurableWatermark()
        self._most = min(_BEHIND * settings.batch, sink.batch_leaves)
        self._ahead = NOTHING  # encoded during the last commit
        self._was_busy = False  # the last cycle wrote something
        self._turn_began: float | None = None  # of the writer's thread, while it has work
        self._aside = _SideThread()
        self._stop_at = float("inf")
        self._end_recorded = self._tried_at_end = False
        self._sealer = sink.sealer
        self._spill = SpillFile(spill_directory, self.incarnation, limit_bytes=settings.spill_bytes)
        self._outage = Outage(
            sink,
            Life(worker, self.incarnation, self.offset_us),
            clock,
            context,
            intake=self._intake,
            mark=self._mark,
            spill=self._spill,
            shares=self.shares,
            retry_seconds=settings.retry_seconds,
            batch=self._most,
            replay_share=settings.replay_share,
        )
        self._worker_lock = lock_worker_name(spill_directory, worker)
        try:
            self._start(may_be_away)
        except BaseException:
            os.close(self._worker_lock)
            sink.close()
            raise
        self._thread = GuardingThread(self._run, name="kvcustody-ledger", goes_on=False)
        self._thread.start()

    def _start(self, may_be_away: bool) -> None:
        try:
            self._outage.catch_up()
        except SinkAwayError as away:
            if not (may_be_away and away.passing):
                raise away.error from away
            self._outage.lost(away)
        except BatchRefusedError as problem:
            raise LedgerError(f"a replay cannot be put on record: {problem.cause}") from problem

    # -- the engine's side ----------------------------------------------------------------------------------

    @property
    def admitting(self) -> bool:
        """Whether new custody can be recorded and guarded; if not, stop admitting, but never stop scrubbing."""
        return (
            not self._outage.full
            and len(self._intake) <= self._settings.capacity
            and self._thread.is_alive()
            and not not_guarding()
        )

    @property
    def recording(self) -> bool:
        """Whether events go to the sink; if not, they go to the spill or nowhere, and the ledger gets them later."""
        return not (self._outage.active or self._outage.full)

    @property
    def down(self) -> str:
        """Why the sink accepts nothing; empty while it does."""
        return self._outage.down

    @property
    def durable_sequence(self) -> int:
        """The sequence of rule 2."""
        return self._mark.sequence

    def status(self) -> WriterStatus:
        """Return a snapshot for health and metrics."""
        spilled_bytes = max(0, self._spill.bytes() - self._outage.replayed_bytes)
        rate = self._bytes_per_second()
        return WriterStatus(
            admitting=self.admitting,
            healthy=self.recording and not self._outage.spilled,
            cause=self._outage.cause or ("spilled events are being submitted" if self._outage.replaying else ""),
            backlog=len(self._intake) + len(self._ahead.items) + len(self._outage.held),
            submitted_sequence=self._intake.sequence,
            durable_sequence=self._mark.sequence,
            spilled_bytes=spilled_bytes,
            spill_seconds=(self._settings.spill_bytes - spilled_bytes) / rate if rate else None,
            replaying=self._outage.replaying,
        )

    def _bytes_per_second(self) -> float:
        """At what rate a spill grows, or would."""
        return self._spill.bytes_per_second()

    def issuers(self) -> Issuers:
        """Return the issuers of the ledger's tenants; raises `LedgerUnavailable` if it cannot be asked."""
        if self._outage.down:
            raise LedgerUnavailable(f"the ledger cannot be asked: {self._outage.down}")
        try:
            return self._sink.issuers()
        except SinkAwayError as away:
            raise LedgerUnavailable(f"the ledger cannot be asked: {away.cause}") from away

    def submit(self, events: Sequence[Event]) -> int:
        """Queue events of class B and C; return the sequence of the last one. Raises by rule 10."""
        if self._orders is not None:
            check_orders(self._orders, events)
        return self._intake.submit(events)

    def submit_durable(self, event: Event, *, timeout_seconds: float | None = None) -> int:
        """Record a class A event before its act: return its sequence once committed, else raise."""
        turn_began, patience = self._turn_began, self._settings.durable_seconds
        if timeout_seconds is None and turn_began is not None and time.monotonic() - turn_began > patience:
            cause = self._outage.down or "the ledger does not answer"
            raise LedgerUnavailable(f"not done because it could not be recorded: {cause}", cause=cause)
        decided = threading.Event()
        awaited = self.begin_durable(event, decided.set)
        decided.wait(self._settings.durable_seconds if timeout_seconds is None else timeout_seconds)
        return self.end_durable(awaited)

    def begin_durable(self, event: Event, decided: Callable[[], object]) -> Awaited:
        """Queue a class A event; `decided` is called on another thread once `end_durable` need not wait.

        Raises by rule 10.
        """
        if self._orders is not None:
            check_orders(self._orders, (event,))
        sequence, ticket = self._intake.submit_ticket(event, decided)
        if not self._thread.is_alive():
            ticket.cause = "the ledger writer has stopped"
            decided()
        return Awaited(sequence, event, ticket)

    def end_durable(self, awaited: Awaited) -> int:
        """Return a class A event's sequence if it is committed by now; else give it up and raise."""
        sequence, event, ticket = awaited
        if not self._intake.give_up(sequence, event, ticket):
            return sequence
        cause = ticket.cause or self._outage.down or "no commit within the deadline"
        raise LedgerUnavailable(f"not done because it could not be recorded: {cause}", sequence=sequence, cause=cause)

    @property
    def durable_seconds(self) -> float:
        """The time limit for a class A event."""
        return self._settings.durable_seconds

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until everything submitted before is durable (or refused), and sealed; return False on timeout.

        What the database does not have yet is sealed later.
        """
        target = self._intake.seal()
        self._intake.hurry = True
        self._intake.wake.set()
        return self._mark.reached(target, timeout_seconds) and self.seal(timeout_seconds)

    def seal(self, timeout_seconds: float = 30.0) -> bool:
        """Seal what is committed immediately, because somebody waits for a proof; return False on timeout."""
        if self._sealer is None:
            return True  # the control plane seals
        done = self._sealer.ask()
        self._intake.hurry = True
        self._intake.wake.set()
        return done.wait(timeout_seconds) if self._thread.is_alive() else True

    def seal_soon(self) -> None:
        """Request a seal within about a second, without waiting."""
        if self._sealer is not None:
            self._sealer.soon()
            self._intake.wake.set()

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Drain and stop; raises `LedgerError` if events could not be stored anywhere (rule 8)."""
        self._stop_at = time.monotonic() + timeout_seconds
        self._intake.wake.set()
        self._thread.join(timeout_seconds + _END_SECONDS)
        self._spill.close()
        if self._worker_lock >= 0:
            os.close(self._worker_lock)
            self._worker_lock = -1
        missing = self._intake.seal() - self._mark.sequence
        if missing:
            cause = self._outage.cause or "the writer stopped"
            raise LedgerError(f"`{missing}` events are not recorded: {cause}", missing=missing, cause=cause)

    def record_end(self) -> None:
        """Record, once, that this process ended normally and held no memory of its own (rule 7)."""
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
                self._turn_began = time.monotonic()
                self._cycle()
                self._turn_began = None
                if self._stopping and self._drained() and not self._left_to_try():
                    return
        finally:
            self._intake.release_all("the ledger writer has stopped")
            if self._sealer is not None:
                self._sealer.end(seal=not self._outage.active)
            self._aside.close()
            self._sink.close()

    @property
    def _stopping(self) -> bool:
        return self._stop_at < float("inf")

    def _drained(self) -> bool:
        if time.monotonic() > self._stop_at:
            return True
        return not (self._ahead.items or self._outage.held) and self._intake.empty

    def _left_to_try(self) -> bool:
        """At the end, with everything durable in the spill: ask the sink once more; whether that left anything."""
        if time.monotonic() > self._stop_at:
            return False
        if self._outage.replaying:
            self._outage.replay(hurry=True)
            return True
        if self._tried_at_end or not self._outage.active:
            return False
        self._tried_at_end = True
        if self._outage.spacing.may_at_the_end:
            self._outage.recover()
        return self._outage.replaying or not self._drained()

    def _wait(self) -> None:
        """Sleep until there is work, then a little longer so that a batch can form.

        Behind work there is likely more: then that little is all, and nobody has to wake this thread.
        """
        if self._ahead.items:
            return
        intake = self._intake
        if self._was_busy and not self._outage.held:
            self._was_busy = False
            if self._batch_forms():
                return
        if self._outage.held or not (len(intake) or self._stopping):
            until = intake.counts_due
            if self._outage.active or self._outage.held:
                until = min(until, self._outage.spacing.due_at)
            if self._sealer is not None and not self._outage.active:
                until = min(until, time.monotonic() + self._sealer.due_seconds)
            if self._outage.replaying:
                until = min(until, self._outage.replay_due_at)
            intake.idle = True
            if self._outage.held or not len(intake):
                intake.wake.wait(max(0.001, until - time.monotonic()))
            intake.idle = False
        self._batch_forms()

    def _batch_forms(self) -> bool:
        """Let events gather, unless somebody waits; whether there is something to do."""
        intake = self._intake
        intake.wake.clear()
        is_awaited = self._stopping or intake.awaited or intake.hurry
        if not is_awaited and len(intake) < self._settings.batch:
            intake.wake.wait(self._settings.interval_seconds)
            is_awaited = self._stopping or intake.awaited or intake.hurry
        intake.hurry = False
        return bool(is_awaited or len(intake))

    def _cycle(self) -> None:
        if self._sealer is not None and self._outage.active:
            self._sealer.give_up()
        elif self._sealer is not None:
            self._sealer.turn()
        lost = self._sink.lost_leaves()
        if lost and not self._outage.down:
            self._outage.rewind(lost)
        self._intake.flush_counts(now=self._stopping)
        held, spacing = bool(self._outage.held), self._outage.spacing
        if held:
            self._intake.release_all(self._outage.cause)
            if not (spacing.due or (self._stopping and spacing.may_be_early)):
                return
            work, self._outage.held = encoded_of(self._outage.held), []
        elif self._ahead.items:
            work, self._ahead = self._ahead, NOTHING
        else:
            work = self._encode()
        # A full spill takes nothing, however long the queue is: then only the sink can.
        behind = not self._outage.full and len(self._intake) > self._settings.capacity
        if self._outage.active and not behind and (held or self._may_retry(work)):
            self._outage.recover()
        if not work.items:
            self._replay()
            return
        self._was_busy = True
        left = work.entries() if self._outage.active or behind else self._hand_in(work)
        if left:
            over = "the queue is over its capacity"
            cause = over if behind and not self._outage.down else self._outage.down
            self._outage.divert(left, cause or "earlier events are still in the spill", self._finish)
        elif len(self._intake) < self._settings.capacity // 2:
            self._replay()

    def _replay(self) -> None:
        if self._outage.replaying:
            self._outage.replay()

    def _may_retry(self, work: Encoded) -> bool:
        spacing = self._outage.spacing
        if spacing.due or not spacing.may_be_early:
            return spacing.due
        return any(self._intake.awaits(sequence) for sequence, _ in work.items)

    def _encode(self) -> Encoded:
        """Return the queue's next events as leaves."""
        items, given_up = self._intake.take(self._most)
        self._mark.advance(given_up)
        if not items:
            return NOTHING
        outage = self._outage
        try:
            events = [event for _, event in items]
            self._sink.prepare(events, reachable=not outage.down, spilled=outage.spilled)
        except SinkAwayError as away:
            outage.lost(away)
        work = self._encoder.encode(items)
        for sequence, event, problem in work.refused:
            self._unwritable(sequence, event, type(problem).__name__, describe(problem))
        return work

    def _encode_ahead(self) -> None:
        """While a batch is handed in: the next one, when there is a whole one and none waits already."""
        if len(self._intake) >= self._settings.batch and not self._ahead.items:
            self._ahead = self._encode()

    def _hand_in(self, work: Encoded, *, again: bool = False) -> list[Entry]:
        """Hand in as one batch, or in halves where an entry is refused; returns what did not get through."""
        try:
            self._commit(work, again)
        except SinkAwayError as away:
            self._outage.lost(away)
            return work.entries()
        except BatchRefusedError as problem:
            if not again:  # what failed before may have arrived all the same
                return self._hand_in(work, again=True)
            entries = work.entries()
            if len(entries) == 1:
                self._unwritable(entries[0].sequence, entries[0].event, problem.kind, problem.cause)
                return []
            half = len(entries) // 2
            left = self._hand_in(encoded_of(entries[:half]), again=True)
            return left + entries[half:] if left else self._hand_in(encoded_of(entries[half:]), again=True)
        self._finish(work.items)
        return []

    def _commit(self, work: Encoded, again: bool) -> None:
        names = self._directory.fresh()
        acknowledged: list[int] = []

        def act() -> None:
            acknowledged.append(self._sink.commit(names, work.batch, again=again))

        try:
            # Another thread is worth its price where there is something to do meanwhile.
            if again or len(work.items) < self._settings.batch // 2:
                act()
            else:
                self._aside.run(act, self._encode_ahead)
        finally:
            if acknowledged:
                self._directory.settle(names)

    def _unwritable(self, sequence: int, event: Event, kind: str, why: str) -> None:
        """An event that no retry can write becomes a gap; its submitter, if waiting, is refused."""
        cause = f"{type(event).__name__} could not be written: {kind}"
        self._intake.settle(sequence, "refused", why)
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


class EventWriter(LedgerWriter):
    """A writer whose sink is a database. It signs orders with the engine's key (`signed_orders`)."""

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
        """`subject_keys`, `clear_names`: as for `DatabaseSink`."""
        self.engine = engine
        self.subject_keys = subject_keys
        sink = DatabaseSink(
            engine,
            clock,
            subject_keys,
            clear_names=clear_names,
            root_interval_seconds=(settings or WriterSettings()).root_interval_seconds,
        )
        super().__init__(
            sink,
            worker=worker,
            clock=clock,
            spill_directory=spill_directory,
            settings=settings,
            orders=orders_of(engine),
        )

    def close_predecessors(self, worker: str, incarnation: str) -> None:
        """Close a worker's earlier processes that neither stopped nor were closed, in parallel with writing."""
        with closing_committer(self.engine, self._clock) as committer:
            close_predecessors(committer, self.engine, self._clock, worker, incarnation, f"{self._worker}:closing")


class _SideThread:
    """A thread that runs one call while its owner does something else."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._problems: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: GuardingThread | None = None

    def run(self, call: Call, meanwhile: Call) -> None:
        """Run both and return when both have ended; raises what `meanwhile` raises, else what `call` does."""
        if self._thread is None:
            self._thread = GuardingThread(self._serve, name="kvcustody-commit")
            self._thread.start()
        self._calls.put(call)
        try:
            meanwhile()
        finally:
            problem = self._problems.get()
        if problem is not None:
            raise problem

    def close(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while call := self._calls.get():
            try:
                call()
            except BaseException as problem:  # handed to the owner, who decides
                self._problems.put(problem)
            else:
                self._problems.put(None)
