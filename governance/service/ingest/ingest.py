"""Commits workers' batches. Waiting batches are committed together, and each is acknowledged when durable.

1. An acknowledged batch is committed. One that was not acknowledged may be committed too: when it is sent again, its
   known leaves are skipped.
2. A batch that the database refuses does not hinder others: batches are then committed one by one. Where the ledger was
   upgraded under this control plane, each is answered `ledger-schema`, and its worker keeps it in its spill.
3. Where several processes write to a log, a commit does not wait. Leaves for a log that another process has locked are
   left to the next commit, and so are the leaves behind them in the batch. A log that was found locked
   `_PATIENT_ROUNDS` times in a row is waited for. So is each log that stopped a batch, after a commit that wrote less
   than an eighth of its leaves. So a control plane that shares its tenants with a busier one gets its turn. Where many
   leaves remain, control planes take turns (`CommitTurns`).
4. The queue is bounded, and each worker has a share of it. Beyond either bound a worker is asked to come back, and
   keeps its events in its spill. A worker with nothing in the queue is always accepted, so no other can keep it out.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio
import numpy as np
from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import unlinkings
from kvcustody.audit.leaf.batch import merge_batches, part_of_batch
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import StoreGoneError, describe
from kvcustody.audit.store.database.open_changes import SchemaChangedError
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.audit.write.committer import Committer, refused
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError
from kvcustody.governance.observability.histogram import Histogram
from kvcustody.governance.service.ingest.check_leaves import Name, Received, Sender, read_batch, unwritable
from kvcustody.governance.service.ingest.commit_turns import TURN, CommitTurns
from kvcustody.governance.service.ingest.reader_processes import BatchReaders
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.guarding_thread import GuardingThread

_WAITING_LEAVES_MAX = 100_000
_WAITING_LEAVES_MAX_OF_WORKER = _WAITING_LEAVES_MAX // 8
_TOGETHER_LEAVES, _TOGETHER_LEAVES_MIN = 10_000, 600
_PATIENT_ROUNDS = 3  # that a leaf is left for the same log
_SHARE_MIN = 8
SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SEEN_MAX = 4096
_READING = 4


class IngestCounts(NamedTuple):
    """The result of a batch: new leaves, known leaves, and the number of subject unlinkings."""

    added: int
    known: int
    unlinkings: int = 0


class WaitingBatch:
    """A batch that waits; `decided` is called on the committing thread when `end` has its answer."""

    __slots__ = (
        *("batch", "began", "decided", "done", "incarnation", "left", "names", "problem"),
        *("stopped_by", "stops", "stored", "worker"),
    )

    def __init__(self, worker: str, incarnation: str, batch: Received, decided: Callable[[], object]) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.batch = batch
        self.left = batch.batch  # what is not committed yet
        self.names: Sequence[Name] = batch.names
        self.stopped_by = ""  # the log of the first leaf that is left
        self.stops = 0  # how often it was locked
        self.decided = decided
        self.began = time.monotonic()
        self.done = False
        self.stored = IngestCounts(0, 0)
        self.problem: ProblemError | None = None

    def note(self, added: int, known: int, stopped_by: str = "") -> None:
        """Note the number of its leaves in the ledger, the first one left out, and what stopped it."""
        is_same = not added and stopped_by == self.stopped_by
        self.stopped_by, self.stops = stopped_by, (self.stops if is_same else 0) + bool(stopped_by)
        self.names = ()
        self.left = part_of_batch(self.left, added + known, len(self.left.data))
        self.stored = IngestCounts(self.stored.added + added, self.stored.known + known)


class Ingest:
    """Owns the thread that commits workers' batches; close it at the end."""

    def __init__(
        self,
        engine: Engine,
        after: Callable[..., None],
        keys: SubjectKeys | None = None,
        *,
        clear_names: bool = False,
        readers: int = 0,
        timeout_seconds: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """`after` is called on the committing thread when batches were acknowledged, and with `now` at the end.

        `readers` processes read batches, as soon as there are large ones.

        With `keys`, of this thread alone, the names in batches reach the ledger as tags; without, only where
        `clear_names` says so, and batches with names are refused else.
        """
        self._engine = engine
        self._after = after
        directory = SubjectDirectory(keys, clear_names=clear_names)
        self._committer = Committer(engine, directory, clock, folds=False)  # the service keeps figures
        self.timeout_seconds = timeout_seconds
        self._queue: deque[WaitingBatch] = deque()
        self._leaves = 0
        self._of_worker: Counter[str] = Counter()  # leaves that wait
        self._wake = threading.Condition()
        self._readers = BatchReaders(readers)
        self.threads = anyio.CapacityLimiter(readers + _READING)  # for `read`; no other request waits for one
        self._reading = threading.Lock()  # several readers would only take the interpreter from who commits
        self._ending = False
        self._highest: dict[str, int] = {}  # sequences up to which this process committed, by incarnation
        self._waits = False
        self._together = _TOGETHER_LEAVES_MIN
        self._turns = CommitTurns()
        self.stored_leaves = 0
        self.seconds = Histogram(SECONDS_BOUNDS)  # from the queue to the disk, of each accepted batch
        self.refusal = ""  # why the last commit was not made, though nothing was wrong with its leaves
        self._thread = GuardingThread(self._run, name="kvcustody-ingest")
        self._thread.start()

    def read(self, body: bytes, sender: Sender) -> Received:
        """Parse the batch in a request with `read_batch`, in another process, or here one at a time."""
        found = self._readers.read(body, sender)
        if found is not None:
            return found
        with self._reading:
            return read_batch(body, sender)

    def put(self, worker: str, incarnation: str, batch: Received) -> IngestCounts:
        """Commit a batch; returns when it is durable, raises `unavailable` or `refused-leaf` otherwise."""
        decided = threading.Event()
        waiting = self.begin(worker, incarnation, batch, decided.set)
        decided.wait(self.timeout_seconds)
        return self.end(waiting)

    def begin(self, worker: str, incarnation: str, batch: Received, decided: Callable[[], object]) -> WaitingBatch:
        """Queue a batch for `end`; raises `unavailable` where too many wait. No thread need wait meanwhile."""
        waiting = WaitingBatch(worker, incarnation, batch, decided)
        with self._wake:
            own = self._of_worker[worker]
            if self._ending or (own and self._leaves > _WAITING_LEAVES_MAX):
                raise _unavailable("too many batches are waiting")
            if own > _WAITING_LEAVES_MAX_OF_WORKER:
                raise _unavailable("too many batches of this worker are waiting")
            self._leaves += len(batch.batch.data)
            self._of_worker[worker] += len(batch.batch.data)
            self._queue.append(waiting)
            self._wake.notify()
        return waiting

    def end(self, waiting: WaitingBatch) -> IngestCounts:
        """Return a durable batch's result; raises as `put` where it is not, or not yet, durable."""
        if not waiting.done:
            raise _unavailable("the ledger is slow")
        if waiting.problem is not None:
            raise waiting.problem
        return waiting.stored

    @property
    def is_busy(self) -> bool:
        """Whether batches wait for a commit now."""
        return self._leaves > 0

    def close(self) -> None:
        """Commit waiting batches, take no more, and end the thread."""
        with self._wake:
            self._ending = True
            self._wake.notify()
        self._thread.join()
        self._after(now=True)
        self._committer.close()
        self._readers.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._ending:
                    self._wake.wait()
                if not self._queue:
                    return
                group = self._take()
            try:
                if not self._commit(group):
                    self._put_back(group)
                    self._turns.missed()
                    continue
                unlinked = self._unlinkings()
                for waiting in group:
                    waiting.stored = waiting.stored._replace(unlinkings=unlinked)
            except Exception as error:  # the thread must not end: the group is refused as a whole
                for waiting in group:
                    waiting.problem = _unavailable(describe(error))
            self.refusal = next((_refusal_of(waiting) for waiting in group if _refusal_of(waiting)), "")
            self._put_back([waiting for waiting in group if waiting.left.data and waiting.problem is None])
            accepted = [waiting.began for waiting in group if waiting.problem is None and not waiting.left.data]
            self.seconds.add_many(time.monotonic() - np.array(accepted))
            for waiting in group:
                if waiting.problem is not None or not waiting.left.data:
                    waiting.done = True
                    waiting.decided()
            self._after()
            self._turns.rest()

    def _put_back(self, rest: list[WaitingBatch]) -> None:
        """What was left goes behind what waits: who has its logs is through by then; but before its own process's."""
        with self._wake:
            lives = {waiting.incarnation for waiting in self._queue}
            self._queue.extend(waiting for waiting in rest if waiting.incarnation not in lives)
            self._queue.extendleft(waiting for waiting in reversed(rest) if waiting.incarnation in lives)
            for waiting in rest:
                self._leaves += len(waiting.left.data)
                self._of_worker[waiting.worker] += len(waiting.left.data)

    def _unlinkings(self) -> int:
        """Read once for all that were committed together."""
        with self._engine.connect() as connection:
            return unlinkings(connection)

    def _take(self) -> list[WaitingBatch]:
        """What is committed together: a few thousand leaves at most."""
        group: list[WaitingBatch] = []
        leaves = 0
        while self._queue and (not group or leaves + len(self._queue[0].left.data) <= self._together):
            group.append(self._queue.popleft())
            count = len(group[-1].left.data)
            leaves += count
            self._of_worker[group[-1].worker] -= count
        self._leaves -= leaves
        self._of_worker = +self._of_worker
        return group

    def _commit(self, group: list[WaitingBatch]) -> bool:
        """Commit what can be; False where nothing was tried, because it is another's turn."""
        try:
            if not self._all_new(group):
                self._write(group, skip_known=True)
            elif dialect_of(self._engine).one_writer:
                self._write(group, skip_known=False)
            else:
                return self._write_free(group)
        except StoreGoneError as problem:
            self._committer.reopen()
            raise _unavailable(problem.message) from None
        except (SQLAlchemyError, LedgerError, LookupError, TypeError, ValueError, ArithmeticError) as problem:
            if isinstance(problem, SQLAlchemyError) and not refused(problem):
                self._engine.dispose()
                self._highest.clear()
                raise
            for waiting in group:
                self._commit_one(waiting)
        return True

    def _commit_one(self, waiting: WaitingBatch) -> None:
        try:
            self._write([waiting], skip_known=True)
        except SQLAlchemyError as problem:
            if not refused(problem):
                self._engine.dispose()
                waiting.problem = _unavailable(describe(problem))
            else:
                waiting.problem = unwritable()
        except SchemaChangedError as problem:
            waiting.problem = ProblemError("ledger-schema", problem.message, headers={"Retry-After": "5"})
        except (LedgerError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            waiting.problem = unwritable()

    def _write(self, group: list[WaitingBatch], *, skip_known: bool) -> None:
        names = [row for waiting in group for row in waiting.names]
        batches = [waiting.left for waiting in group if waiting.left.data]
        count = sum(len(batch.data) for batch in batches)
        if skip_known:
            batches = [merge_batches(batches)] if batches else []
        added = 0
        if batches:
            added = self._committer.write(batches[0], skip_known=skip_known, rest=batches[1:], given=names)
        elif names:
            self._committer.write_names(names)
        self.stored_leaves += added
        known = count - added
        for waiting in group:
            count = len(waiting.left.data)
            # What was known cannot be told apart by batch in a group; alone, or with none known, it is exact.
            waiting.note(count - min(known, count), min(known, count))
            self._note_highest(waiting.incarnation, waiting.batch.last_sequence)

    def _write_free(self, group: list[WaitingBatch]) -> bool:
        """Of new batches what no other writer keeps from it (rule 3); False where it is another's turn."""
        names = [row for waiting in group for row in waiting.names]
        batches = [waiting.left for waiting in group]
        patience = 1 if self._waits else _PATIENT_ROUNDS
        waits_for = {waiting.stopped_by for waiting in group if waiting.stops >= patience}
        turn, began = TURN if self._turns.needed else None, time.monotonic()
        written = self._committer.write_free(batches, waits_for, names, turn=turn)
        if written is None:
            return False
        added = sum(written.added)
        wanted = sum(len(batch.data) for batch in batches)
        self._measure(added, wanted)
        self.stored_leaves += added
        for waiting, count, stopped_by in zip(group, *written, strict=True):
            if count:
                self._note_highest(waiting.incarnation, max(waiting.left.sequences[:count]))
            waiting.note(count, 0, stopped_by)
        self._turns.committed(added, wanted, time.monotonic() - began)
        return True

    def _measure(self, added: int, wanted: int) -> None:
        """How the next commit goes about it (rule 3): what is committed together locks the less, the more is locked."""
        self._waits = _SHARE_MIN * added < wanted
        if 4 * added < 3 * wanted:
            self._together = max(_TOGETHER_LEAVES_MIN, self._together // 2)
        elif added == wanted:
            self._together = min(_TOGETHER_LEAVES, 2 * self._together)

    def _note_highest(self, incarnation: str, sequence: int) -> None:
        """This process has committed the leaves of an incarnation up to this one."""
        self._highest[incarnation] = max(self._highest.get(incarnation, 0), sequence)
        while len(self._highest) > _SEEN_MAX:
            del self._highest[next(iter(self._highest))]

    def _all_new(self, group: list[WaitingBatch]) -> bool:
        """No leaf of the group can be in the ledger: each is past what that has of its incarnation."""
        new = {waiting.incarnation for waiting in group} - self._highest.keys()
        if new:  # another process, or this one before a restart, may have had some
            self._committer.check_there()
            with self._engine.connect() as connection:
                self._highest |= {name: highest_sequence(connection, name) for name in new}
        highest = dict(self._highest)
        for waiting in group:
            reached = highest[waiting.incarnation]
            if waiting.left.data and min(waiting.left.sequences) <= reached:
                return False
            highest[waiting.incarnation] = max(reached, waiting.batch.last_sequence)
        return True


def highest_sequence(connection: Connection, incarnation: str) -> int:
    """Return an incarnation's highest sequence in the ledger; 0 without one."""
    life = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
    # The first from above: PostgreSQL finds a maximum by its index only where nothing else is asked of a row.
    query = select(events.c.sequence).where(events.c.incarnation == life, has_leaf(events))
    return connection.scalar(query.order_by(events.c.sequence.desc()).limit(1)) or 0


def _refusal_of(waiting: WaitingBatch) -> str:
    """Why a batch was not committed that is to come again; empty for one that was, or that no ledger takes."""
    problem = waiting.problem
    return "" if problem is None or problem.type.name == "refused-leaf" else problem.message


def _unavailable(why: str) -> ProblemError:
    return ProblemError("unavailable", why, headers={"Retry-After": "1"})
