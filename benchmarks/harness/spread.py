"""Medians with their spread, and ratios with a confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np

RESAMPLES = 2_000
PAIRS_MIN = 6  # of `exact_paired`


class Spread(NamedTuple):
    """The middle of a sample and the middle four fifths of it, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float


class Ratio(NamedTuple):
    """Subject over baseline, and its 95 % interval over resampled pairs."""

    value: float
    low: float
    high: float


def spread(nanoseconds: Sequence[int]) -> Spread:
    """Median, 10th and 90th percentile of a sample."""
    p10, median, p90 = np.percentile(nanoseconds, (10, 50, 90)) / 1000
    return Spread(round(float(median), 3), round(float(p10), 3), round(float(p90), 3))


def paired(subject: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """The median of the pairs' ratios: for work that differs from pair to pair, on a machine whose speed does."""
    ratios = np.asarray(subject) / np.asarray(baseline)
    picks = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5))
    return Ratio(round(float(np.median(ratios)), 4), round(float(low), 4), round(float(high), 4))


def ratio(subject: Sequence[int], baseline: Sequence[int]) -> Ratio:
    """The ratio of medians; pairs (same prompt, same moment) are resampled together, by a fixed seed."""
    a, b = np.asarray(subject), np.asarray(baseline)
    picks = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    resampled = np.median(a[picks], axis=1) / np.median(b[picks], axis=1)
    low, high = np.percentile(resampled, (2.5, 97.5))
    return Ratio(round(float(np.median(a) / np.median(b)), 4), round(float(low), 4), round(float(high), 4))


def exact_paired(subject: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """The median of few pairs' ratios, and its exact 95 % interval.

    The interval lies between two of the ratios, in order of size: the widest that fewer than 2.5 % of all outcomes miss
    on each side, as a sign test has it. It holds for any distribution, and disturbed pairs move it only where they are
    many: three of 12 on one side, seven of 20.

    Raises:
        ValueError: There are fewer than `PAIRS_MIN` pairs, which give no 95 % interval.
    """
    ratios = np.sort(np.asarray(subject) / np.asarray(baseline))
    pairs = len(ratios)
    if pairs < PAIRS_MIN:
        raise ValueError(f"{pairs} pairs give no 95 % interval: {PAIRS_MIN} are the least")
    chances = np.cumsum([comb(pairs, below) / 2**pairs for below in range(pairs)])
    outside = int(np.searchsorted(chances, 0.025, side="right"))  # ratios on each side
    value, low, high = np.median(ratios), ratios[outside - 1], ratios[-outside]
    return Ratio(round(float(value), 4), round(float(low), 4), round(float(high), 4))
