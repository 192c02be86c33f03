"""Folds a run's events into a report: which tenants lost blocks and why, the blocks' ages, and the scrub times.

1. Only events are read, the same tuples that go to the ledger; the observer never looks into the pool.
2. A block's history is kept as three arrays by block index; a (block, generation) that does not match is counted as
   unexplained, not guessed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvcustody.audit.kinds import CustodyEnded, ReceiptRecorded, ResidencyOpened, ResidencyReleased, Runs
from kvcustody.lab.replay.report import Weighted

SHUTDOWN = "shutdown"


class ReplayObserver:
    """Counts over one run's events, by tenant and classification. Times are boot-time microseconds."""

    def __init__(self, blocks: int) -> None:
        self.ended: dict[str, Counter[str]] = defaultdict(Counter)
        self.scrubbed: Counter[str] = Counter()
        self.by_level: Counter[str] = Counter()
        self.scrub_lag = Weighted()
        self.age: dict[str, Weighted] = defaultdict(Weighted)
        self.ages = Weighted()
        self.released_blocks = 0
        self.unexplained_blocks = 0
        self._opened_us: dict[int, int] = {}
        self._born_us: NDArray[np.int64] = np.full(blocks, -1, dtype=np.int64)
        self._ended_us: NDArray[np.int64] = np.full(blocks, -1, dtype=np.int64)
        self._generation: NDArray[np.int64] = np.full(blocks, -1, dtype=np.int64)

    def see(self, events: Iterable[object]) -> None:
        """Fold events, in the order of their emission."""
        for event in events:
            if isinstance(event, CustodyEnded):
                self._custody_ended(event)
            elif isinstance(event, ReceiptRecorded):
                self._receipt(event)
            elif isinstance(event, ResidencyOpened):
                self._opened_us[event.residency] = event.at_us
                self._written(event.written, event.at_us)
            elif isinstance(event, ResidencyReleased):
                self._written(event.written, self._opened_us.pop(event.residency, event.at_us))

    def _written(self, runs: Runs, born_us: int) -> None:
        for run in runs:
            self._born_us[run.blocks] = born_us
            self._generation[run.blocks] = _generations(run.blocks, run.generation)

    def _custody_ended(self, event: CustodyEnded) -> None:
        for run in event.runs:
            count = len(run.blocks)
            self.released_blocks += count
            self.ended[event.tenant][event.cause] += count
            self._ended_us[run.blocks] = event.ended_us
            if event.cause == SHUTDOWN:
                continue  # the replay's own end says nothing about retention
            born = self._born_us[run.blocks]
            known = (born >= 0) & (self._generation[run.blocks] == _generations(run.blocks, run.generation))
            for value, times in zip(*np.unique(born[known], return_counts=True), strict=True):
                age = event.ended_us - int(value)
                self.age[event.classification].add(age, int(times))
                self.ages.add(age, int(times))

    def _receipt(self, event: ReceiptRecorded) -> None:
        if event.tenant is None or event.result != "ok":
            return
        for run in event.runs:
            count = len(run.blocks)
            self.by_level[event.level] += count
            if event.shard == 0:
                self.scrubbed[event.tenant] += count
            ended = self._ended_us[run.blocks]
            self.unexplained_blocks += int(np.count_nonzero(ended < 0))
            for value, times in zip(*np.unique(ended[ended >= 0], return_counts=True), strict=True):
                self.scrub_lag.add(event.ended_us - int(value), int(times))


def _generations(blocks: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    return np.arange(first, first + len(blocks), dtype=np.int64)
