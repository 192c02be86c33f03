"""The control plane's register of workers: incarnations, when each was last heard, and their reports.

1. A worker's name is its principal's name: nobody else can write for it.
2. Registering an incarnation closes the custody of its dead predecessors as unproven, once.
3. What a worker says of itself decides nothing: it is shown.
4. A worker's process is one that announced memory, or that registered to; when it began and ended is what leaves say.
   Processes of commands, of the control plane and of doors are none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Engine, RowMapping, bindparam, insert, or_, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from kvcustody.audit.evidence.processes.remembered_lives import RememberedLives
from kvcustody.audit.evidence.processes.work_periods import at_work
from kvcustody.audit.leaf.batch import LeafBatch
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.database.open_changes import SchemaChangedError
from kvcustody.audit.store.schema.ledger import incarnations, workers
from kvcustody.audit.store.schema.service import service_workers
from kvcustody.audit.store.schema.stored_rows import StoredRow, stored_rows
from kvcustody.audit.write.append_leaves import register
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import LedgerError
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.epochs.epoch_takers import listed_takers
from kvcustody.governance.service.ingest.check_leaves import Sender
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.times import SECOND_US

_FLUSH_SECONDS = 1.0
_RUNNING_MAX = 10_000
_AT_ONCE = 256
LIVE_US = 60 * MICROSECONDS  # a worker that was not heard for longer is called silent


_OF = service_workers.c.incarnation == bindparam("of")
_RECEIVED = (
    update(service_workers)
    .where(_OF, service_workers.c.received_sequence <= bindparam("sequence"))
    .values(received_sequence=bindparam("sequence"), seen_us=bindparam("at_us"))
)
_HEARD = (
    update(service_workers)
    .where(_OF)
    .values({name: bindparam(name) for name in ("seen_us", "policy_revision", "status", "charged", "tenants")})
)
_HEARD_LATE = _HEARD.where(service_workers.c.seen_us <= bindparam("then_us"))


class WorkerState(StrEnum):
    """The state of a process: `at work` until its end is recorded, `silent` after a minute without a word."""

    AT_WORK = "at work"
    SILENT = "silent"
    ENDED = "ended"


class WorkerRun(NamedTuple):
    """One incarnation of a worker. Times are UTC in microseconds."""

    worker: str
    incarnation: str
    started_us: int
    ended_us: int | None
    end: str | None
    seen_us: int
    silent: bool
    received_sequence: int
    policy_revision: int
    status: dict[str, Any]
    charged: dict[str, int]
    tenants: dict[str, dict[str, float]]  # by measure, then by tenant
    origin: str = ""  # empty: an engine at work
    state: WorkerState = WorkerState.AT_WORK  # as every page, command, answer and metric says it
    epoch_version: int | None = None  # of the erase epochs that it acts by; None: it never asked, or has ended
    epoch_since_us: int | None = None
    epoch_behind_since_us: int | None = None  # None: it has the newest
    unread: str = ""  # what of its row cannot be read


_SILENT = StoredRow({column.name: None for column in service_workers.c}, frozenset(), "")  # it said nothing


def _state(ended: bool, silent: bool) -> WorkerState:
    if ended:
        return WorkerState.ENDED
    return WorkerState.SILENT if silent else WorkerState.AT_WORK


def _with_reports(connection: Connection, processes: Iterator[RowMapping]) -> Iterator[tuple[RowMapping, StoredRow]]:
    """Each process with what it last said of itself; many are looked up at once."""
    while some := list(islice(processes, _AT_ONCE)):
        mine = service_workers.c.incarnation.in_([row["uuid"] for row in some])
        rows = stored_rows(connection, select(service_workers).where(mine))
        reports = {row.incarnation: row for row in rows}
        for row in some:
            yield row, reports.get(row["uuid"], _SILENT)


def statuses(connection: Connection) -> dict[str, dict[str, float]]:
    """Return every worker's last status by name, of its newest process that sent one."""
    column = service_workers.c
    columns = (column.incarnation, column.worker, column.status)
    query = select(*columns).where(column.status != "{}").order_by(column.seen_us)
    return {row.worker: row.status for row in stored_rows(connection, query)}


