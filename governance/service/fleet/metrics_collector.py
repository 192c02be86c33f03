"""Database figures for `/metrics`, read on their own thread; a scrape shows the last ones.

    collector = MetricsCollector("ledger", read, fresh_seconds=10)
    collector.ask()                      # nothing waits
    found = collector.latest(patience)   # what was read last: what is read now, where that ends in time

1. One read at a time, whoever asks: a scrape waits for one as long as its patience at most, and for no database.
2. Every figure has an age, which is shown beside it. A figure older than `SCRAPES_MAX` scrapes is not shown: a gap is
   seen, an old number that looks like a new one is not. A read that fails leaves what is there, and is shown to have
   failed. The bound is `STALE_SECONDS` at least and `STALE_SECONDS_MAX` at most, where Prometheus calls a series stale.
3. Reading takes at most a tenth of the time: what takes long is read the more seldom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger

Read = TypeVar("Read")
STALE_SECONDS = 60.0
STALE_SECONDS_MAX = 300.0
SCRAPES_MAX = 3  # a scrape that does not wait shows what the one before it asked for
_REST = 9  # times as long as a read took
_END_SECONDS = 5.0

_log = get_logger(__name__)


class Collected(NamedTuple, Generic[Read]):
    """The last reading; `value` None: there is none, or it is too old (rule 2)."""

    value: Read | None
    age_seconds: float | None  # None: nothing was read yet
    failing: bool


class MetricsCollector(Generic[Read]):
    """Owns the reading thread; close it at the end."""

    def __init__(
        self,
        name: str,
        read: Callable[[], Read],
        *,
        fresh_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fresh_seconds`: what is no older is not read again. `clock`: seconds that only grow."""
        self.name = name
        self.fresh_seconds = fresh_seconds
        self._read = read
        self._clock = clock
        self._asked_at: float | None = None
        self._interval_seconds = 0.0  # between the last two scrapes
        self._value: Read | None = None
        self._at: float | None = None
        self._failing = False
        self._wanted = self._begun = self._ended = 0  # reads, by number
        self._ending = False
        self._state = threading.Condition()
        self._thread = GuardingThread(self._run, name=f"kvcustody-metrics-{name}")
        self._thread.start()

    def ask(self) -> None:
        """Ask for a new reading where the last one is old enough; it begins after this call."""
        with self._state:
            now = self._clock()
            if self._asked_at is not None:
                self._interval_seconds = now - self._asked_at
            self._asked_at = now
            if self._at is None or now - self._at >= self.fresh_seconds:
                self._wanted = self._begun + 1
                self._state.notify_all()

    def latest(self, patience_seconds: float) -> Collected[Read]:
        """Return the last reading; waits up to `patience` for the one asked for."""
        with self._state:
            self._state.wait_for(lambda: self._ended >= self._wanted, patience_seconds)
            age = None if self._at is None else self._clock() - self._at
            stale = min(max(SCRAPES_MAX * self._interval_seconds, STALE_SECONDS), STALE_SECONDS_MAX)
            is_shown = age is not None and age < stale
            return Collected(self._value if is_shown else None, age, self._failing)

    def close(self) -> None:
        """End the thread once it has read; may be called again."""
        with self._state:
            self._ending = True
            self._state.notify_all()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._wanted > self._begun or self._ending)
                if self._ending:
                    return
                self._begun += 1
            began = self._clock()
            self._collect(began)
            with self._state:
                self._ended = self._begun
                self._state.notify_all()
                self._state.wait_for(lambda: self._ending, _REST * (self._clock() - began))

    def _collect(self, began: float) -> None:
        try:
            value = self._read()
        except Exception:
            if not self._failing:
                _log.warning("metrics cannot be read", collector=self.name, exc_info=True)
            self._failing = True
        else:
            with self._state:
                self._value, self._at, self._failing = value, began, False
