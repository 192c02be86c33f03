"""What is remembered of requests that wait: when they were first asked for, and what they had before a preemption.

At most `WAITING_MAX` are remembered, the newest: one that is forgotten counts as new when it is asked for again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

WAITING_MAX = 4096


class EarlierRun(NamedTuple):
    """What a preempted request had: so many leading blocks, and whether its first token had come."""

    blocks: int
    has_first_token: bool


NO_EARLIER = EarlierRun(0, has_first_token=False)


class FirstAsked:
    """Times in microseconds of boot time, by request; and what preempted ones had: those that wait displace none."""

    __slots__ = ("_at_us", "_earlier", "_reasons")

    def __init__(self) -> None:
        self._at_us: dict[Hashable, int] = {}
        self._reasons: dict[Hashable, tuple[str, ...]] = {}
        self._earlier: dict[Hashable, EarlierRun] = {}

    def note(self, request: Hashable, at_us: int, reason: str) -> bool:
        """It was told to wait: whether for the first time for this reason. Only its first time is kept."""
        self._at_us.setdefault(request, at_us)
        before = self._reasons.get(request, ())
        if reason not in before:
            self._reasons[request] = (*before, reason)
        if len(self._at_us) > WAITING_MAX:
            oldest = next(iter(self._at_us))
            del self._at_us[oldest], self._reasons[oldest]
        return reason not in before

    def note_preempted(self, request: Hashable, earlier: EarlierRun) -> None:
        """It had computed or attached this, and is asked for again."""
        self._earlier[request] = earlier
        if len(self._earlier) > WAITING_MAX:
            del self._earlier[next(iter(self._earlier))]

    def earlier_run(self, request: Hashable) -> EarlierRun:
        """What it had when it was preempted; `NO_EARLIER` where it was not."""
        return self._earlier.get(request, NO_EARLIER) if self._earlier else NO_EARLIER

    def take(self, request: Hashable, now_us: int) -> int:
        """It begins: when it was first asked for, `now_us` at the latest."""
        if self._earlier:
            self._earlier.pop(request, None)
        if not self._at_us:
            return now_us
        self._reasons.pop(request, None)
        return min(self._at_us.pop(request, now_us), now_us)

    def forget(self, request: Hashable) -> None:
        """It will not be asked for again."""
        self._at_us.pop(request, None)
        self._reasons.pop(request, None)
        self._earlier.pop(request, None)
