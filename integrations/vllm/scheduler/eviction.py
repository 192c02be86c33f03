"""Which custody ends before vLLM would evict: in the policy's order or, without one, in vLLM's.

The pool calls `make_room` when it would have to evict, `SchedulerSide` calls `evict_ahead` while the workers compute.

1. vLLM never evicts a cached block by itself: `make_room` has ended its custody before vLLM comes to it. So between
   two flushes the port and vLLM's index differ only in blocks that are new.
2. Blocks end in batches, and ahead of their use: they are zero when they are handed out, so that a step need not wait
   for their scrub. At most two batches are ended before somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcustody.integrations.vllm.scheduler.block_pool import GovernedBlockPool
    from kvcustody.integrations.vllm.scheduler.deferred_calls import DeferredCalls

EVICT_BLOCKS_MAX, EVICT_SHARE = 256, 1 / 64  # of the pool, that one batch ends ahead of their use


class Evictor:
    """Decides what ends so that the next hand-outs evict nothing."""

    def __init__(
        self,
        pool: GovernedBlockPool,
        deferred: DeferredCalls,
        caused: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._pool = pool
        self._deferred = deferred
        self._caused = caused
        self._share = int(pool.num_gpu_blocks * EVICT_SHARE)

    @property
    def _batch(self) -> int:
        """An order of ranked blocks looks at the whole pool, so it is made for more of them at once."""
        ranked = self._deferred.port.pool.ranking is not None
        return self._share if ranked else min(EVICT_BLOCKS_MAX, self._share)

    def evict_ahead(self) -> None:
        """Out of the way of a step: enough room for what the next ones are likely to ask (rule 2)."""
        if self._pool.spare_blocks < self._batch:
            self.make_room(self._batch)

    def make_room(self, blocks: int) -> None:
        """Before vLLM would evict to hand out `blocks`: end some custody now (rule 1)."""
        pool, port = self._pool, self._deferred.port
        if pool.has_spare(blocks):
            return
        with self._caused("evicted"):
            if port.orders_victims:
                self._end_victims(max(blocks, self._batch))
                if pool.has_spare(blocks):
                    return
            stripped = pool.strip_oldest(blocks, self._batch)
        port.unpublished(stripped, "evicted")

    def _end_victims(self, count: int) -> None:
        """Those that the policy gives up first, and of tenants that are over their guarantee."""
        ended = self._deferred.port.victims(count)
        if ended:
            self._pool.forget(ended)
