"""Memory of waiting requests: when each was first offered, and what it had before a preemption.

At most `WAITING_MAX` are remembered, the newest: one that is forgotten counts as new when it is asked for again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

WAITING_MAX = 4096


class EarlierRun(NamedTuple):
    """What a preempted request had: its number of leading blocks, and whether its first token had come."""

    blocks: int
    has_first_token: bool


NO_EARLIER = EarlierRun(0, has_first_token=False)


class FirstAsked:
    """First offers by request, in boot-time microseconds, and earlier runs; waiting requests never displace
    each other.
    """

    __slots__ = ("_at_us", "_earlier", "_reasons")

    def __init__(self) -> None:
        self._at_us: dict[Hashable, int] = {}
        self._reasons: dict[Hashable, tuple[str, ...]] = {}
        self._earlier: dict[Hashable, EarlierRun] = {}

    def note(self, request: Hashable, at_us: int, reason: str) -> bool:
        """Note that a request waits; returns whether this is its first time for this reason. Keeps the first time."""
        self._at_us.setdefault(request, at_us)
        before = self._reasons.get(request, ())
        if reason not in before:
            self._reasons[request] = (*before, reason)
        if len(self._at_us) > WAITING_MAX:
            oldest = next(iter(self._at_us))
            del self._at_us[oldest], self._reasons[oldest]
        return reason not in before

    def note_preempted(self, request: Hashable, earlier: EarlierRun) -> None:
        """Note what a request had computed or attached when it was preempted."""
        self._earlier[request] = earlier
        if len(self._earlier) > WAITING_MAX:
            del self._earlier[next(iter(self._earlier))]

    def earlier_run(self, request: Hashable) -> EarlierRun:
        """Return what a request had when it was preempted, or `NO_EARLIER`."""
        return self._earlier.get(request, NO_EARLIER) if self._earlier else NO_EARLIER

    def take(self, request: Hashable, now_us: int) -> int:
        """Return when a beginning request was first offered, at the latest `now_us`."""
        if self._earlier:
            self._earlier.pop(request, None)
        if not self._at_us:
            return now_us
        self._reasons.pop(request, None)
        return min(self._at_us.pop(request, now_us), now_us)

    def forget(self, request: Hashable) -> None:
        """Forget a request that will not be offered again."""
        self._at_us.pop(request, None)
        self._reasons.pop(request, None)
        self._earlier.pop(request, None)
