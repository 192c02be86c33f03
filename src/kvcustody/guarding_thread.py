"""Threads that guard something: whatever is raised in them they go on, and whether they still do is known.

1. After any `Exception` the work begins anew, after a pause that grows up to `PAUSE_SECONDS_MAX`.
2. A thread that ended though its work had not guards no more, nor does one whose work failed `FAILURES_MAX` times in
   close succession: `not_guarding` names it. The ledger's writer then admits nothing, and health shows the name.
3. Work that returns has ended in order. So has that of an owner that is gone.
4. A question that another machine holds open ends no sooner because its asker wants to end: `end` does not wait for it.
5. `goes_on=False` is for work that cannot begin anew, because it released what it worked with: its first failure is
   its end.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kvcustody.logger import get_logger

_log = get_logger(__name__)
FAILURES_MAX = 3
PAUSE_SECONDS_MAX = 2.0
_PAUSE_SECONDS = 0.05
_LOOK_SECONDS = 0.02
_CLOSE_SECONDS = 60.0  # failures further apart are not of one kind
_SHOWN_SECONDS = 120.0  # without another failure the work is well again
_failing: weakref.WeakSet[GuardingThread] = weakref.WeakSet()
_lock = threading.Lock()


class GuardingThread(threading.Thread):
    """A daemon thread that goes on (rule 1) and is watched (rule 2)."""

    def __init__(
        self,
        target: Callable[..., object],
        *,
        name: str,
        args: Sequence[Any] = (),
        goes_on: bool = True,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._given, self._goes_on, self._pause = target, tuple(args), goes_on, pause
        self._failures = 0  # in close succession
        self._failed_at = 0.0
        self._ended = False  # though its work had not
        self._holds_question = False  # rule 4

    def run(self) -> None:
        """Do the work until it returns."""
        in_order = False
        try:
            while not in_order:
                began = time.monotonic()
                try:
                    self._work(*self._given)
                    in_order = True
                except Exception:
                    self._note_failure(began)
                    if not self._goes_on:
                        raise
                    self._pause(min(PAUSE_SECONDS_MAX, _PAUSE_SECONDS * 2.0 ** min(self._failures, 16)))
        finally:
            with _lock:
                self._work, self._given = _nothing, ()  # whose work it was may go
                self._ended = not in_order
                (_failing.discard if in_order else _failing.add)(self)

    @property
    def guards(self) -> bool:
        """False once it guards no more (rule 2)."""
        if self._ended:
            return False
        recently = time.monotonic() - self._failed_at < _SHOWN_SECONDS
        return self._failures < FAILURES_MAX or not recently

    def end(self, seconds: float) -> None:
        """Wait up to `seconds` for the thread to end; not while it waits in an open question (rule 4)."""
        ends = time.monotonic() + seconds
        while self.is_alive() and not self._holds_question and time.monotonic() < ends:
            self.join(_LOOK_SECONDS)

    def _note_failure(self, began: float) -> None:
        now = time.monotonic()
        self._failures = self._failures + 1 if now - began < _CLOSE_SECONDS else 1
        self._failed_at = now
        with _lock:
            _failing.add(self)
        with suppress(Exception):  # a log that cannot be written ends nothing
            _log.error("a guarding thread failed", thread=self.name, goes_on=self._goes_on, exc_info=True)


@contextmanager
def open_question() -> Iterator[None]:
    """Around a question that the other side holds open until there is something to say (rule 4)."""
    thread = threading.current_thread()
    if not isinstance(thread, GuardingThread):
        yield
        return
    thread._holds_question = True
    try:
        yield
    finally:
        thread._holds_question = False


def _nothing(*_given: object) -> None:
    """The work of a thread that has ended."""


def not_guarding() -> tuple[str, ...]:
    """The names of this process's threads that guard no more (rule 2); next to nothing where none ever failed."""
    if not _failing:
        return ()
    with _lock:
        return tuple(sorted({thread.name for thread in _failing if not thread.guards}))
