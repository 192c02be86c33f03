"""Closes processes that will not return: those with a successor, those silent too long, and those that two people
declare dead.

    dead.close_before(worker, incarnation)     # a process was registered; what takes long goes on in the background
    dead.declare(incarnation, "olive", why)    # "asked"; by another person within a day "closed", or "closing"

1. Silence is counted from a process's last batch or report, by two clocks. This service's time must show
   `worker_silence_days`. Its boot clock must show a part of that, an hour at most, while the service itself was
   running. So a clock that steps does not make a worker silent that had no chance to report. Neither does an outage of
   the control plane or of its database. Nothing is closed while the clock is in doubt.
2. Any number of control planes may do this over one ledger: each step of a closing is done by one (`crash_recovery`).
3. The person who closes a process is recorded with the reason. The person who asks for it is recorded before anything
   happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import orjson
from sqlalchemy import Connection, Engine, exists, select
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.evidence.processes.open_processes import OpenProcess, last_heard_us, open_processes
from kvcustody.audit.kinds import DECLARED, SILENCE, Event, WorkerClosingAsked
from kvcustody.audit.store.database.engine import describe
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations, workers
from kvcustody.audit.store.schema.service import service_workers
from kvcustody.audit.store.schema.stored_rows import stored_rows
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import BY_SUCCESSOR, Closing, close_process
from kvcustody.clock import Clock
from kvcustody.errors import CustodyError
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger
from kvcustody.times import SECOND_US

DAY_SECONDS = 86_400
ASKED_US = DAY_SECONDS * SECOND_US  # how long another person may agree
AT_WORK_SECONDS = 60  # who was heard since then is not declared dead
_ASKED = "worker-closing-asked"
_WATCHED_SECONDS = 3600
_TURN_SECONDS = 30.0
_DECLARED_SECONDS = 2.0  # that people wait for what they declared

_log = get_logger(__name__)


class DeadWorkers:
    """One thread that looks for silent processes and finishes closings; close it at the end."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        name: str,
        silence_days: int,
        in_doubt: Callable[[], bool],
        record: Callable[[Event], None],
        at_once: bool = False,
    ) -> None:
        """`name` is this control plane's; `record` makes a class A event durable.

        `at_once`: whoever asks for a closing waits to its end, as a command does; else two seconds for one that people
        declared, and for no other.
        """
        self._at_once = at_once
        self._engine = engine
        self._clock = clock
        self._name = name
        self._bound_seconds = silence_days * DAY_SECONDS
        self._in_doubt = in_doubt
        self._record = record
        self._watched: dict[str, int] = {}  # silent for too long: since when they are seen so, boot time
        self._begun: dict[str, Closing] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._wanted = threading.Event()
        self._turning = threading.Lock()  # one turn at a time: a closing that two do is done twice in vain
        self._thread = GuardingThread(self._run, name="kvcustody-dead-workers")
        self._thread.start()

    def close_before(self, worker: str, incarnation: str) -> None:
        """Close every process of a worker before this one that neither stopped nor was closed.

        A service does that behind the registration, so that many that start again wait for no closing; what it has
        begun is gone on with after its end, when the worker registers next. A command does it at once.
        """
        mine = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
        with self._engine.connect() as connection:
            dead = open_processes(connection, (workers.c.name == worker) & (incarnations.c.id < mine))
        if self._at_once:
            for one in dead:
                self._begin(one.uuid, BY_SUCCESSOR)
            return
        with self._lock:
            for one in dead:
                self._begun.setdefault(one.uuid, BY_SUCCESSOR)
        if dead:
            self._wanted.set()

    def declare(self, incarnation: str, actor: str, reason: str) -> str:
        """Ask to close a silent process, or confirm another person's request of the last day (rule 3).

        `asked`, `closed`, or `closing` where that takes longer. Raises `not-found` where no such process is open, and
        `conflict` where it was heard just now.
        """
        now_us = self._clock.utc_us()
        with self._engine.connect() as connection:
            open_lives = open_processes(connection, incarnations.c.uuid == incarnation)
            if not open_lives:
                raise not_found()
            heard_us = last_heard_us(connection, open_lives[0], now_us)
            asked = _asked_by_another(connection, incarnation, actor, now_us - ASKED_US)
        silent_seconds = (now_us - heard_us) // SECOND_US
        if silent_seconds < AT_WORK_SECONDS:
            raise ProblemError("conflict", f"the process sent a message {silent_seconds} s ago: it is running")
        if asked is None:
            self._record(WorkerClosingAsked(self._clock.now_us(), open_lives[0].worker, incarnation, actor, reason))
            return "asked"
        said = asked["reason"] if asked["reason"] == reason else f"{asked['reason']}; {reason}"
        why = Closing(DECLARED, silent_seconds, 0, asked["actor"], actor, said, spill_lost=True)
        return "closed" if self._begin(incarnation, why) else "closing"

    def turn(self) -> None:
        """Continue begun closings, and close silent processes (rule 1). One that fails delays no other."""
        with self._turning:
            self._turn()

    def _turn(self) -> None:
        with self._lock:
            due = dict(self._begun)
        for one, seconds in self._silent():
            due.setdefault(one.uuid, Closing(SILENCE, seconds, self._bound_seconds, self._name))
        for incarnation, why in due.items():
            try:
                done = self._close(incarnation, why, self._ending.is_set)
            except (SQLAlchemyError, CustodyError) as problem:
                _log.warning("a dead process is not closed yet", incarnation=incarnation, reason=describe(problem))
                continue
            if done and why.closed_by == SILENCE:
                days = self._bound_seconds // DAY_SECONDS
                _log.warning("a silent process is closed", incarnation=incarnation, days=days)

    def close(self) -> None:
        """End the thread once its step is over; may be called again."""
        self._ending.set()
        self._wanted.set()
        self._thread.join()

    def _silent(self) -> list[tuple[OpenProcess, int]]:
        """Who has been silent for too long, by both clocks, and for how many seconds."""
        now_us, boot_us = self._clock.utc_us(), self._clock.now_us()
        if not self._bound_seconds or self._in_doubt():
            self._watched = {}
            return []
        row = service_workers.c
        silent = row.seen_us < now_us - self._bound_seconds * SECOND_US
        is_open = exists().where(incarnations.c.uuid == row.incarnation, incarnations.c.end.is_(None))
        with self._engine.connect() as connection:
            rows = stored_rows(connection, select(row.incarnation, row.seen_us).where(silent, is_open))
            seen = {each.incarnation: each.seen_us for each in rows if not each.unread}
            found = open_processes(connection, incarnations.c.uuid.in_(seen))
        self._watched = {uuid: self._watched.get(uuid, boot_us) for uuid in seen}
        watched_us = min(_WATCHED_SECONDS, self._bound_seconds) * SECOND_US
        return [
            (one, (now_us - seen[one.uuid]) // SECOND_US)
            for one in found
            if boot_us - self._watched[one.uuid] >= watched_us
        ]

    def _begin(self, incarnation: str, why: Closing) -> bool:
        """Close a process, for a moment here and then in the background; whether it is done."""
        with self._lock:
            self._begun[incarnation] = why
        until = time.monotonic() + (float("inf") if self._at_once else _DECLARED_SECONDS)
        return self._close(incarnation, why, lambda: time.monotonic() > until)

    def _close(self, incarnation: str, why: Closing, stop: Callable[[], bool]) -> bool:
        recorder = f"{self._name}:closing"
        with closing_committer(self._engine, self._clock) as committer:
            done = close_process(committer, self._engine, self._clock, incarnation, why, recorder, stop=stop)
        if done:
            with self._lock:
                self._begun.pop(incarnation, None)
        return done

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wanted.wait(_TURN_SECONDS)
            self._wanted.clear()
            if self._ending.is_set():
                return
            try:
                self.turn()
            except Exception:
                _log.warning("dead workers are not closed", exc_info=True)


def _asked_by_another(connection: Connection, incarnation: str, actor: str, since_us: int) -> dict[str, str] | None:
    """The newest word of somebody else who asked for the closing of a process."""
    query = select(events.c.leaf).where(events.c.kind == _ASKED, events.c.at_us >= since_us, has_leaf(events))
    for leaf in connection.scalars(query.order_by(events.c.idx.desc())):
        body = orjson.loads(bytes(leaf))
        if body["of_incarnation"] == incarnation and body["actor"] != actor:
            return {"actor": str(body["actor"]), "reason": str(body["reason"])}
    return None
