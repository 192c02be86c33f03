"""Two clocks: boot time for deadlines, UTC for dates. Both in whole microseconds, both injectable.

Boot time counts suspend and never steps back; the wall clock's UTC may step. What ends at a date compares it with
`deadline_clock.DeadlineClock`, never with the wall clock. A `VirtualClock` drives tests and trace replays.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Protocol

MICROSECONDS = 1_000_000
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """What the rest of kvcustody may ask of time. `boot` names the boot that boot time counts from."""

    boot: str

    def now_us(self) -> int:
        """Boot time in microseconds: monotonic, counts suspend."""

    def utc_us(self) -> int:
        """UTC in microseconds since the Unix epoch; may step in either direction."""


class SystemClock:
    """The machine's own clocks."""

    def __init__(self) -> None:
        try:
            self.boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:  # not Linux: no two processes are known to be of one boot
            self.boot = uuid.uuid4().hex

    def now_us(self) -> int:
        """Boot time in microseconds (CLOCK_BOOTTIME; CLOCK_MONOTONIC where there is none)."""
        return time.clock_gettime_ns(_BOOTTIME) // 1000

    def utc_us(self) -> int:
        """UTC in microseconds since the Unix epoch."""
        return time.time_ns() // 1000


class VirtualClock:
    """A clock that moves only when told; boot time refuses to step back, UTC does not."""

    def __init__(
        self,
        now_us: int = MICROSECONDS,
        utc_us: int = 1_767_225_600 * MICROSECONDS,
        boot: str = "virtual",
    ) -> None:
        self.boot = boot
        self._now_us = now_us
        self._utc_us = utc_us

    def now_us(self) -> int:
        """Boot time in microseconds."""
        return self._now_us

    def utc_us(self) -> int:
        """UTC in microseconds since the Unix epoch."""
        return self._utc_us

    def advance(self, microseconds: int) -> None:
        """Move both clocks forward; raises `ValueError` on a negative step."""
        if microseconds < 0:
            raise ValueError(f"boot time cannot step back by `{-microseconds}` us")
        self._now_us += microseconds
        self._utc_us += microseconds

    def step_utc(self, microseconds: int) -> None:
        """Step the wall clock alone, in either direction, as an administrator or NTP would."""
        self._utc_us += microseconds
