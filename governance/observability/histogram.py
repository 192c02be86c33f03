"""A Prometheus histogram: counts up to each bound, a sum, and a total.

    waits = Histogram(SECONDS)
    waits.add_many(values)                   # a float array
    waits.quantile(0.9)                      # by the bounds: at most this

Counts only rise. One thread adds; `copy` is for the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
AGES = (1.0, 10.0, 60.0, 300.0, 1_800.0, 3_600.0, 14_400.0, 86_400.0)
TOKENS = (0.0, 64.0, 256.0, 1_024.0, 4_096.0, 16_384.0, 65_536.0)
INFINITE = "inf"


class Histogram:
    """`counts[i]` counts values above `bounds[i - 1]` and up to `bounds[i]`; the last one all above."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts: NDArray[np.int64] = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.sum = 0.0

    def add_many(self, values: NDArray[np.float64]) -> None:
        """Count each of `values`."""
        if len(values):
            places = np.searchsorted(self.bounds, values, side="left")
            self.counts += np.bincount(places, minlength=len(self.counts))
            self.sum += float(values.sum())

    @property
    def total(self) -> int:
        """The number of counted values."""
        return int(self.counts.sum())

    def quantile(self, share: float) -> float | None:
        """Return the least bound that at least `share` of the values do not exceed; infinite above the last, None
        without values.
        """
        total = self.total
        if not total:
            return None
        at = int(np.searchsorted(np.cumsum(self.counts), share * total, side="left"))
        return self.bounds[at] if at < len(self.bounds) else float("inf")

    def figures(self, name: str) -> Iterator[tuple[str, float]]:
        """Return cumulative `name.le.BOUND` and `name.sum`; nothing without values."""
        if not self.total:
            return
        for bound, count in zip((*self.bounds, None), np.cumsum(self.counts).tolist(), strict=True):
            yield f"{name}.le.{INFINITE if bound is None else format(bound, 'g')}", float(count)
        yield f"{name}.sum", self.sum

    def copy(self) -> Histogram:
        """Return a snapshot."""
        made = Histogram(self.bounds)
        made.counts, made.sum = self.counts.copy(), self.sum
        return made
