"""How far an incarnation's events are finished: the one number below which none is outstanding."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class DurableWatermark:
    """The highest sequence up to which every event is durable, or was refused to its caller."""

    def __init__(self) -> None:
        self.sequence = 0
        self._beyond: set[int] = set()  # finished, with an unfinished one before them
        self._moved = threading.Condition()

    def advance(self, finished: Sequence[int]) -> None:
        """These sequences, each given once, are finished."""
        if not finished:
            return
        mark = self.sequence
        if min(finished) == mark + 1 and max(finished) == mark + len(
            finished
        ):  # the rule: a batch without holes
            mark += len(finished)
        else:
            self._beyond.update(finished)
        while mark + 1 in self._beyond:
            mark += 1
            self._beyond.discard(mark)
        with self._moved:
            self.sequence = mark
            self._moved.notify_all()

    def reached(self, sequence: int, timeout_seconds: float) -> bool:
        """Wait until everything up to a sequence is finished; False when time ran out."""
        with self._moved:
            return self._moved.wait_for(lambda: self.sequence >= sequence, timeout_seconds)
