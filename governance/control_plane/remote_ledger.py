"""A worker's ledger behind the control plane: events in as for a database, batches out over the API.

1. `submit` does no I/O. `durable_sequence` is the highest sequence up to which every event was acknowledged by the
   control plane, fsynced in the local spill, or refused to its caller.
2. `submit_durable` returns only after the control plane's acknowledgement, which means committed there.
3. While the control plane cannot be reached, class B goes to the spill and is handed in afterwards, each leaf once:
   the ledger skips what it has, and each replay is on record before its spill goes. Class A is refused. When the
   spill is full, `admitting` is False.
4. Tries are spaced: half a second, doubled up to half a minute, each by a random share, or as long as we are told.
5. What dead predecessors left in their spills is handed in before this incarnation is put on record, which closes
   their custody. Where the control plane is away at the start and that is allowed, both happen when it is back.
6. A spilled leaf that the control plane refuses becomes a gap, and hinders none behind it.
7. Once it is heard that a subject was unlinked, pseudonyms in memory that nobody is behind any more are forgotten
   before the next event is encoded: who comes back has another.
"""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import orjson
import structlog

from kvcustody.audit.events import Context, Event, GapRecorded, ReplayCompleted, SpillStarted, leaves
from kvcustody.audit.events.batch_encoder import BatchEncoder, Entry
from kvcustody.audit.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.subjects.subject_table import Row, row_of
from kvcustody.audit.writer.durable_watermark import DurableWatermark
from kvcustody.audit.writer.event_queue import EventQueue
from kvcustody.audit.writer.event_writer import WriterSettings, WriterStatus
from kvcustody.audit.writer.spill_file import SpillFile, SpillFullError, SpillSegment
from kvcustody.audit.writer.tenant_shares import TenantShares, sizes_of
from kvcustody.audit.writer.worker_lock import lock_worker_name
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, LedgerError, LedgerUnavailable, ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection, is_away
from kvcustody.governance.service.ingest.check_leaves import write_batch
from kvcustody.tenants import Issuers, issuers_of

_log = structlog.get_logger(__name__)
_MEDIA = "application/x-ndjson"
_WAIT_SECONDS, _WAIT_SECONDS_MAX = 0.5, 30.0
_BATCH_LEAVES, _NAMES = 5000, 5000


