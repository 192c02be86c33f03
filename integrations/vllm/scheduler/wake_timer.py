"""A timer that makes an idle engine take a step when the next hold lapses.

1. It holds no lock while it calls, and arming is cheap and idempotent: an engine arms it whenever it goes idle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.guarding_thread import GuardingThread

LATEST_SECONDS = 3600.0


class WakeTimer:
    """Calls `on_due` at the armed instant, on a thread of its own that starts with the first arming."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock = clock
        self.on_due = wake
        self._due_us: int | None = None
        self._changed = threading.Condition()
        self._thread: GuardingThread | None = None
        self._closed = False

    def arm(self, due_us: int | None) -> None:
        """Wake the engine at `due_us` on the boot-time clock, instead of any earlier wish. None: never."""
        if due_us == self._due_us:
            return
        with self._changed:
            self._due_us = due_us
            if self._thread is None and due_us is not None and not self._closed:
                self._thread = GuardingThread(self._run, name="kvcustody-wake")
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Stop; nothing is woken afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                due_us = self._due_us
                if due_us is None:
                    self._changed.wait()
                    continue
                left = (due_us - self._clock.now_us()) / MICROSECONDS
                if left > 0:
                    self._changed.wait(min(left, LATEST_SECONDS))
                    continue
                self._due_us = None
                self._changed.release()
                try:
                    self.on_due()
                finally:
                    self._changed.acquire()
