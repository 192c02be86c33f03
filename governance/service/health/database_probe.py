"""A database probe with a bound: no caller waits longer, whatever the database does.

    found = probe.look(1.5)        # what was read just now; else why not

1. One thread with a connection of its own asks, one question at a time: no request's connection is needed, and a
   database that accepts a question and never answers holds this thread alone.
2. What was read within `FRESH_SECONDS` is not read again. Patience is counted from when the question went out: once
   one was waited for in vain, nobody waits for it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.store.database.engine import describe
from kvcustody.errors import CustodyError
from kvcustody.guarding_thread import GuardingThread

FRESH_SECONDS = 0.5
_END_SECONDS = 2.5
Read = TypeVar("Read")


class DatabaseAnswer(NamedTuple, Generic[Read]):
    """The reading; otherwise `away`, the error, or `silent_seconds` without an answer."""

    value: Read | None
    away: str = ""
    silent_seconds: float = 0.0


class DatabaseProbe(Generic[Read]):
    """Owns the thread and the engine; close it at the end."""

    def __init__(self, engine: Engine, read: Callable[[Connection], Read]) -> None:
        self._engine = engine
        self._read = read
        self._state = threading.Condition()
        self._wanted = self._ending = False
        self._asked_at: float | None = None  # of the question that is out
        self._found: DatabaseAnswer[Read] = DatabaseAnswer(None, "it was not checked yet")
        self._found_at = float("-inf")
        self._thread = GuardingThread(self._run, name="kvcustody-database-probe")
        self._thread.start()

    def look(self, patience_seconds: float) -> DatabaseAnswer[Read]:
        """Return the reading of now or a moment ago; after the patience, `silent_seconds`."""
        began = time.monotonic()
        with self._state:
            if began - self._found_at >= FRESH_SECONDS:
                self._wanted = True
                self._state.notify_all()
                out_seconds = 0.0 if self._asked_at is None else began - self._asked_at
                left = max(0.0, patience_seconds - out_seconds)
                self._state.wait_for(lambda: self._found_at >= began - FRESH_SECONDS, left)
            if self._found_at >= began - FRESH_SECONDS:
                return self._found
            return DatabaseAnswer(None, "", time.monotonic() - (self._asked_at or began))

    def close(self) -> None:
        """End the thread; one that waits for a silent database ends with the process."""
        with self._state:
            self._ending = True
            self._state.notify_all()
        self._thread.end(_END_SECONDS)
        self._engine.dispose()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._wanted or self._ending)
                if self._ending:
                    return
                self._wanted = False
                self._asked_at = time.monotonic()
            found = self._once()
            with self._state:
                self._found, self._found_at, self._asked_at = found, time.monotonic(), None
                self._state.notify_all()

    def _once(self) -> DatabaseAnswer[Read]:
        try:
            with self._engine.connect() as connection:
                return DatabaseAnswer(self._read(connection))
        except (SQLAlchemyError, CustodyError, OSError) as problem:
            return DatabaseAnswer(None, describe(problem))
