"""The time by which copies end: UTC that never steps back in a process, and what it is in the process's own time.

Boot time carries it on; a wall clock that is ahead is followed, for a copy may end too soon and never too late.
"""

from __future__ import annotations

from kvcustody.clock import Clock


class TierClock:
    """UTC and boot time of one process, in microseconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_us = clock.utc_us() - clock.now_us()

    def now_us(self) -> int:
        """UTC, at least what it was."""
        boot_us = self._clock.now_us()
        offset_us = self._clock.utc_us() - boot_us
        if offset_us > self._offset_us:
            self._offset_us = offset_us
        return boot_us + self._offset_us

    def boot_us(self) -> int:
        """Boot time."""
        return self._clock.now_us()

    def of_boot(self, boot_us: int) -> int:
        """The UTC of a boot time, as things stand."""
        self.now_us()
        return boot_us + self._offset_us

    def to_boot(self, utc_us: int) -> int:
        """The boot time of a UTC, as things stand: never later than it was."""
        self.now_us()
        return utc_us - self._offset_us
