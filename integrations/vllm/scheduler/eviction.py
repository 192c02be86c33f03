"""Room in vLLM's pool: custody that ends before vLLM would evict, in our order or, without one, in vLLM's.

E1 vLLM never evicts a cached block by itself: `make` has ended its custody before vLLM comes to it. So between two
   settlements the port and vLLM's index differ only in blocks that are new.
E2 Blocks end in batches, and ahead of their use: they are zero when they are handed out, so that a step need not wait
   for their scrub. At most two batches are ended before somebody asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvcustody.integrations.vllm.scheduler.request_state import SchedulerState

EVICT_BLOCKS_MAX, EVICT_SHARE = 256, 1 / 64  # of the pool, that one batch ends ahead of their use


class Room:
    """Decides what ends so that the next hand-outs evict nothing."""

    def __init__(self, books: SchedulerState, pool_blocks: int) -> None:
        self._books = books
        self._batch = min(EVICT_BLOCKS_MAX, int(pool_blocks * EVICT_SHARE))

    def ahead(self) -> None:
        """Out of the way of a step: enough room for what the next ones are likely to ask (E2)."""
        if self._books.pool.spare_blocks < self._batch:
            self.make(self._batch)

    def make(self, blocks: int) -> None:
        """Before vLLM would evict to hand out `blocks`: end some custody now (E1)."""
        books, pool = self._books, self._books.pool
        if pool.has_spare(blocks):
            return
        with books.caused("evicted"):
            partition = books.port.pool.partition
            if partition.common_blocks != partition.size:  # some tenant has a guarantee
                self._end_over_guarantee(max(blocks, self._batch))
                if pool.has_spare(blocks):
                    return
            stripped = pool.strip_oldest(blocks, self._batch)
        books.port.unpublished(stripped, "evicted")

    def _end_over_guarantee(self, count: int) -> None:
        """Those that are over their guarantee go first."""
        books = self._books
        blocks, port = books.pool.blocks, books.port
        books.journal.sync()
        wanted = [one for one in port.pool.victims(count) if blocks[one].ref_cnt == 0]
        if wanted:
            victims = np.array(wanted, dtype=np.int64)
            books.pool.forget(port.pool.end_cached(victims, "evicted", port.clock.now_us()))
