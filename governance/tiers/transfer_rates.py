"""What moving bytes to and from a tier takes, measured as it happens, by size: a byte of small ones costs more.

    rates = TransferRates()
    rates.learn(size, took_us)
    rates.predict(size)           # microseconds; None before anything was measured
    rates.error                   # what predictions were wrong by, as a share of what was measured

1. Sizes are put together by powers of two: for each the time of a byte, and for all together how fast the link is now.
   A size that was not measured is predicted from its nearest neighbour's.
2. Each sample moves both, on a logarithmic scale: a link that became a hundred times faster or slower is known after
   a few transfers of any size.
3. What stands on that scale is a typical transfer. Times have a heavy tail, so that a mean is above it: a prediction is
   multiplied by what the last transfers took together, over what was typical for them. Predictions are right in sum.
4. `error` is of predictions that were made before the sample in question was learned from.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_OF_SIZE, _OF_LINK = 0.4, 0.5  # of what a prediction was wrong by; of a size less, the better it is known
_JITTER = math.log(8)  # beyond that it is the link that changed
_CLASSES = 48
_REMEMBERED = 256  # transfers that the relation of a mean to a typical one is of
_PRIOR_WEIGHT = 16.0  # transfers that are taken for typical before any was measured
PROBE_US, PROBE_MAX_US = 1_000_000, 2_000_000


class LinkWatch:
    """When to look at a link that is left alone because it was slow: soon at first, then ever less often.

    `due(now_us)` is true once for each look.
    """

    __slots__ = ("_due_us", "_pause_us", "is_left_alone")

    def __init__(self) -> None:
        self.is_left_alone = False
        self._due_us, self._pause_us = 0, PROBE_US

    def left_alone(self, now_us: int) -> None:
        """Something was decided against."""
        if not self.is_left_alone:
            self.is_left_alone = True
            self._due_us = now_us + self._pause_us

    def used(self) -> None:
        """Something was moved."""
        self.is_left_alone, self._pause_us = False, PROBE_US

    def due(self, now_us: int) -> bool:
        """Whether to look now."""
        if not self.is_left_alone or now_us < self._due_us:
            return False
        self._due_us = now_us + self._pause_us
        self._pause_us = min(2 * self._pause_us, PROBE_MAX_US)
        return True


class TierUse(NamedTuple):
    """What one tier did for an engine: blocks that came back, what it took, and what was decided."""

    tier: str
    stored_blocks: int
    restored_blocks: int
    stored_bytes: int
    restored_bytes: int
    store_us: int
    restore_us: int
    decided_against: int
    error: float | None  # of predicted restores, as a share of what they took


class TransferRates:
    """Logarithms of microseconds a byte, by size, and of what they are now in relation to that."""

    __slots__ = (
        "_bytes",
        "_counts",
        "_link",
        "_measured_us",
        "_took",
        "_typical",
        "_wrong_us",
        "samples",
    )

    def __init__(self) -> None:
        self._bytes: list[float | None] = [None] * _CLASSES  # None: not measured
        self._counts = [0] * _CLASSES
        self._link = 0.0
        self._wrong_us = self._measured_us = 0.0
        # What the last transfers took and what was typical then, in times of what is usual for their sizes (rule 3).
        self._took = self._typical = _PRIOR_WEIGHT
        self.samples = 0

    def learn(self, size: int, took_us: int) -> None:
        """A transfer of so many bytes was over, whatever became of it, after so long."""
        expected = self.predict(size)
        if expected is not None:
            self._wrong_us += abs(expected - took_us)
            self._measured_us += took_us
        magnitude, measured = size.bit_length(), math.log(max(took_us, 1) / size)
        known = self._bytes[magnitude]
        if known is not None:
            fades = 1 - 1 / _REMEMBERED
            self._took = self._took * fades + math.exp(measured - known)
            self._typical = self._typical * fades + math.exp(self._link)
        if known is None:
            known = self._near(magnitude)
        if known is None:
            self._bytes[magnitude] = measured - self._link
        else:
            wrong = measured - known - self._link
            within = min(max(wrong, -_JITTER), _JITTER)
            self._counts[magnitude] += 1
            self._bytes[magnitude] = known + within * _OF_SIZE / self._counts[magnitude] ** 0.5
            self._link += wrong - within + _OF_LINK * within
        self.samples += 1

    def predict(self, size: int) -> float | None:
        """What a transfer of so many bytes takes in the mean, in microseconds."""
        which = size.bit_length()
        known = self._bytes[which]
        if known is None:
            known = self._near(which)
        return None if known is None else math.exp(known + self._link) * size * self._took / self._typical

    def _near(self, which: int) -> float | None:
        for away in range(1, _CLASSES):
            for near in (which - away, which + away):
                found = self._bytes[near] if 0 <= near < _CLASSES else None
                if found is not None:
                    return found
        return None

    @property
    def error(self) -> float | None:
        """The sum of what predictions were wrong by, over the sum of what was measured (rule 3)."""
        return self._wrong_us / self._measured_us if self._measured_us else None
