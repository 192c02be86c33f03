"""The cost of a prefill on this engine, learned from past ones; from it the time that hits saved, with its error.

    cost = PrefillCost()
    cost.learn(computed, before, seconds)       # arrays: tokens computed, tokens attached before them, and how long
    cost.seconds(computed, before)              # what such prefills take
    cost.error                                  # what the predictions were wrong by, as a share of what was measured

1. seconds = start + token x n + pair x (n x before + n^2 / 2): every token passes through the layers, and attends to
   all before it. So the work of a token grows with its position. None of the three is negative.
2. Older prefills weigh less: half, after `HALF_LIFE` newer ones. Nothing is predicted before `LEARNED_MIN`.
3. `error` is over predictions that were made before the prefill in question was learned from.
4. A prefill's time is from its blocks to its first token. What else the engine did meanwhile is in it, and in `error`.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

HALF_LIFE, LEARNED_MIN = 1000, 8
_APART_MIN = 1e-10  # of two terms, one less the square of their correlation: below it they are one
Floats = NDArray[np.float64]


class RecomputeCost(Protocol):
    """A prediction of how long it takes to compute tokens again."""

    @property
    def is_known(self) -> bool:
        """Whether enough is known to predict."""

    def seconds_of(self, computed: int, before: int) -> float:
        """Return the seconds of one prefill of `tokens` after `before` tokens."""


class DeclaredRate(NamedTuple):
    """A declared rate of tokens a second, for engines that compute nothing."""

    tokens_per_second: float
    is_known: bool = True

    def seconds_of(self, computed: int, before: int) -> float:
        """Return the seconds by the number of computed tokens."""
        return computed / self.tokens_per_second


class PrefillCost:
    """The moments of a least-squares fit of three coefficients."""

    __slots__ = ("_moments", "_products", "_stale", "_wrong", "coefficients", "learned", "measured_seconds")

    def __init__(self) -> None:
        self.learned = 0
        self.coefficients: Floats = np.zeros(3)
        self.measured_seconds = 0.0  # of the prefills that were predicted
        self._wrong = 0.0
        self._moments: Floats = np.zeros((3, 3))
        self._products: Floats = np.zeros(3)
        self._stale = False

    def learn(self, computed: Floats, before: Floats, seconds: Floats) -> None:
        """Learn from completed prefills."""
        if not len(seconds):
            return
        work = _work(computed, before)
        if self.is_known:
            self.solve()
            self._wrong += float(np.abs(work @ self.coefficients - seconds).sum())
            self.measured_seconds += float(seconds.sum())
        kept = 0.5 ** (len(seconds) / HALF_LIFE)
        self._moments = kept * self._moments + work.T @ work
        self._products = kept * self._products + work.T @ seconds
        self.learned += len(seconds)
        self._stale = True

    @property
    def is_known(self) -> bool:
        """Whether enough is learned to predict (rule 2)."""
        return self.learned >= LEARNED_MIN

    @property
    def error(self) -> float | None:
        """The sum of absolute prediction errors over the sum of measured times (rule 3)."""
        return self._wrong / self.measured_seconds if self.measured_seconds else None

    def seconds(self, computed: Floats, before: Floats) -> Floats:
        """Return the seconds of prefills of `tokens` after `before` tokens; zeros before anything is known."""
        if not self.is_known:
            return np.zeros(len(computed))
        self.solve()
        found: Floats = _work(computed, before) @ self.coefficients
        return found

    def seconds_of(self, computed: int, before: int) -> float:
        """Return the seconds of one prefill; 0 before anything is known."""
        if not self.is_known:
            return 0.0
        self.solve()
        start, token, pair = self.coefficients.tolist()
        return float(start + token * computed + pair * (computed * before + computed * computed / 2))

    def avoided_seconds(self, attached: Floats) -> float:
        """Return the seconds that prefilling these leading tokens would have taken, one number a request; 0 before
        anything is known.
        """
        if not self.is_known:
            return 0.0
        self.solve()
        _, token, pair = self.coefficients.tolist()
        return float(token * attached.sum() + pair * (attached * attached).sum() / 2)

    def solve(self) -> None:
        """Update `coefficients`."""
        if self._stale and self.is_known:
            self.coefficients = _not_negative(self._moments, self._products)
            self._stale = False


def pairs(computed: Floats, before: Floats) -> Floats:
    """Return the number of pairs of a token and an earlier one that prefills attend over."""
    return computed * before + computed * computed / 2


def _work(computed: Floats, before: Floats) -> Floats:
    return np.stack((np.ones(len(computed)), computed, pairs(computed, before)), axis=1)


def _not_negative(moments: Floats, products: Floats) -> Floats:
    """Least squares without negative coefficients: the one of the few subsets of terms that fits best."""
    scale = np.sqrt(np.maximum(np.diag(moments), 1e-30))
    scaled, wanted = moments / np.outer(scale, scale), products / scale
    best: Floats = np.linalg.lstsq(scaled, wanted, rcond=1e-10)[0]
    if best.min() >= 0:
        return best / scale
    correlation, gain = scaled.tolist(), wanted.tolist()
    best, most = np.zeros(3), 0.0  # what a subset takes off the sum of squares
    for i, j in combinations(range(3), 2):
        shared = correlation[i][j]
        apart = 1 - shared * shared
        if apart < _APART_MIN:  # either of them does what both do
            continue
        one, other = (gain[i] - shared * gain[j]) / apart, (gain[j] - shared * gain[i]) / apart
        if min(one, other) >= 0 and (taken := one * gain[i] + other * gain[j]) > most:
            best, most = np.zeros(3), taken
            best[[i, j]] = one, other
    for i in range(3):
        if gain[i] > 0 and gain[i] * gain[i] > most:
            best, most = np.zeros(3), gain[i] * gain[i]
            best[i] = gain[i]
    return best / scale
