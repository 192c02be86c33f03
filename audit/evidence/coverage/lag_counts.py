"""How long custody took from due to overwritten, counted in buckets: counts of hours and tenants add up.

    lags = counted(np.array([900, 1_100, 3_000_000]))
    lags.percentile(99)                       # 3000000: microseconds, at most an eighth too long, never too short

1. An octave has eight buckets of equal width, so a bucket is at most 12.5 % wide. Lags below 16 µs have one each.
2. As text a bucket is `number:count`, in order, with blanks between them: one set of counts has one text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from kvcustody.audit.kinds.block_runs import Int64s

_EXACT_BELOW, _IN_AN_OCTAVE, _BITS = 16, 8, 3


class LagCounts(NamedTuple):
    """The longest lag, and the number of lags by bucket (rule 1)."""

    longest_us: int
    counts: Mapping[int, int]

    def percentile(self, percent: int) -> int:
        """Return the lag (µs) that so many percent do not exceed: the upper edge of its bucket; 0 without any lag."""
        rank = -(-sum(self.counts.values()) * percent // 100)
        for bucket in sorted(self.counts):
            rank -= self.counts[bucket]
            if rank <= 0:
                return min(_upper_edge(bucket), self.longest_us)
        return 0

    @property
    def text(self) -> str:
        """The counts as text (rule 2)."""
        return " ".join(f"{bucket}:{count}" for bucket, count in sorted(self.counts.items()))


NO_LAGS = LagCounts(0, {})


def counted(lags: Int64s) -> LagCounts:
    """Return the counts of lags in microseconds; negative ones are no lag."""
    known = lags[lags >= 0]
    if not len(known):
        return NO_LAGS
    shift = np.maximum(np.frexp(known.astype(np.float64))[1] - 1 - _BITS, 0).astype(np.int64)
    buckets, counts = np.unique(shift * _IN_AN_OCTAVE + (known >> shift), return_counts=True)
    return LagCounts(int(known.max()), dict(zip(buckets.tolist(), counts.tolist(), strict=True)))


def added(every: Iterable[LagCounts]) -> LagCounts:
    """Return the counts of all together."""
    counts, longest = Counter[int](), 0
    for one in every:
        counts.update(one.counts)
        longest = max(longest, one.longest_us)
    return LagCounts(longest, counts)


def from_text(longest_us: int, text: str) -> LagCounts:
    """Return counts that were written as text, or as several texts with blanks between them, which add up.

    Raises `ValueError` for any other text.
    """
    sums: dict[str, int] = {}
    for pair in text.split():
        bucket, _, count = pair.partition(":")
        sums[bucket] = sums.get(bucket, 0) + int(count)
    return LagCounts(longest_us, {int(bucket): count for bucket, count in sums.items()})


def _upper_edge(bucket: int) -> int:
    if bucket < _EXACT_BELOW:
        return bucket
    shift = bucket // _IN_AN_OCTAVE - 1
    return ((bucket - shift * _IN_AN_OCTAVE + 1) << shift) - 1
