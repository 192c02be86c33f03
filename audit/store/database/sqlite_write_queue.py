"""Turns at an SQLite file: the writing transactions of one process begin in the order in which they asked, and no
process keeps the others out.

1. SQLite lets whoever asks at the right moment write, so a busy writer can keep the others out until they give up.
   Here each waits its turn before it asks.
2. A turn ends after the commit or the rollback, whatever became of it, and at the latest with the connection.
3. A wait ends after `LINE` times the engine's timeout, and the transaction asks SQLite all the same: a turn that was
   lost costs time, never an answer. SQLite then waits for that timeout, and refuses with `database is locked`.
4. Between processes there is a gate: the lock of `NAME.lock`, held from asking until the transaction has begun. Whoever
   has just committed asks again behind the one who waits there.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy import Connection, Engine, event

from kvcustody.files import claim_file

LINE = 4  # a line of writers takes longer than the one transaction that a timeout is meant for
_KEY = "kvcustody_turn"
_LOOK_SECONDS = 0.002


class WriteQueue:
    """A first-come, first-served lock that may be released by another thread than the one that took it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def take(self, patience_seconds: float) -> bool:
        """Wait for the turn; False where patience ran out."""
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
        """End the turn: the next one's begins."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


_queues: WeakValueDictionary[Path, WriteQueue] = WeakValueDictionary()
_queues_lock = threading.Lock()


@contextmanager
def gate(path: Path, timeout_seconds: float, mode: int) -> Iterator[None]:
    """Hold the gate of a file (rule 4) while a transaction begins; where it cannot be had, begin all the same."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        claim_file(lock, mode)
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
    """The queue of this process for one SQLite file."""
    with _queues_lock:
        return _queues.setdefault(path.absolute(), WriteQueue())


def queue_writes(engine: Engine, path: Path, timeout_seconds: float) -> None:
    """Have all writing transactions of this process on one SQLite file take turns, whichever engine they use."""
    turns = queue_at(path)
    patience_seconds = LINE * timeout_seconds

    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("kvcustody_write", False) and turns.take(patience_seconds):
            connection.info[_KEY] = True

    def end(connection: Any) -> None:
        with suppress(NotImplementedError):  # the dialect's own first connection, which takes no turn
            if connection is not None and connection.info.pop(_KEY, False):
                turns.give()

    def ending(act: Callable[[Any], None]) -> Callable[[Any], None]:
        """The dialect's commit or rollback, and the end of the turn whatever comes of it."""

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
