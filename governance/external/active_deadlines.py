"""How long a request may run: the nearest limit is known without a look at the others."""

from __future__ import annotations

import heapq

from kvcustody.allocator.external.residency import ExternalResidency


class ActiveDeadlines:
    """Running residencies by the moment at which their policy ends them. Those that ended before are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, ExternalResidency]] = []

    def push(self, limit_us: int, residency: ExternalResidency) -> None:
        """Enter a residency that has begun."""
        heapq.heappush(self._heap, (limit_us, residency.id, residency))
        if len(self._heap) > 64 and len(self._heap) > 2 * sum(entry[2].is_running for entry in self._heap[:64]):
            self._drop_ended()

    def pop_expired(self, now_us: int) -> list[object]:
        """The requests that have run to their limit, each once."""
        over: list[object] = []
        heap = self._heap
        while heap and heap[0][0] <= now_us:
            residency = heapq.heappop(heap)[2]
            if residency.is_running:
                over.append(residency.request_id)
        return over

    def is_due(self, now_us: int) -> bool:
        """A residency that runs is at its limit."""
        if not self._heap or self._heap[0][0] > now_us:
            return False
        due_us = self.next_due_us()
        return due_us is not None and due_us <= now_us

    def next_due_us(self) -> int | None:
        """The nearest limit of a residency that runs, or None."""
        heap = self._heap
        while heap and not heap[0][2].is_running:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def _drop_ended(self) -> None:
        live = [entry for entry in self._heap if entry[2].is_running]
        if 2 * len(live) <= len(self._heap):
            heapq.heapify(live)
            self._heap = live
