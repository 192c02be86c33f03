"""A clock for replays: it runs in real time while there is work, and skips the time in between.

So a scrub or an admission takes as long as it takes, and an hour of traffic still replays in seconds. It starts in the
past, and all that it skips together is no more than that: what is replayed ends at now, and no date lies ahead.
"""

from __future__ import annotations

import time
import uuid
from typing import Protocol

from kvcustody.clock import MICROSECONDS


class RunnerClock(Protocol):
    """A workload's clock: boot time, advanced to a later time by skipping or by waiting."""

    def now_us(self) -> int:
        """Return boot time in microseconds."""

    def skip_to(self, at_us: int, /) -> None:
        """Return once it is `at_us`."""


class ReplayClock:
    """Boot time and UTC in microseconds; `skip_to` jumps ahead.

    UTC starts `past_us` before `now_us`, and never passes the wall clock that `now_us` was read from: once `past_us`
    are skipped, `skip_to` waits as everybody does.
    """

    def __init__(self, now_us: int, past_us: int) -> None:
        self.boot = uuid.uuid4().hex
        self._offset_us = MICROSECONDS - time.monotonic_ns() // 1000
        self._utc_offset_us = now_us - past_us - MICROSECONDS
        self._left_us = past_us

    def now_us(self) -> int:
        """Return the replay's boot time; it starts at one second."""
        return time.monotonic_ns() // 1000 + self._offset_us

    def utc_us(self) -> int:
        """Return the replay's UTC."""
        return self.now_us() + self._utc_offset_us

    def skip_to(self, at_us: int) -> None:
        """Jump ahead to `at_us` and wait for time that cannot be skipped; do nothing when that time has passed."""
        behind_us = at_us - self.now_us()
        if behind_us <= 0:
            return
        skipped_us = min(behind_us, self._left_us)
        self._offset_us += skipped_us
        self._left_us -= skipped_us
        if skipped_us < behind_us:
            time.sleep((behind_us - skipped_us) / MICROSECONDS)
