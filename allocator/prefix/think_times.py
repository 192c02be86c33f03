"""Pauses between release and reuse, learned while serving for eviction policies.

    learned = ThinkTimes()
    learned.kept(0, blocks)                       # never used again so far, and CACHED from now on
    learned.returned(0, blocks, pause_us)         # ... and attached after a pause
    learned.odds_points(pause_us, horizon_us)     # above 0: likelier to return within the horizon than most

A block's last pause says which class it is in; each class counts by powers of two of a millisecond after which pauses
its blocks returned. What did not return in time counts as what was kept and did not return.

- It holds `PAUSES` × (`PAUSES` + 1) counters, whatever happens; a class that has counted `EVIDENCE_MAX` blocks forgets
  half of them.
- Nothing in it names a block, a session or a tenant. Whoever shares one object learns from the others' pauses.
"""

from __future__ import annotations

from math import log2

PAUSES = 32  # powers of two of 1,024 us: the last is 25 days and more
EVIDENCE_MAX = 1 << 20  # blocks
POINTS = 8
_ENOUGH = 32  # returns, below which nothing is said
_FRESH = 64  # blocks seen that one answer may be out of date by


def pause_class(pause_us: int) -> int:
    """Return the class of a node's last pause; 0: never reused so far."""
    return 0 if pause_us <= 0 else min(PAUSES, (pause_us >> 10).bit_length() + 1)


class ThinkTimes:
    """Pauses of one tenant, or of all tenants that share it. Counts are blocks."""

    def __init__(self) -> None:
        self._kept = [0] * (PAUSES + 1)
        self._returned = [[0] * PAUSES for _ in range(PAUSES + 1)]
        self._returns = 0  # ever, up to where they are enough
        self._answers: dict[tuple[int, int], int] = {}
        self._long_us: int | None = None
        self._since = 0

    def kept(self, last_pause_us: int, blocks: int) -> None:
        """Record that blocks became CACHED."""
        at = pause_class(last_pause_us)
        self._kept[at] += blocks
        if self._kept[at] >= EVIDENCE_MAX:
            self._kept[at] //= 2
            self._returned[at] = [count // 2 for count in self._returned[at]]
        self._observed(blocks)

    def returned(self, last_pause_us: int, blocks: int, pause_us: int) -> None:
        """Record that blocks whose last pause was `last_pause_us` are attached after `pause_us`."""
        self._returned[pause_class(last_pause_us)][_bucket(pause_us)] += blocks
        self._returns = min(_ENOUGH, self._returns + 1)
        self._observed(blocks)

    def _observed(self, blocks: int) -> None:
        self._since += blocks
        if self._since >= _FRESH:
            self._since, self._long_us = 0, None
            self._answers.clear()

    def odds_points(self, last_pause_us: int, horizon_us: int) -> int:
        """Return how much likelier than average a return within the horizon is, in quarter powers of two."""
        if self._returns < _ENOUGH:
            return 0
        key = pause_class(last_pause_us), _bucket(horizon_us)
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self._odds_points(*key)
        return found

    def _odds_points(self, at: int, last: int) -> int:
        """With one block's worth of the average as what is known beforehand."""
        of_all = (sum(sum(row[: last + 1]) for row in self._returned) + 1) / (sum(self._kept) + 2)
        own = (sum(self._returned[at][: last + 1]) + of_all) / (self._kept[at] + 1)
        return max(-POINTS, min(POINTS, round(4 * log2(own / of_all))))

    def long_pause_us(self) -> int | None:
        """Return the pause that seven of eight returns do not exceed; None: too little is known."""
        if self._returns < _ENOUGH:
            return None
        if self._long_us is None:
            columns = [sum(column) for column in zip(*self._returned, strict=True)]
            left, at = sum(columns) * 7 // 8, 0
            while at < PAUSES - 1 and columns[at] <= left:
                left -= columns[at]
                at += 1
            self._long_us = 1 << (at + 10)
        return self._long_us


def _bucket(pause_us: int) -> int:
    return min(PAUSES - 1, max(0, pause_us >> 10).bit_length())
