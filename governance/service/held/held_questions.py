"""Wakes held requests: at once for changes by this process, within two seconds for others.

    seen = held.version
    answer = ask()
    if await held.wait(seen, 30):      # something changed, or nobody knows
        answer = ask()

1. A question that waits costs nothing. One thread looks into the database for all of them, every `LOOK_SECONDS` and
   only while somebody waits; another version says that what it saw is different.
2. A look that fails wakes nobody. Whoever waits is then not told that nothing changed: it asks once more at its end.
3. Setting `stopping` wakes everybody.
4. What a look saw can be had (`seen_lately`): whoever has what was read then need not read it again while it is equal.
5. A question that is asked again while nothing changed needs no database: what it came to is remembered, by process.
   Whoever keeps an answer says that it names nobody whose name may be destroyed meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from anyio import CapacityLimiter
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.errors import CustodyError
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger

LOOK_SECONDS, LATELY_SECONDS = 2.0, 2.5
_THREADS = 4
_KEPT_MAX = 10_000
_UNSEEN_SECONDS = 3 * LOOK_SECONDS  # a look that is older does not say that nothing changed
_log = get_logger(__name__)
Seen = TypeVar("Seen", bound=Hashable)
_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class _Stopping(threading.Event):
    """An event that tells somebody when it is set."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self._told = told

    def set(self) -> None:
        """Set it, and tell."""
        super().set()
        self._told()


class HeldQuestions(Generic[Seen]):
    """The waiting requests, and the thread that looks for news; `look` returns equal values while nothing changes."""

    def __init__(self, look: Callable[[], Seen]) -> None:
        self.threads = CapacityLimiter(_THREADS)  # that questions are asked on: others keep their database connections
        self.stopping: threading.Event = _Stopping(self._wake)
        self.version = 0  # goes up with whatever workers wait for
        self._look = look
        self._seen: Seen | None = None
        self._looked_at = float("-inf")
        self._failing = self._ending = False
        self._waiting: set[_Waiter] = set()
        self._answers: dict[Hashable, tuple[int, dict[str, Any]]] = {}
        self._state = threading.Condition()
        self._thread: GuardingThread | None = None

    def changed(self) -> None:
        """Note that something changed."""
        with self._state:
            self.version += 1
        self._wake()

    def keep(self, question: Hashable, version: int, answer: dict[str, Any]) -> None:
        """Remember a request's answer at this version."""
        with self._state:
            if len(self._answers) >= _KEPT_MAX:
                self._answers.clear()
            self._answers[question] = version, answer

    def known(self, question: Hashable) -> dict[str, Any] | None:
        """Return the remembered answer where nothing has changed since; None: ask again (rule 4)."""
        with self._state:
            version, answer = self._answers.get(question, (-1, None))
            is_seen = self._looked_at >= time.monotonic() - _UNSEEN_SECONDS
            return answer if version == self.version and is_seen else None

    def seen_lately(self) -> Seen | None:
        """Return the last look's reading if it began less than `LATELY_SECONDS` ago; otherwise None."""
        with self._state:
            return self._seen if self._looked_at >= time.monotonic() - LATELY_SECONDS else None

    async def wait(self, seen: int, seconds: float) -> bool:
        """Wait for a version other than `seen`, the end, or the time; False: certainly nothing changed."""
        waiter = asyncio.get_running_loop(), asyncio.Event()
        began = time.monotonic()
        with self._state:
            self._start()
            self._waiting.add(waiter)
            self._state.notify_all()
            is_over = self.version != seen or self.stopping.is_set()
        try:
            if not is_over:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await waiter[1].wait()
        finally:
            with self._state:
                self._waiting.discard(waiter)
        with self._state:
            looked_at, version = self._looked_at, self.version
        return version != seen or looked_at < max(began, time.monotonic() - _UNSEEN_SECONDS)

    def close(self) -> None:
        """Stop looking; may be called again."""
        with self._state:
            self._ending = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._ending:
            self._thread = GuardingThread(self._run, name="kvcustody-held-questions")
            self._thread.start()

    def _wake(self) -> None:
        with self._state:
            waiting = list(self._waiting)
        for loop, told in waiting:
            with suppress(RuntimeError):  # the loop has ended, and the question with it
                loop.call_soon_threadsafe(told.set)

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._waiting or self._ending)
                if self._ending:
                    return
            self._look_once()
            with self._state:
                self._state.wait_for(lambda: self._ending, LOOK_SECONDS)

    def _look_once(self) -> None:
        began = time.monotonic()
        try:
            seen = self._look()
        except (SQLAlchemyError, CustodyError, OSError):
            if not self._failing:
                _log.warning("news for waiting workers cannot be read", exc_info=True)
            self._failing = True
            return
        self._failing = False
        is_new, self._seen = seen != self._seen, seen
        if is_new:
            self.changed()
        with self._state:
            self._looked_at = began
