"""Recorded live views: a page that reloads every few seconds counts as one read in five minutes.

1. A view is one reader's, with one set of filters by value: another reader, or another filter, is another read.
2. What is forgotten, here by a bound or by a restart, is recorded again; never the other way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

PERIOD_US = 300_000_000
_VIEWS_MAX = 10_000


class LiveReads:
    """The views recorded within the period."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recorded: OrderedDict[tuple[str, str, tuple[tuple[str, str], ...]], int] = OrderedDict()

    def is_new(self, reader: str, page: str, filters: Mapping[str, str], now_us: int) -> bool:
        """Whether to record this read; it then counts as recorded."""
        view = (reader, page, tuple(sorted((name, value) for name, value in filters.items() if value)))
        with self._lock:
            if now_us - self._recorded.get(view, -PERIOD_US) < PERIOD_US:
                return False
            self._recorded[view] = now_us
            self._recorded.move_to_end(view)
            while len(self._recorded) > _VIEWS_MAX:
                self._recorded.popitem(last=False)
        return True

    def forget(self, reader: str, page: str, filters: Mapping[str, str]) -> None:
        """Forget a read that could not be recorded, so that the next one is."""
        view = (reader, page, tuple(sorted((name, value) for name, value in filters.items() if value)))
        with self._lock:
            self._recorded.pop(view, None)
