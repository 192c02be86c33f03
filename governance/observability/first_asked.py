"""When requests that must wait were first asked for, so that their wait is counted whole when they begin.

At most `WAITING_MAX` are remembered, the newest: one that is forgotten counts from when it is asked for again.
"""

from __future__ import annotations

from collections.abc import Hashable

WAITING_MAX = 4096


class FirstAsked:
    """Times in microseconds of boot time, by request."""

    __slots__ = ("_at_us",)

    def __init__(self) -> None:
        self._at_us: dict[Hashable, int] = {}

    def note(self, request: Hashable, at_us: int) -> None:
        """It was told to wait; only the first time counts."""
        self._at_us.setdefault(request, at_us)
        if len(self._at_us) > WAITING_MAX:
            del self._at_us[next(iter(self._at_us))]

    def take(self, request: Hashable, now_us: int) -> int:
        """It begins: when it was first asked for, `now_us` at the latest."""
        return min(self._at_us.pop(request, now_us), now_us) if self._at_us else now_us

    def forget(self, request: Hashable) -> None:
        """It will not be asked for again."""
        self._at_us.pop(request, None)
