"""A file whose changes take effect while the process runs, so that a revoked key stops working.

1. A changed file is noticed within a second of the next question.
2. While the file is unreadable or malformed there is no answer: yesterday's keys are not today's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError, CustodyError, IdentityError
from kvcustody.logger import get_logger

Content = TypeVar("Content")
_State = tuple[int, int, int]
_LOG = get_logger("kvcustody.identity")


class WatchedFile(Generic[Content]):
    """The parsed content of a file, parsed again when the file changes. The first read raises what `read` raises."""

    def __init__(self, path: Path, read: Callable[[Path], Content], clock: Clock) -> None:
        self._path = path
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._state = self._stat()
        self._content: Content | None = read(path)
        self._looked_us = clock.now_us()

    def content(self) -> Content:
        """The file's present content; raises `IdentityError` while it cannot be read."""
        if self._clock.now_us() - self._looked_us >= MICROSECONDS:
            with self._lock:
                self._look()
        if self._content is None:
            raise IdentityError("credentials file: unreadable", reason="the credentials file is unreadable")
        return self._content

    def _look(self) -> None:
        self._looked_us = self._clock.now_us()
        state = self._stat()
        if state == self._state:
            return
        self._state = state
        try:
            self._content = self._read(self._path)
            _LOG.info("credentials file reloaded", path=self._path)
        except (CustodyError, OSError) as error:
            self._content = None
            says = error.message if isinstance(error, ConfigError) else type(error).__name__
            _LOG.error("credentials file refused; so is every credential from it", reason=says)

    def _stat(self) -> _State:
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return status.st_mtime_ns, status.st_size, status.st_ino