class RemoteLedger:
    """Owns the thread that hands in one incarnation's events; one a process, closed at its end."""

    def __init__(
        self,
        connection: ControlPlaneConnection,
        *,
        worker: str,
        clock: Clock,
        spill_directory: Path,
        settings: WriterSettings | None = None,
        may_be_away: bool = False,
    ) -> None:
        """Registers the incarnation; raises `ServiceError` where the control plane refuses or cannot be reached.

        `may_be_away`: where it cannot be reached, begin with the spill. `spill_directory` is this worker's alone.
        """
        self._connection = connection
        self._worker = worker
        self._clock = clock
        self._settings = settings = settings or WriterSettings()
        self.incarnation = uuid.uuid4().hex
        self.offset_us = clock.utc_us() - clock.now_us()
        self._directory = SubjectDirectory(clear_names=True)  # the control plane seals what it is handed
        self._context = Context(self.incarnation, self.offset_us, self._directory)
        self._encoder = BatchEncoder(self._context)
        self._batch = min(settings.batch, _BATCH_LEAVES)
        self.shares = TenantShares(events=settings.capacity, spill_bytes=settings.spill_bytes)
        self._intake = EventQueue(
            clock,
            self.shares,
            capacity=settings.capacity,
            batch=self._batch,
            count_seconds=settings.count_seconds,
        )
        self._mark = DurableWatermark()
        self._spill = SpillFile(spill_directory, self.incarnation, limit_bytes=settings.spill_bytes)
        self._stop_at = float("inf")
        self.down = ""  # why the control plane takes nothing; empty when it does
        self._full = ""
        self._spilled = bool(list(spill_directory.glob("*.spill")))
        self._retry_at = 0.0
        self._wait_seconds = _WAIT_SECONDS
        self._registered = False
        self._added = self._known = 0  # leaves that the control plane took, and those that it had
        self._issuers = Issuers()
        self._unlinkings = self._forgotten = 0  # subjects unlinked: heard of, and dealt with (rule 7)
        self._lock = lock_worker_name(spill_directory, worker)
        try:
            self._begin(may_be_away)
        except BaseException:
            os.close(self._lock)
            raise
        self._thread = threading.Thread(target=self._run, name="kvcustody-ship", daemon=True)
        self._thread.start()

    # -- the engine's side ----------------------------------------------------------------------------------

    @property
    def admitting(self) -> bool:
        """False while new custody could not be recorded."""
        return not self._full and len(self._intake) <= self._settings.capacity and self._thread.is_alive()

    @property
    def recording(self) -> bool:
        """False while events go to the spill, or nowhere: the control plane has them later."""
        return not (self.down or self._spilled or self._full)

    @property
    def durable_sequence(self) -> int:
        """Rule 1."""
        return self._mark.sequence

    def status(self) -> WriterStatus:
        """A snapshot for health and metrics."""
        return WriterStatus(
            admitting=self.admitting,
            healthy=self.recording,
            cause=self._full or self.down,
            backlog=len(self._intake),
            submitted_sequence=self._intake.sequence,
            durable_sequence=self._mark.sequence,
            spilled_bytes=self._spill.bytes(),
        )

    def issuers(self) -> Issuers:
        """Whose tenants the ledger names; raises `LedgerUnavailable` where the control plane cannot be asked."""
        if self.down:
            raise LedgerUnavailable(f"the ledger cannot be asked: {self.down}")
        try:
            self._register(self.incarnation, self.offset_us)
        except ServiceError as error:
            raise LedgerUnavailable(f"the ledger cannot be asked: {error.message}") from error
        return self._issuers

    def submit(self, events: Sequence[Event], /) -> int:
        """Queue events of class B and C; returns the sequence of the last one."""
        return self._intake.submit(events)

    def submit_durable(self, event: Event, /, *, timeout_seconds: float | None = None) -> int:
        """Record a class A event before its act: returns its sequence once committed, else raises."""
        decided = threading.Event()
        sequence, ticket = self._intake.submit_ticket(event, decided.set)
        seconds = self._settings.durable_seconds if timeout_seconds is None else timeout_seconds
        if not self._thread.is_alive():
            ticket.cause = "the ledger's connection has ended"
        elif not decided.wait(seconds):
            ticket.cause = ticket.cause or self.down or "no acknowledgement within the deadline"
        if not self._intake.give_up(sequence, event, ticket):
            return sequence
        raise LedgerUnavailable(
            f"not recorded, so not done: {ticket.cause}", sequence=sequence, cause=ticket.cause
        )

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until everything submitted before is durable (or refused); False when time ran out."""
        target = self._intake.seal()
        self._intake.hurry = True
        self._intake.wake.set()
        return self._mark.reached(target, timeout_seconds)

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Hand in what is left, or spill it, and stop; raises `LedgerError` when events could be kept nowhere."""
        self._stop_at = time.monotonic() + timeout_seconds
        self._intake.wake.set()
        self._thread.join(timeout_seconds + 5.0)
        self._spill.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        missing = self._intake.sequence - self._mark.sequence
        if missing:
            cause = self._full or self.down or "the connection ended"
            raise LedgerError(f"`{missing}` events are not recorded: {cause}", missing=missing, cause=cause)

    # -- the thread -----------------------------------------------------------------------------------------

    def _begin(self, may_be_away: bool) -> None:
        try:
            self._catch_up()
        except ServiceError as error:
            if not (may_be_away and is_away(error)):
                raise
            self._lost(error)

    def _run(self) -> None:
        try:
            while True:
                self._sleep()
                self._cycle()
                ending = self._stop_at < float("inf")
                if ending and (self._intake.empty or time.monotonic() > self._stop_at):
                    return
        finally:
            self._intake.release_all("the ledger's connection has ended")

    def _sleep(self) -> None:
        intake, ending = self._intake, self._stop_at < float("inf")
        if not (len(intake) or ending):
            due = [intake.counts_due] + [self._retry_at] * bool(self._spilled or self.down)
            intake.idle = True
            if not len(intake):
                intake.wake.wait(max(0.001, min(due) - time.monotonic()))
            intake.idle = False
        intake.wake.clear()
        if not (ending or intake.awaited or intake.hurry or len(intake) >= self._settings.batch):
            intake.wake.wait(self._settings.interval_seconds)
        intake.hurry = False

    def _cycle(self) -> None:
        self._intake.flush_counts(now=self._stop_at < float("inf"))
        if (self._spilled or self.down) and time.monotonic() >= self._retry_at:
            self._recover()
        if self._unlinkings != self._forgotten and not (self.down or self._spilled):
            self._forget()
        items, given_up = self._intake.take(self._batch)
        self._mark.advance(given_up)
        if not items:
            return
        self._directory.trim()
        self._directory.list_erased(event for _, event in items)
        work = self._encoder.encode(items)
        for sequence, event, problem in work.refused:
            self._unwritable(sequence, event, type(problem).__name__)
        entries = work.entries()
        if entries and not (self.down or self._spilled):
            entries = self._ship(entries)
        if entries:
            self._divert(entries)

    def note_unlinkings(self, count: int) -> None:
        """How often the control plane says that subjects were unlinked; thread-safe (rule 7)."""
        self._unlinkings = count

    def _forget(self) -> None:
        """Ask which pseudonyms in memory nobody is behind any more, and forget them (rule 7)."""
        count, names = self._unlinkings, self._directory.durable()
        try:
            for start in range(0, len(names), _NAMES):
                some = {"names": names[start : start + _NAMES]}
                self._directory.drop(self._connection.post("/v1/worker/pseudonyms:check", some)["gone"])
        except ServiceError as error:
            if is_away(error):
                self._lost(error)
            else:
                _log.warning("pseudonyms cannot be checked", reason=error.message)
            return
        self._forgotten = count

    def _ship(self, entries: list[Entry]) -> list[Entry]:
        """Hand entries in; returns those that did not get through."""
        names = self._directory.fresh()
        try:
            self._put(self.incarnation, names, [leaf for entry in entries for leaf in entry.leaves])
        except ServiceError as error:
            if error.operands.get("problem") != "refused-leaf":
                self._lost(error)
                return entries
            if len(entries) == 1:
                self._unwritable(entries[0].sequence, entries[0].event, "refused by the control plane")
                return []
            half = len(entries) // 2
            left = self._ship(entries[:half])
            return left + entries[half:] if left else self._ship(entries[half:])
        self._directory.settle(names)
        self._finish(entries)
        return []

    def _put(self, incarnation: str, names: Sequence[Row], data: Sequence[bytes]) -> None:
        first = int(orjson.loads(data[0])["sequence"]) if data else 1
        path = f"/v1/worker/incarnations/{incarnation}/batches/{first}"
        stored = self._connection.put_bytes(path, write_batch(names, data), _MEDIA)
        self.note_unlinkings(int(stored["unlinkings"]))
        self._added += int(stored["added"])
        self._known += int(stored["known"])
        self._wait_seconds = _WAIT_SECONDS

    def _lost(self, error: ServiceError | ConfigError | SpillFullError) -> None:
        if not self.down:
            _log.warning("control plane takes no batches", reason=error.message)
        self.down = error.message
        wait = max(self._wait_seconds, float(error.operands.get("wait_seconds") or 0.0))
        self._retry_at = time.monotonic() + wait * random.uniform(0.75, 1.25)  # noqa: S311 - spacing, no secret
        self._wait_seconds = min(2 * self._wait_seconds, _WAIT_SECONDS_MAX)

    def _divert(self, entries: list[Entry]) -> None:
        """Refuse class A, spill the rest; where the spill is full, keep it in the queue and stop admitting."""
        intake, cause = self._intake, self.down or "earlier events are still in the spill"
        kept = [entry for entry in entries if not intake.awaits(entry.sequence)]
        refused = [entry for entry in entries if intake.awaits(entry.sequence)]
        told = [entry for entry in refused if intake.settle(entry.sequence, "refused", cause)]
        kept += [self._entry(intake.withdrawal(entry.sequence, entry.event)) for entry in told]
        if kept and not self._spilled:
            kept.insert(0, self._entry(SpillStarted(self._clock.now_us(), cause, entries[0].sequence)))
        if kept:
            self._keep(kept)
        self._mark.advance([entry.sequence for entry in refused])

    def _keep(self, entries: list[Entry]) -> None:
        names = self._directory.fresh()
        records = [b"P" + orjson.dumps(row) for row in names]
        records += [b"L" + leaf for entry in entries for leaf in entry.leaves]
        try:
            self._spill.append(records)
        except SpillFullError as problem:
            self._full = problem.message
            for entry in entries:
                self._intake.requeue(entry.sequence, entry.event)
            time.sleep(min(0.05, self._settings.retry_seconds))
            return
        self._directory.settle(names)
        self.shares.spilled(sizes_of(entries, names))
        self._full, self._spilled = "", True
        self._finish(entries)

    def _recover(self) -> None:
        """Hand in what is spilled; then the control plane counts as back."""
        try:
            self._catch_up()
        except (ServiceError, ConfigError, SpillFullError) as error:
            self._lost(error)

    def _catch_up(self) -> None:
        """Hand in every spill that no live process holds, the own one behind this incarnation's registration."""
        segments = self._spill.segments()
        own = [segment for segment in segments if segment.path.name.startswith(self.incarnation)]
        added, known = self._added, self._known
        try:
            for segment in [segment for segment in segments if segment not in own]:
                self._replay(segment)
            if not self._registered:
                self._register(self.incarnation, self.offset_us)
                self._registered = True
            for segment in own:
                self._replay(segment)
            if segments:  # on record before the evidence of the outage goes
                torn = sum(segment.torn_bytes for segment in segments)
                self._report(len(segments), self._added - added, self._known - known, torn)
            for segment in segments:
                segment.retire()
        finally:
            for segment in segments:
                segment.close()
        self.down = self._full = ""
        self._spilled = False
        self.shares.replayed()

    def _register(self, incarnation: str, offset_us: int) -> None:
        ours = {"utc_us": self._clock.utc_us()} if incarnation == self.incarnation else {}
        body = {"offset_us": offset_us, **ours}
        answer = self._connection.put(f"/v1/worker/incarnations/{incarnation}", body)
        if answer["worker"] != self._worker:
            raise ConfigError(
                f"worker_name `{self._worker}`: the control plane knows the key's holder as `{answer['worker']}`"
            )
        self._wait_seconds = _WAIT_SECONDS
        self._issuers = issuers_of(tuple(answer["issuers"]))

    def _replay(self, segment: SpillSegment) -> None:
        names: list[Row] = []
        chunk: list[bytes] = []
        registered = ""
        for record in segment.records():
            if record[:1] == b"P":
                names.append(row_of(orjson.loads(record[1:])))
                continue
            if not registered:
                registered = self._register_writer(record[1:])
            chunk.append(record[1:])
            if len(chunk) >= _BATCH_LEAVES:
                self._hand_in(registered, names, chunk)
                names, chunk = [], []
        if chunk:
            self._hand_in(registered, names, chunk)

    def _report(self, segments: int, added: int, known: int, torn_bytes: int) -> None:
        """Put on record what a replay found."""
        done = ReplayCompleted(self._clock.now_us(), segments, added, known, torn_bytes)
        entry = self._entry(done)
        try:
            self._put(self.incarnation, [], entry.leaves)
        except ServiceError:
            self._intake.requeue(entry.sequence, done)
            raise
        self._mark.advance([entry.sequence])

    def _register_writer(self, leaf: bytes) -> str:
        """Put the incarnation that wrote a segment on record, if it never reached the control plane itself."""
        body = orjson.loads(leaf)
        incarnation = str(body["incarnation"])
        if incarnation != self.incarnation:
            self._register(incarnation, int(body["at_us"]) - int(body["boot_us"]))
        return incarnation

    def _hand_in(self, incarnation: str, names: Sequence[Row], data: Sequence[bytes]) -> None:
        """Hand in spilled leaves; one that is refused becomes a gap (rule 6)."""
        try:
            self._put(incarnation, names, data)
        except ServiceError as error:
            if error.operands.get("problem") != "refused-leaf":
                raise
            if len(data) > 1:
                half = len(data) // 2
                self._hand_in(incarnation, names, data[:half])
                self._hand_in(incarnation, [], data[half:])
                return
            _log.error("a spilled leaf was refused", reason=error.message)
            if incarnation == self.incarnation:
                sequence = int(orjson.loads(data[0])["sequence"])
                cause = "a spilled leaf was refused by the control plane"
                self._intake.emit(GapRecorded(self._clock.now_us(), cause, sequence, sequence))

    def _entry(self, event: Event) -> Entry:
        sequence = self._intake.next_sequence()
        return Entry(sequence, event, [leaf.data for leaf in leaves(event, self._context, sequence)])

    def _unwritable(self, sequence: int, event: Event, why: str) -> None:
        """An event that no retry can write becomes a gap; its submitter, if waiting, is refused."""
        cause = f"{type(event).__name__} could not be written: {why}"
        self._intake.settle(sequence, "refused", cause)
        self._intake.emit(GapRecorded(self._clock.now_us(), cause, sequence, sequence))

    def _finish(self, entries: Sequence[Entry]) -> None:
        done = [entry.sequence for entry in entries]
        if self._intake.awaited:
            for sequence in filter(self._intake.awaits, done):
                self._intake.settle(sequence, "committed")
        for entry in entries:
            if isinstance(entry.event, GapRecorded):
                done.extend(range(entry.event.first_sequence, entry.event.last_sequence + 1))
        self._mark.advance(done)
