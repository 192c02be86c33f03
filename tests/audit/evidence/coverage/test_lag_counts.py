"""Counts of lags: at most an eighth too long, never too short, and they add up."""

from __future__ import annotations

import numpy as np
import pytest

from kvcustody.audit.evidence.coverage.lag_counts import NO_LAGS, added, counted, from_text
from kvcustody.audit.evidence.coverage.summary import lag_percentiles


@pytest.mark.parametrize("seed", range(5))
def test_a_percentile_is_at_most_an_eighth_too_long(seed: int) -> None:
    chance = np.random.default_rng(seed)
    lags = np.sort((10 ** chance.uniform(0, 12, 500)).astype(np.int64))
    halves = counted(lags[::2]), counted(lags[1::2])
    together = added(halves)
    assert together == counted(lags) == from_text(together.longest_us, together.text)
    for percent, exact in zip((50, 99, 100), lag_percentiles(lags), strict=True):
        assert exact <= together.percentile(percent) <= exact * 1.125
    assert together.percentile(100) == lags[-1]


def test_edges() -> None:
    assert counted(np.array([-1, -5], np.int64)) == NO_LAGS and NO_LAGS.percentile(99) == 0
    every = np.array([value for power in range(45) for value in (2**power - 1, 2**power, 2**power + 1)], np.int64)
    for lag in every[every >= 0]:
        assert lag == counted(np.array([lag])).percentile(50)  # one lag is known exactly
