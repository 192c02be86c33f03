"""Jobs: long work that a request starts, run one after another, watched and cancelled by its principal.

1. A job belongs to the principal who started it; to everybody else it is absent.
2. A job that a process did not finish before it ended is `lost`, told at the next start; it is never run twice.
3. Cancelling asks: the job stops at its next step, and what it made is removed.
4. A tenant's people, or one who is of no tenant, have an eighth of the places, and parties take turns: nobody's jobs
   keep another's from being taken or from being next.
5. A job whose record cannot be read is shown as lost, and ends no list.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Engine, insert, select, update

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import JOB_STATES, service_jobs
from kvcustody.audit.store.schema.stored_rows import StoredRow, stored_page, stored_row
from kvcustody.clock import Clock
from kvcustody.errors import CustodyError
from kvcustody.files import private_folder
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_LOST = "the service ended before the job was done"
UNREAD = "the record of this job cannot be read"
STATES = JOB_STATES
_WAITING_MAX = 64
_WAITING_MAX_OF_PARTY = _WAITING_MAX // 8


class Job(NamedTuple):
    """A job as its principal sees it."""

    job: str
    kind: str
    principal: str
    tenant: str | None
    state: str  # one of `STATES`
    done: int
    total: int | None
    parameters: dict[str, Any]
    result: dict[str, Any] | None
    error: str | None
    created_us: int
    ended_us: int | None


class CancelledError(Exception):
    """The job was cancelled."""


class JobProgress:
    """What a job's work gets: its own folder, and a way to report progress."""

    def __init__(self, folder: Path, report: Callable[[int, int | None], None]) -> None:
        self.folder = folder
        self._report = report
        self.cancelled = threading.Event()

    def __call__(self, done: int, total: int | None = None) -> None:
        """Say how far the job is; raises `CancelledError` once it was told to stop."""
        if self.cancelled.is_set():
            raise CancelledError
        self._report(done, total)


Work = Callable[[JobProgress], dict[str, Any]]