class Fleet:
    """The register of workers; `close_before` closes a worker's processes before the named one."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        close_before: Callable[[str, str], object],
        lives: RememberedLives | None = None,
        *,
        apart_us: int,
    ) -> None:
        """`apart_us`: how far a worker's clock may be from this one. `lives`: those that others look at, too."""
        self._lives = RememberedLives() if lives is None else lives
        self._engine = engine
        self._clock = clock
        self._close_before = close_before
        self._apart_us = apart_us
        self._senders: dict[str, Sender] = {}
        self._lock = threading.Lock()
        self._received: dict[str, tuple[int, int]] = {}  # highest sequence, and when
        self._heard: dict[str, dict[str, Any]] = {}  # the newest report of each
        self._late: dict[str, dict[str, Any]] = {}  # the same, where it could not be written
        self._flushed = 0.0
        self._flushing = threading.Lock()  # one write at a time: an earlier report never replaces a later one

    def register(
        self,
        worker: str,
        incarnation: str,
        offset_us: int,
        utc_us: int | None = None,
        *,
        role: str = Role.WORKER.value,
    ) -> bool:
        """Record an incarnation; False where it was recorded before. Raises `not-found` for another worker's.

        `utc_us`: by its clock, None for a process that has ended. Raises `conflict` where that is too far from ours.
        """
        made = self._put_on_record(worker, incarnation, offset_us, utc_us, role)
        # Also where it was there: what closed its predecessors may have been interrupted, or one may have returned.
        self._close_before(worker, incarnation)
        return made

    def _put_on_record(self, worker: str, incarnation: str, offset_us: int, utc_us: int | None, role: str) -> bool:
        now_us = self._clock.utc_us()
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                known = self._find(connection, incarnation)
                if known is not None:
                    if known.worker != worker or known.offset_us != offset_us:
                        raise not_found()
                    return False
                if utc_us is not None and abs(utc_us - now_us) > self._apart_us:
                    raise ProblemError("conflict", f"the worker's clock is {self._apart(utc_us - now_us)}")
                register(connection, incarnation, worker, offset_us, now_us)
                row = {
                    "incarnation": incarnation,
                    "worker": worker,
                    "seen_us": now_us,
                    "received_sequence": 0,
                    "role": role,
                }
                connection.execute(insert(service_workers).values(**row, policy_revision=0, status="{}"))
        except IntegrityError:
            raise ProblemError("conflict", "the incarnation was registered at the same moment") from None
        return True

    def check_dates(self, batch: LeafBatch) -> None:
        """Raise `unavailable` for leaves dated ahead of this clock; they are taken when the clock has caught up.

        So nothing is lost where it is this clock that is wrong; the worker keeps them in its spill.
        """
        newest_us = max((max(group.columns["at_us"]) for group in batch.groups), default=0)
        ahead_us = newest_us - self._clock.utc_us()
        if ahead_us > self._apart_us:
            raise ProblemError("unavailable", f"leaves of this batch are {self._apart(ahead_us)}")

    def _apart(self, by_us: int) -> str:
        way = "ahead of" if by_us > 0 else "behind"
        bound = self._apart_us // SECOND_US
        return (
            f"{abs(by_us) // SECOND_US} s {way} this service's clock, over {bound} s (`worker_clock_seconds`): "
            "correct the wrong one, for example with NTP"
        )

    def forget(self) -> None:
        """Forget known incarnations after the database was away: some may no longer be on record."""
        self._senders = {}

    def sender(self, worker: str, incarnation: str, *, fresh: bool = False) -> Sender:
        """Return the sender of a batch; raises `not-found` where the incarnation is not this worker's.

        `fresh`: by the ledger, whatever is remembered.
        """
        known = None if fresh else self._senders.get(incarnation)
        if known is None:
            with self._engine.connect() as connection:
                row = self._find(connection, incarnation)
                if row is None or row.worker != worker:
                    self._senders.pop(incarnation, None)
                    raise not_found()
                known = Sender(worker, incarnation, row.offset_us)
            self._senders[incarnation] = known
        if known.worker != worker:
            raise not_found()
        return known

    def received(self, incarnation: str, sequence: int) -> None:
        """Note the arrival of an incarnation's batch; `flush` writes it later."""
        with self._lock:
            known = self._received.get(incarnation, (0, 0))[0]
            self._received[incarnation] = (max(known, sequence), self._clock.utc_us())

    def heard(
        self,
        worker: str,
        incarnation: str,
        *,
        revision: int = 0,
        status: dict[str, Any] | None = None,
        charged: dict[str, int] | None = None,
        tenants: dict[str, dict[str, float]] | None = None,
    ) -> None:
        """Note an incarnation's report, and write all reports, once a second.

        Raises `not-found` where it is not this worker's, `SchemaChangedError` where another program's schema is there.
        """
        self.sender(worker, incarnation)
        values = {
            "seen_us": self._clock.utc_us(),
            "policy_revision": revision,
            "status": orjson.dumps(status or {}).decode(),
            "charged": orjson.dumps(charged or {}).decode(),
            "tenants": orjson.dumps(tenants or {}).decode(),
        }
        with self._lock:
            self._heard[incarnation] = values
        problem = self._flush()
        if isinstance(problem, SchemaChangedError):
            raise problem

    def flush(self, *, now: bool = False) -> None:
        """Write notes and reports of all workers, once a second; a failed write is tried again.

        A report that is tried again undoes none that the worker has made to another control plane since.

        NOTE: a transaction for each report took 1.6 ms of PostgreSQL. What a crash loses, the next report says again.
        """
        self._flush(now=now)

    def _flush(self, *, now: bool = False) -> Exception | None:
        """Why what was noted could not be written; None where it was, or is not due."""
        if not now and time.monotonic() - self._flushed < _FLUSH_SECONDS:
            return None
        if not self._flushing.acquire(blocking=now):  # what is noted goes with the next one
            return None
        try:
            return self._write_noted()
        finally:
            self._flushing.release()

    def _write_noted(self) -> Exception | None:
        with self._lock:
            received, self._received = dict(sorted(self._received.items())), {}
            heard, self._heard = dict(sorted(self._heard.items())), {}
            late, self._late = self._late, {}
        self._flushed = time.monotonic()
        late = {life: late[life] for life in sorted(late.keys() - heard.keys())}
        if not (received or heard or late):
            return None
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                if late:
                    rows = [{"of": life, "then_us": values["seen_us"], **values} for life, values in late.items()]
                    connection.execute(_HEARD_LATE, rows)
                if received:
                    rows = [{"of": life, "sequence": row[0], "at_us": row[1]} for life, row in received.items()]
                    connection.execute(_RECEIVED, rows)
                if heard:
                    rows = [{"of": life, **values} for life, values in heard.items()]
                    if connection.execute(_HEARD, rows).rowcount not in (-1, len(rows)):
                        self.forget()  # the database was restored: who asks next is looked for in it
        except (SQLAlchemyError, LedgerError) as problem:
            with self._lock:
                self._received = {**received, **self._received}
                self._late = {**late, **heard}
            return problem
        return None

    def listed(self, *, after: int = 0, limit: int = 100, only_open: bool = False) -> list[tuple[int, WorkerRun]]:
        """Return incarnations in order of registration, each with its position."""
        self.flush(now=True)
        now_us = self._clock.utc_us()
        with self._engine.connect() as connection:
            periods, over, marked, _ = self._lives.all(connection)
            origins = {one.incarnation: one.origin for one in marked}
            query = (
                select(incarnations.c.id, incarnations.c.uuid, incarnations.c.started_us, workers.c.name)
                .join(workers, workers.c.id == incarnations.c.worker)
                .where(incarnations.c.id > after)
                .order_by(incarnations.c.id)
            )
            running = at_work(periods)
            if only_open and len(running) <= _RUNNING_MAX:  # else there is hardly another row
                query = query.where(or_(incarnations.c.uuid.in_(running), incarnations.c.end.is_(None)))
            takers = {one.name: one for one in listed_takers(connection, now_us)}
            processes = (row for row in connection.execute(query).mappings() if not (only_open and row["uuid"] in over))
            workers_found = []
            for row, report in _with_reports(connection, processes):
                uuid, seen_us = row["uuid"], report.seen_us
                period, end = periods.get(uuid), over.get(uuid)
                if (period is None and seen_us is None) or report.role == Role.DOOR.value:
                    continue  # a command's process, the control plane's own, or a door's: no worker (rule 4)
                started_us = row["started_us"] if period is None else period.started_us
                silent = end is None and seen_us is not None and now_us - seen_us > LIVE_US
                name = row["name"] if period is None else period.worker
                taker = takers.get(name) if end is None else None
                worker = WorkerRun(
                    name,
                    uuid,
                    started_us,
                    None if end is None else end[0],
                    None if end is None else end[1],
                    seen_us or started_us,
                    silent,
                    report.received_sequence or 0,
                    report.policy_revision or 0,
                    report.status or {},
                    report.charged or {},
                    report.tenants or {},
                    origins.get(uuid, ""),
                    _state(end is not None, silent),
                    None if taker is None else taker.version,
                    None if taker is None else taker.since_us,
                    None if taker is None else taker.behind_since_us,
                    report.unread,
                )
                workers_found.append((row["id"], worker))
                if len(workers_found) == limit:
                    break
        return workers_found

    def running(self) -> list[WorkerRun]:
        """Return the newest running incarnation of every worker, by name."""
        latest = {worker.worker: worker for _, worker in self.listed(limit=_RUNNING_MAX, only_open=True)}
        return [latest[name] for name in sorted(latest)]

    def silent_names(self) -> tuple[str, ...]:
        """Return the names of workers whose newest process is silent."""
        return tuple(run.worker for run in self.running() if run.state is WorkerState.SILENT)

    def own_ledgers(self) -> tuple[str, ...]:
        """Return running workers that write this ledger themselves and check no signature of orders, by name."""
        with self._engine.connect() as connection:
            known = self._lives.all(connection)
            running = set(at_work(known.periods)) - known.signed
            rows = stored_rows(connection, select(service_workers.c.incarnation))
            registered = {row.incarnation for row in rows}
        return tuple(sorted({known.periods[life].worker for life in running - registered}))

    @staticmethod
    def _find(connection: Connection, incarnation: str) -> Any:
        query = select(incarnations.c.id, incarnations.c.offset_us, workers.c.name.label("worker"))
        joined = query.join(workers, workers.c.id == incarnations.c.worker)
        return connection.execute(joined.where(incarnations.c.uuid == incarnation)).first()
