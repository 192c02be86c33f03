"""A clock for replays: it runs at the machine's speed while there is work, and skips the time in between.

So a scrub or an admission takes as long as it takes, and an hour of traffic still replays in seconds. Boot
time never steps back; UTC starts where the caller says, which keeps a ledger's dates non-decreasing from one
replay to the next.
"""

from __future__ import annotations

import time
import uuid

from kvcustody.clock import MICROSECONDS


class ReplayClock:
    """Boot time and UTC in microseconds; `skip_to` jumps ahead."""

    def __init__(self, utc_us: int) -> None:
        self.boot = uuid.uuid4().hex
        self._offset_us = MICROSECONDS - time.monotonic_ns() // 1000
        self._utc_offset_us = utc_us - MICROSECONDS

    def now_us(self) -> int:
        """Boot time of the replay; it starts at one second."""
        return time.monotonic_ns() // 1000 + self._offset_us

    def utc_us(self) -> int:
        """UTC of the replay."""
        return self.now_us() + self._utc_offset_us

    def skip_to(self, at_us: int) -> None:
        """Jump ahead to `at_us`; nothing where that time has passed."""
        behind = at_us - self.now_us()
        if behind > 0:
            self._offset_us += behind
