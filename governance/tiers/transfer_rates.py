"""What moving bytes to and from a tier takes, measured as it happens, by size: a byte of small ones costs more.

    rates = TransferRates()
    rates.learn(size, took_us)
    rates.predict(size)           # microseconds; None before anything was measured
    rates.error                   # what predictions were wrong by, as a share of what was measured

1. Sizes are put together by powers of two. One that was not measured is predicted from its nearest neighbour's.
2. Newer samples weigh more: a link that changes is known after a few transfers.
3. `error` is of predictions that were made before the sample in question was learned from.
"""

from __future__ import annotations

from typing import NamedTuple

_WEIGHT = 0.3  # of a new sample
_CLASSES = 48


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
    """Microseconds a byte, by size."""

    __slots__ = ("_means", "_measured_us", "_wrong_us", "samples")

    def __init__(self) -> None:
        self._means = [0.0] * _CLASSES  # 0: not measured
        self._wrong_us = self._measured_us = 0.0
        self.samples = 0

    def learn(self, size: int, took_us: int) -> None:
        """A transfer of so many bytes was over, whatever became of it, after so long."""
        expected = self.predict(size)
        if expected is not None:
            self._wrong_us += abs(expected - took_us)
            self._measured_us += took_us
        which, mean = size.bit_length(), max(took_us, 1) / size
        known = self._means[which]
        self._means[which] = mean if not known else known + _WEIGHT * (mean - known)
        self.samples += 1

    def predict(self, size: int) -> float | None:
        """What a transfer of so many bytes takes, in microseconds."""
        which, means = size.bit_length(), self._means
        mean = means[which]
        if mean:
            return mean * size
        for away in range(1, _CLASSES):
            for near in (which - away, which + away):
                if 0 < near < _CLASSES and means[near]:
                    return means[near] * size
        return None

    @property
    def error(self) -> float | None:
        """The sum of what predictions were wrong by, over the sum of what was measured (rule 3)."""
        return self._wrong_us / self._measured_us if self._measured_us else None
