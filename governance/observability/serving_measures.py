"""Measures of serving: queueing, time to first token, hits and the time they saved, cancellation.

    measures.began(hit_blocks, age_us, wait_us)                  # a request got its blocks
    measures.first_token(computed, attached, since_asked_us, since_began_us)
    measures.cancelled(took_us)                                  # from the cancel to the release
    measures.figures()                                           # names and numbers, as workers report them

1. The path of a request writes a few numbers into a row of memory that stays; distributions are made of many rows at a
   time.
2. Time to first token counts from when the request was first asked for here, waiting included, to when what computes
   its first token has ended. A request that is preempted before it is counted once, when it comes.
3. Prefill time avoided is what the measured cost of a prefill says of the tokens that were attached (`prefill_cost`).
   It only rises: what is learned later changes nothing that was counted, and nothing counts before the cost is known.
"""

from __future__ import annotations

from struct import Struct

import numpy as np
from numpy.typing import NDArray

from kvcustody.clock import MICROSECONDS
from kvcustody.governance.observability.histogram import AGES, SECONDS, TOKENS, Histogram
from kvcustody.governance.observability.prefill_cost import PrefillCost

_ROWS = 1024  # that wait to be counted
_BEGAN, _FIRST, _CANCELLED = Struct("3q"), Struct("5q"), Struct("1q")
_BEGAN_BYTES, _FIRST_BYTES = _BEGAN.size, _FIRST.size
_BEGAN_FULL, _FIRST_FULL = _ROWS * _BEGAN_BYTES, _ROWS * _FIRST_BYTES


class ServingMeasures:
    """The measures of one engine. The same thread adds and reads `figures`."""

    __slots__ = (
        "_began",
        "_began_used",
        "_block_tokens",
        "_cancelled",
        "_first",
        "_first_used",
        "absent_stores",
        "ages",
        "avoided_seconds",
        "cancels",
        "cost",
        "first_with_hit",
        "first_without_hit",
        "hit_tokens",
        "look_up_ns",
        "stalled",
        "waits",
    )

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._began = bytearray(_BEGAN_FULL)
        self._began_used = 0  # bytes of it
        self._first = bytearray(_FIRST_FULL)
        self._first_used = 0
        self._cancelled = bytearray()
        self.waits = Histogram(SECONDS)
        self.ages = Histogram(AGES)
        self.hit_tokens = Histogram(TOKENS)
        self.first_with_hit, self.first_without_hit = Histogram(SECONDS), Histogram(SECONDS)
        self.cancels = Histogram(SECONDS)
        self.cost = PrefillCost()
        self.avoided_seconds = 0.0
        self.look_up_ns = 0
        self.absent_stores = 0  # classifications whose copies would go to a remote store alone, where there is none
        self.stalled = 0  # times that a running request got no room for its next token

    def began(self, hit_blocks: int, age_us: int, wait_us: int) -> None:
        """Count a request that got its blocks after `wait_us`, with its attached blocks and the age of the newest."""
        at = self._began_used
        _BEGAN.pack_into(self._began, at, hit_blocks, age_us, wait_us)
        self._began_used = at = at + _BEGAN_BYTES
        if at == _BEGAN_FULL:
            self._count_began()

    def first_token(
        self, computed: int, before: int, since_asked_us: int, since_began_us: int, *, earlier: int = 0
    ) -> None:
        """Count a request's first token: it prefilled `computed` tokens after `before` attached ones.

        `earlier` of these were its own work before it was preempted: attaching them avoided nothing.
        """
        at = self._first_used
        _FIRST.pack_into(self._first, at, computed, before, since_asked_us, since_began_us, earlier)
        self._first_used = at = at + _FIRST_BYTES
        if at == _FIRST_FULL:
            self._count_first()

    def cancelled(self, took_us: int) -> None:
        """Count a cancelled request that has released its blocks."""
        self._cancelled += _CANCELLED.pack(took_us)
        if len(self._cancelled) >= _ROWS * _CANCELLED.size:
            self._count_cancelled()

    def _count_began(self) -> None:
        hits, ages, waits = _columns(self._began, self._began_used, _BEGAN)
        self._began_used = 0
        self.waits.add_many(waits / MICROSECONDS)
        which = hits > 0
        self.ages.add_many(ages[which] / MICROSECONDS)
        self.hit_tokens.add_many(hits[which] * self._block_tokens)

    def _count_first(self) -> None:
        computed, before, asked, began, earlier = _columns(self._first, self._first_used, _FIRST)
        self._first_used = 0
        is_hit = before > earlier
        self.first_with_hit.add_many(asked[is_hit] / MICROSECONDS)
        self.first_without_hit.add_many(asked[~is_hit] / MICROSECONDS)
        self.cost.learn(computed, before, began / MICROSECONDS)
        self.avoided_seconds += self.cost.avoided_seconds(before) - self.cost.avoided_seconds(earlier)

    def _count_cancelled(self) -> None:
        (took,) = _columns(self._cancelled, len(self._cancelled), _CANCELLED)
        self._cancelled = bytearray()
        self.cancels.add_many(took / MICROSECONDS)

    def figures(self) -> dict[str, float]:
        """Return every measure, by the keys of `metrics.MEASURES`."""
        self._count_began()
        self._count_first()
        self._count_cancelled()
        measured: dict[str, float] = {
            "stalled": self.stalled,
            "absent_stores": self.absent_stores,
            "look_up_seconds": self.look_up_ns / 1e9,
        }
        for name, one in (
            ("ttft.hit", self.first_with_hit),
            ("ttft.miss", self.first_without_hit),
            ("queue", self.waits),
            ("hit_age", self.ages),
            ("hit_length", self.hit_tokens),
            ("cancel", self.cancels),
        ):
            measured.update(one.figures(name))
        if self.cost.is_known:
            measured["prefill_avoided_seconds"] = self.avoided_seconds
            self.cost.solve()
            for term, seconds in zip(("start", "token", "pair"), self.cost.coefficients.tolist(), strict=True):
                measured[f"prefill_cost.{term}"] = seconds
        if self.cost.error is not None:
            measured["prefill_cost_error"] = self.cost.error
        return measured


def _columns(rows: bytearray, used: int, row: Struct) -> NDArray[np.float64]:
    """The first `used` bytes of rows of numbers, by column."""
    numbers = np.frombuffer(rows, dtype=np.int64, count=used // 8).astype(np.float64)
    return numbers.reshape(-1, row.size // 8).T
