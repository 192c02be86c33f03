"""Coordinate writers of one SQLite file: their transactions begin in the order of their requests, and the write-ahead
log is copied beside commits.

1. SQLite gives the write lock to whoever asks at the right moment, so a busy writer can keep the others out until they
   give up. Here each waits its turn before it asks.
2. A turn ends after the commit or the rollback, whatever its outcome, and at the latest with the connection.
3. A wait ends after `LINE` times the engine's timeout, and the transaction then asks SQLite without a turn. So a lost
   turn costs time, never an answer. SQLite then waits for that timeout, and refuses with `database is locked`.
4. Between processes there is a gate: the lock of `NAME.lock`, held from asking until the transaction has begun. A
   process that has just committed queues behind the one that waits there.
5. Only the commit ensures durability: data is on disk before it is copied, and nothing is lost if it is not copied.
6. A copy takes no lock that a writer waits for. Where copying falls behind, SQLite's own limit (`store.WAL_PAGES_MAX`)
   makes a commit do it.
7. The log restarts once all of it is copied and nobody reads it. With readers following one another without a pause,
   that never happens. So from `WAL_BYTES_MAX` on, writers wait until the current readers are done, at most
   `_WAIT_SECONDS`. Readers that begin meanwhile read the file. So the log's size is bounded by that, plus what is
   written during the longest read.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy import Connection, Engine, event

from kvcustody.audit.store.database.database_place import SqliteFile
from kvcustody.audit.store.database.dialect import file_of
from kvcustody.files import claim_file
from kvcustody.guarding_thread import GuardingThread

LINE = 4  # a line of writers takes longer than the one transaction that a timeout is meant for
_KEY = "kvcustody_turn"
_LOOK_SECONDS = 0.002


class WriteQueue:
    """A first-come, first-served lock that a thread other than its taker may release."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def take(self, patience_seconds: float) -> bool:
        """Wait for the turn; return False after the time limit."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return True
            mine = threading.Event()
            self._waiting.append(mine)
        if mine.wait(patience_seconds):
            return True
        with self._lock:
            if mine.is_set():  # it came in the last moment
                return True
            self._waiting.remove(mine)
        return False

    def give(self) -> None:
        """End the turn, so that the next one begins."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


_queues: WeakValueDictionary[Path, WriteQueue] = WeakValueDictionary()
_queues_lock = threading.Lock()


@contextmanager
def gate(path: Path, timeout_seconds: float, mode: Callable[[], int]) -> Iterator[None]:
    """Hold the gate of a file (rule 4) while a transaction begins; begin without it if it is unavailable."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        try:
            file = lock.open("rb")
        except FileNotFoundError:
            claim_file(lock, mode())
            file = lock.open("rb")
    except OSError:
        yield
        return
    until = time.monotonic() + LINE * timeout_seconds
    with file:  # its end gives the lock up
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_LOOK_SECONDS)
        yield


def queue_at(path: Path) -> WriteQueue:
    """Return this process's queue for one SQLite file."""
    with _queues_lock:
        return _queues.setdefault(path.absolute(), WriteQueue())


def begin_in_turns(engine: Engine, place: SqliteFile, timeout_seconds: float, mode: Callable[[], int]) -> None:
    """Begin the transactions of an engine in turns among writers, for all engines of the file.

    `mode`: of the gate's file, where there is none yet.
    """
    path, in_memory = place.path, place.in_memory
    turns, patience_seconds = queue_at(path), LINE * timeout_seconds

    def begin(connection: Connection) -> None:
        if not connection.get_execution_options().get("kvcustody_write", False):
            connection.exec_driver_sql("BEGIN")
            return
        if turns.take(patience_seconds):
            connection.info[_KEY] = True
        with nullcontext() if in_memory else gate(path, timeout_seconds, mode):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    def end(connection: Any) -> None:
        with suppress(NotImplementedError):  # the dialect's own first connection, which takes no turn
            if connection is not None and connection.info.pop(_KEY, False):
                turns.give()

    def ending(act: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return the dialect's commit or rollback, and the end of the turn whatever comes of it."""

        def ended(connection: Any) -> None:
            try:
                act(connection)
            finally:
                end(connection)

        return ended

    dialect: Any = engine.dialect  # events tell that a commit is about to run, not that it has
    dialect.do_commit = ending(dialect.do_commit)
    dialect.do_rollback = ending(dialect.do_rollback)
    event.listen(engine, "begin", begin)
    event.listen(engine, "checkin", lambda _, record: end(record))


WAL_BYTES_MAX = 64 << 20  # twice what a commit copies at once (`store.WAL_PAGES_MAX`)
_LEAVES = 3000  # between copies: about 1,000 pages
_WAIT_SECONDS = 2.0  # as long as a reader's transaction may take


class WalCheckpointer:
    """A thread for each writer, idle until enough was committed. It does nothing for PostgreSQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._path = file_of(engine)
        self._leaves = 0
        self._wake = threading.Event()
        self._done = False
        self._thread: GuardingThread | None = None

    def committed(self, leaves: int) -> None:
        """Record that so many leaves were committed, and copy if there is enough to copy."""
        self._leaves += leaves
        if self._leaves < _LEAVES or self._path is None:
            return
        self._leaves = 0
        if self._thread is None:
            self._thread = GuardingThread(self._run, name="kvcustody-wal")
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End the thread; may be called again."""
        if self._thread is not None:
            self._done = True
            self._wake.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        assert self._path is not None
        while self._wake.wait() and not self._done:
            self._wake.clear()
            try:
                self._checkpoint("PASSIVE")
                if _log_bytes(self._path) > WAL_BYTES_MAX:
                    self._begin_anew(self._path)
            except Exception:  # noqa: S110 - rule 5: whatever is wrong, the next commit meets it and deals with it
                pass

    def _begin_anew(self, path: Path) -> None:
        """Have the next commit begin the log anew (rule 7); this process's writers wait in their queue meanwhile."""
        turns = queue_at(path)
        if not turns.take(_WAIT_SECONDS):
            return
        try:
            self._checkpoint("RESTART")
        finally:
            turns.give()

    def _checkpoint(self, mode: str) -> None:
        connection = self._engine.raw_connection()
        try:
            cursor = connection.cursor()
            (before,) = cursor.execute("PRAGMA busy_timeout").fetchone()
            cursor.execute(f"PRAGMA busy_timeout={round(_WAIT_SECONDS * 1000)}")
            try:
                cursor.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            finally:  # the connection goes back to the pool
                cursor.execute(f"PRAGMA busy_timeout={before}")
        finally:
            connection.close()


def _log_bytes(path: Path) -> int:
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        return 0
