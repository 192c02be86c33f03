"""Workers' batches into the ledger: those that wait are committed together, and each is acknowledged once durable.

1. A batch that was acknowledged is committed. One that was not may have been: sent again, its known leaves are
   skipped.
2. A batch that the database refuses hinders no other: batches are then committed one by one.
3. What waits is bounded, and a worker has a share of it; beyond either it is told to come back, and keeps its events
   in its spill. A worker of which nothing waits is always taken: no other keeps it out.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import anyio
from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.database.dialect import dialect_of
from kvcustody.audit.database.engine import StoreGoneError, describe
from kvcustody.audit.events.batch import LeafBatch, LeafGroup
from kvcustody.audit.events.block_run_text import Extents
from kvcustody.audit.schema.ledger import events, incarnations
from kvcustody.audit.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.subjects.subject_table import unlinkings
from kvcustody.audit.writer.committer import Committer, refused
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError
from kvcustody.governance.service.ingest.check_leaves import Received, Sender, read_batch, unwritable
from kvcustody.governance.service.ingest.reader_processes import BatchReaders
from kvcustody.governance.service.problem_details import ProblemError


def merge_batches(batches: Sequence[LeafBatch]) -> LeafBatch:
    """The batches in order; needs at least one."""
    if len(batches) == 1:
        return batches[0]
    rows = [
        list(chain.from_iterable(column)) for column in zip(*[batch[:9] for batch in batches], strict=True)
    ]
    pieces: dict[str, list[LeafGroup]] = {}
    start = 0
    for batch in batches:
        for group in batch.groups:
            moved = group._replace(places=[start + place for place in group.places])
            pieces.setdefault(group.kind, []).append(moved)
        start += len(batch.data)
    founders = {uuid: founder for batch in reversed(batches) for uuid, founder in batch.founders.items()}
    hashes = list(chain.from_iterable(batch.hashes for batch in batches))
    return LeafBatch._make([*rows, [_joined(groups) for groups in pieces.values()], founders, hashes])


def _joined(groups: list[LeafGroup]) -> LeafGroup:
    """Groups of one kind as one; a column that one of them has not is empty there."""
    if len(groups) == 1:
        return groups[0]
    keys = dict.fromkeys(key for group in groups for key in group.columns)
    columns: dict[str, Sequence[Any]] = {}
    for key in keys:
        parts = [group.columns.get(key) or [None] * len(group.places) for group in groups]
        columns[key] = list(chain.from_iterable(parts))
    extents = {
        name: Extents(
            *(
                list(chain.from_iterable(parts))
                for parts in zip(*[g.extents[name] for g in groups], strict=True)
            )
        )
        for name in groups[0].extents
    }
    places = list(chain.from_iterable(group.places for group in groups))
    return LeafGroup(groups[0].kind, places, columns, extents)


_WAITING_LEAVES_MAX = 100_000
_WAITING_LEAVES_MAX_OF_WORKER = _WAITING_LEAVES_MAX // 8
_TOGETHER_LEAVES = 10_000
_SEEN_MAX = 4096
_READING = 4


class IngestCounts(NamedTuple):
    """What a batch came to: leaves that were new, leaves that the ledger had, and how often subjects were unlinked."""

    added: int
    known: int
    unlinkings: int = 0


class WaitingBatch:
    """A batch that was taken in; `decided` is called, on the thread that commits, once `end` has its answer."""

    __slots__ = ("batch", "decided", "done", "incarnation", "problem", "stored", "worker")

    def __init__(self, worker: str, incarnation: str, batch: Received, decided: Callable[[], object]) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.batch = batch
        self.decided = decided
        self.done = False
        self.stored = IngestCounts(0, 0)
        self.problem: ProblemError | None = None


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
        self.stored_leaves = 0
        self._thread = threading.Thread(target=self._run, name="kvcustody-ingest", daemon=True)
        self._thread.start()

    def read(self, body: bytes, sender: Sender) -> Received:
        """The batch in a request, checked as `read_batch` does: by another process, or here, one at a time."""
        found = self._readers.read(body, sender)
        if found is not None:
            return found
        with self._reading:
            return read_batch(body, sender)

    def put(self, worker: str, incarnation: str, batch: Received) -> IngestCounts:
        """Commit a batch; returns once it is durable, raises `unavailable` or `refused-leaf` where it is not."""
        decided = threading.Event()
        waiting = self.begin(worker, incarnation, batch, decided.set)
        decided.wait(self.timeout_seconds)
        return self.end(waiting)

    def begin(
        self, worker: str, incarnation: str, batch: Received, decided: Callable[[], object]
    ) -> WaitingBatch:
        """Take a batch in, for `end`; raises `unavailable` where too much waits. No thread need wait meanwhile."""
        waiting = WaitingBatch(worker, incarnation, batch, decided)
        with self._wake:
            own = self._of_worker[worker]
            if self._ending or (own and self._leaves > _WAITING_LEAVES_MAX):
                raise _unavailable("too many batches wait")
            if own > _WAITING_LEAVES_MAX_OF_WORKER:
                raise _unavailable("too many batches of this worker wait")
            self._leaves += len(batch.batch.data)
            self._of_worker[worker] += len(batch.batch.data)
            self._queue.append(waiting)
            self._wake.notify()
        return waiting

    def end(self, waiting: WaitingBatch) -> IngestCounts:
        """What a batch came to: it is durable; raises as `put` where it is not, or not yet."""
        if not waiting.done:
            raise _unavailable("the ledger is slow")
        if waiting.problem is not None:
            raise waiting.problem
        return waiting.stored

    def close(self) -> None:
        """Commit what waits, take no more, end the thread."""
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
                self._commit(group)
                unlinked = self._unlinkings()
                for waiting in group:
                    waiting.stored = waiting.stored._replace(unlinkings=unlinked)
            except Exception as error:  # the thread must not end: the group is refused as a whole
                for waiting in group:
                    waiting.problem = _unavailable(describe(error))
            for waiting in group:
                waiting.done = True
                waiting.decided()
            self._after()

    def _unlinkings(self) -> int:
        """Read once for all that were committed together."""
        with self._engine.connect() as connection:
            return unlinkings(connection)

    def _take(self) -> list[WaitingBatch]:
        """What is committed together: a few thousand leaves at most."""
        group: list[WaitingBatch] = []
        leaves = 0
        while self._queue and (
            not group or leaves + len(self._queue[0].batch.batch.data) <= _TOGETHER_LEAVES
        ):
            group.append(self._queue.popleft())
            count = len(group[-1].batch.batch.data)
            leaves += count
            self._of_worker[group[-1].worker] -= count
        self._leaves -= leaves
        self._of_worker = +self._of_worker
        return group

    def _commit(self, group: list[WaitingBatch]) -> None:
        try:
            self._write(group, skip_known=not self._all_new(group))
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

    def _commit_one(self, waiting: WaitingBatch) -> None:
        try:
            self._write([waiting], skip_known=True)
        except SQLAlchemyError as problem:
            if not refused(problem):
                self._engine.dispose()
                waiting.problem = _unavailable(describe(problem))
            else:
                waiting.problem = unwritable()
        except (LedgerError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            waiting.problem = unwritable()

    def _write(self, group: list[WaitingBatch], *, skip_known: bool) -> None:
        names = [row for waiting in group for row in waiting.batch.names]
        batches = [waiting.batch.batch for waiting in group if waiting.batch.batch.data]
        count = sum(len(batch.data) for batch in batches)
        if skip_known or not dialect_of(self._engine).one_writer:
            batches = [merge_batches(batches)] if batches else []
        added = 0
        if batches:
            added = self._committer.write(batches[0], skip_known=skip_known, rest=batches[1:], given=names)
        elif names:
            self._committer.write_names(names)
        self.stored_leaves += added
        known = count - added
        for waiting in group:
            count = len(waiting.batch.batch.data)
            # What was known cannot be told apart by batch in a group; alone, or with none known, it is exact.
            waiting.stored = IngestCounts(count - min(known, count), min(known, count))
            self._highest[waiting.incarnation] = max(
                self._highest.get(waiting.incarnation, 0), waiting.batch.last_sequence
            )
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
            if waiting.batch.batch.data and waiting.batch.first_sequence <= reached:
                return False
            highest[waiting.incarnation] = max(reached, waiting.batch.last_sequence)
        return True


def highest_sequence(connection: Connection, incarnation: str) -> int:
    """The highest sequence that the ledger has of an incarnation; 0 where it has none."""
    life = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
    return connection.scalar(select(func.max(events.c.sequence)).where(events.c.incarnation == life)) or 0


def _unavailable(why: str) -> ProblemError:
    return ProblemError("unavailable", why, headers={"Retry-After": "1"})