class JobRunner:
    """Runs jobs on one thread; `owner` names this process. Close it at the end."""

    def __init__(self, engine: Engine, clock: Clock, folder: Path, *, owner: str) -> None:
        self._engine = engine
        self._clock = clock
        self._folder = folder
        self._owner = owner
        self._waiting: OrderedDict[str, deque[tuple[str, Work]]] = OrderedDict()  # by party, in turn
        self._changed = threading.Condition()
        self._ending = False
        self._running: dict[str, JobProgress] = {}
        self._cancelled: set[str] = set()
        private_folder(folder)
        self._lose()
        self._thread = GuardingThread(self._run, name="kvcustody-jobs")
        self._thread.start()

    def start(
        self,
        kind: str,
        work: Work,
        *,
        principal: str,
        tenant: str | None,
        parameters: dict[str, Any],
        party: str = "",
    ) -> Job:
        """Start a job of a principal's `party` (default: its own); raises `unavailable` where too many wait."""
        job = Job(
            uuid.uuid4().hex, kind, principal, tenant, "waiting", 0, None, parameters, None, None,
            self._clock.utc_us(), None,
        )  # fmt: skip
        values = {**job._asdict(), "owner": self._owner, "parameters": orjson.dumps(parameters).decode()}
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(insert(service_jobs).values(**values))
        if not self._put(party or principal, (job.job, work)):
            self._set(job.job, state="failed", error="too many jobs are waiting", ended_us=self._clock.utc_us())
            raise ProblemError("unavailable", "too many jobs are waiting", headers={"Retry-After": "30"})
        return job

    def _put(self, party: str, item: tuple[str, Work]) -> bool:
        """Queue a job; False where its party's places, or all, are taken."""
        with self._changed:
            mine = self._waiting.get(party, ())
            if len(mine) >= _WAITING_MAX_OF_PARTY or sum(map(len, self._waiting.values())) >= _WAITING_MAX:
                return False
            self._waiting.setdefault(party, deque()).append(item)
            self._changed.notify()
        return True

    def get(self, job: str, *, principal: str) -> Job:
        """Return the principal's job; raises `not-found` (rule 1)."""
        where = (service_jobs.c.job == job) & (service_jobs.c.principal == principal)
        with self._engine.connect() as connection:
            row = stored_row(connection, select(service_jobs).where(where))
        if row is None:
            raise not_found()
        return _job(row)

    def listed(
        self, *, principal: str, before: tuple[int, str] | None = None, limit: int = 50
    ) -> tuple[list[Job], bool]:
        """Return the principal's jobs, newest first, from before `before` (its `created_us` and `job`) on, and whether
        more follow.

        `limit`, and more where the order of the last could not be read.
        """
        table = service_jobs.c
        query = select(service_jobs).where(table.principal == principal)
        if before is not None:
            created_us, job = before
            query = query.where(
                (table.created_us < created_us) | ((table.created_us == created_us) & (table.job < job))
            )
        ordered = query.order_by(table.created_us.desc(), table.job.desc())
        with self._engine.connect() as connection:
            page = stored_page(connection, ordered, (table.created_us, table.job), limit)
        return [_job(row) for row in page.rows], page.more

    def cancel(self, job: str, *, principal: str) -> Job:
        """Ask a job to stop; an ended one stays as it is. Raises `conflict` where another process runs it."""
        found = self.get(job, principal=principal)
        if found.ended_us is None:
            if not self._is_ours(job):
                raise ProblemError("conflict", "another process runs this job: ask the control plane with --server")
            self._cancelled.add(job)
            running = self._running.get(job)
            if running is not None:
                running.cancelled.set()
        return self.get(job, principal=principal)

    def _is_ours(self, job: str) -> bool:
        query = select(service_jobs.c.owner).where(service_jobs.c.job == job)
        with self._engine.connect() as connection:
            return connection.scalar(query) == self._owner

    def file(self, job: str, name: str, *, principal: str) -> Path:
        """Return a file of a finished job; raises `not-found`."""
        found = self.get(job, principal=principal)
        names = (found.result or {}).get("files", [])
        path = self._folder / found.job / name
        if found.state != "finished" or name not in [item["name"] for item in names] or not path.is_file():
            raise not_found()
        return path

    def close(self) -> None:
        """Stop the running job, and take no more."""
        for running in list(self._running.values()):
            running.cancelled.set()
        with self._changed:
            self._ending = True
            self._waiting.clear()
            self._changed.notify()
        self._thread.join(10.0)

    # -- the thread of jobs ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._work(*item)
            except Exception:
                _log.error("job could not be recorded", job=item[0], exc_info=True)

    def _next(self) -> tuple[str, Work] | None:
        """The first job of the party whose turn it is; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._waiting)
            if self._ending:
                return None
            party, mine = next(iter(self._waiting.items()))
            item = mine.popleft()
            if mine:
                self._waiting.move_to_end(party)
            else:
                del self._waiting[party]
            return item

    def _work(self, job: str, work: Work) -> None:
        folder = self._folder / job
        progress = JobProgress(folder, lambda done, total: self._set(job, done=done, total=total))
        self._running[job] = progress
        ended: dict[str, Any]
        try:
            if job in self._cancelled:
                raise CancelledError
            folder.mkdir(mode=0o700)
            self._set(job, state="running")
            result = work(progress)
            ended = {"state": "finished", "result": orjson.dumps(result).decode()}
        except CancelledError:
            asked = job in self._cancelled or not self._ending
            ended = {"state": "cancelled"} if asked else {"state": "lost", "error": _LOST}
        except CustodyError as error:
            ended = {"state": "failed", "error": error.message}
        except Exception as error:
            _log.error("job failed", job=job, exc_info=True)
            ended = {"state": "failed", "error": f"failed inside the service ({type(error).__name__})"}
        finally:
            del self._running[job]
            self._cancelled.discard(job)
        if ended["state"] != "finished":
            shutil.rmtree(folder, ignore_errors=True)
        self._set(job, **ended, ended_us=self._clock.utc_us())

    def _set(self, job: str, **values: Any) -> None:
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(update(service_jobs).where(service_jobs.c.job == job).values(**values))

    def _lose(self) -> None:
        table = service_jobs.c
        unfinished = (table.owner == self._owner) & table.ended_us.is_(None)
        values = {
            "state": "lost",
            "error": _LOST,
            "ended_us": self._clock.utc_us(),
        }
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(update(service_jobs).where(unfinished).values(**values))


def shown(job: Job) -> dict[str, Any]:
    """Return a job as its principal sees it."""
    facts = job._asdict()
    del facts["principal"]
    return facts


def _job(row: StoredRow) -> Job:
    values = {name: row.values[name] for name in Job._fields}
    if row.unread:
        values |= {
            "state": "lost",
            "done": 0,
            "total": None,
            "result": None,
            "error": f"{UNREAD}: {row.unread}",
        }
        values["ended_us"] = row.ended_us or row.created_us
    return Job(**values)
