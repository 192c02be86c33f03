"""vLLM's block pool and free queue under governance: they report what they do, and three operations are closed.

1. `governed_pool` swaps the class of vLLM's own pool object; nothing in it is copied or rebuilt. Without `custody`
   every method is the original's.
2. A block enters the index only under keys that governance made: what is not publishable is never cached.
3. Entries for part of a block are not made: their later copies would run beside the scrub, and need a key inside a
   block.
4. Blocks without a key stand at the head of the free queue (free_queue, rule 1 of `free_queue`). What vLLM would
   evict has ended before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock, make_block_hash_with_group_id

from kvcustody.errors import IsolationError
from kvcustody.integrations.vllm.scheduler.governed_request import ATTRIBUTE, PublishedRange
from kvcustody.integrations.vllm.versions import check_type, swap_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvcustody.integrations.vllm.scheduler.deferred_calls import DeferredCalls
    from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest
    from kvcustody.integrations.vllm.scheduler.kv_events import SchedulerBlockEvents


class PoolCustody(Protocol):
    """The adapter's state as the pool reads it and reports to it (`SchedulerState`)."""

    caching: bool
    is_releasing: bool
    defers_inserts: bool
    withheld: set[int]
    deferred: DeferredCalls
    events: SchedulerBlockEvents | None
    make_room: Callable[[int], None]

    def complete_keys(self, governed: GovernedRequest, tokens: int, /) -> None:
        """Make the keys of blocks that end at token `tokens` or earlier, which are about to enter the index."""

    def forgotten(self, blocks: Sequence[int], cause: str, /) -> None:
        """Take note that vLLM dropped the keys of `blocks` itself."""

    def indexed_blocks(self) -> list[int]:
        """Return the blocks that the port believes to be in vLLM's index."""

    def caused(self, cause: str, /) -> AbstractContextManager[None]:
        """Return why keys leave vLLM's index now, for the events."""


class GovernedBlockPool(BlockPool):  # type: ignore[misc]
    """vLLM's `BlockPool`, which reports what it does to `custody`."""

    custody: PoolCustody | None = None
    free_block_queue: GovernedFreeQueue

    @property
    def spare_blocks(self) -> int:
        """The number of allocations that evict nothing (free_queue, rule 2 of `free_queue`)."""
        return self.free_block_queue.spare_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocate blocks, with our evictions first."""
        custody = self.custody
        if custody is None:
            return super().get_new_blocks(num_blocks)  # type: ignore[no-any-return]
        if num_blocks > self.free_block_queue.spare_blocks:
            custody.make_room(num_blocks)
        # None of them has a key (rule 4): vLLM need not look, block by block, for what it would have to evict.
        caching = custody.caching
        self.enable_caching = caching and num_blocks > self.free_block_queue.spare_blocks
        try:
            blocks: list[KVCacheBlock] = super().get_new_blocks(num_blocks)
        finally:
            self.enable_caching = caching
        custody.deferred.allocated_blocks += num_blocks
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop references. `DeferredCalls.flush` finds the owners of those outside a release."""
        custody = self.custody
        if custody is None or custody.is_releasing:
            super().free_blocks(ordered_blocks)
            return
        blocks = list(ordered_blocks)
        if blocks:
            custody.deferred.freed_outside_release = True
            super().free_blocks(blocks)

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Publish whole blocks, if the request may (rule 2)."""
        custody = self.custody
        if custody is None:
            super().cache_full_blocks(
                request,
                blocks,
                num_cached_blocks,
                num_full_blocks,
                block_size,
                kv_cache_group_id,
                block_mask,
            )
            return
        governed: GovernedRequest | None = request.__dict__.get(ATTRIBUTE)
        if governed is None or not governed.publishes:
            return
        if custody.defers_inserts and block_mask is None:
            custody.deferred.pending_inserts.append((governed, blocks, num_cached_blocks, num_full_blocks))
        else:
            self.publish(
                governed,
                blocks,
                num_cached_blocks,
                num_full_blocks,
                block_size,
                kv_cache_group_id,
                block_mask,
            )

    def publish(
        self,
        governed: GovernedRequest,
        blocks: list[KVCacheBlock],
        first: int,
        last: int,
        block_size: int,
        group: int,
        mask: list[bool] | None = None,
    ) -> None:
        """Add entries [first, last) of a request's table to the index, as far as they have keys (rule 2)."""
        custody = self.custody
        assert custody is not None
        request = governed.request
        custody.complete_keys(governed, last * block_size)
        keys = request.block_hashes
        keyed_blocks = len(keys) * self.hash_block_size // block_size
        if last > keyed_blocks:  # nothing enters the index without a key of its own
            mask = mask and mask[: max(0, keyed_blocks - first)]
            last = keyed_blocks
        if first >= last:
            return
        if governed.fills_one_by_one and last == first + 1 and mask is None:
            custody.deferred.filled_blocks.append((governed, first))
            key = make_block_hash_with_group_id(keys[first], group)
            self._insert_block_hash(key, blocks[first], last * block_size)
        else:
            if not governed.unreported_ranges:
                custody.deferred.to_publish.append(governed)
            governed.unreported_ranges.append(PublishedRange(group, first, last, mask))
            super().cache_full_blocks(request, blocks, first, last, block_size, group, mask)
        if custody.events is not None:
            custody.events.after_insert(governed, group, blocks[first:last], first, block_size)

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, num_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Cache nothing for part of a block, and forget a replaced block's content."""
        if self.custody is None:
            return super().cache_partial_block(request, block, num_tokens, *args, **kwargs)
        if kwargs.get("replace_existing_hashes"):
            self._maybe_evict_cached_block(block)
        return None

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Evict blocks on another component's request, and report it so that custody ends with the key."""
        custody = self.custody
        if custody is None:
            super().evict_blocks(block_ids)
            return
        custody.deferred.insert_pending()
        with custody.caused("evicted by the engine"):
            super().evict_blocks(block_ids)
        custody.forgotten(sorted(block_ids), "evicted by the engine")

    def reset_prefix_cache(self) -> bool:
        """Reset the cache; withheld blocks have no owner, so they do not prevent it."""
        custody = self.custody
        if custody is None:
            return bool(super().reset_prefix_cache())
        custody.deferred.flush()
        self.num_gpu_blocks -= len(custody.withheld)
        try:
            done = bool(super().reset_prefix_cache())
        finally:
            self.num_gpu_blocks += len(custody.withheld)
        if done:
            custody.forgotten(custody.indexed_blocks(), "reset")
            if custody.events is not None:
                custody.events.cleared("reset")
        return done

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        """Raise `IsolationError`: a reader would continue with blocks that have no reference."""
        if self.custody is not None:
            raise IsolationError("a connector reads blocks after their release; it cannot run under kvcustody")
        super().unpin_blocks(blocks, on_reuse)

    # -- for EngineControl --------------------------------------------------------------------------------------------

    def forget(self, block_ids: Sequence[int]) -> None:
        """Drop keys without a report to custody, and put unreferenced blocks where they are used first."""
        first: list[KVCacheBlock] = []
        queue = self.free_block_queue
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block._block_hash is None:
                continue
            if block.ref_cnt == 0 and not block.is_null:
                queue.remove(block)
                first.append(block)
            self._maybe_evict_cached_block(block)
        queue.prepend_n(first)

    def strip_oldest(self, needed: int, look_ahead: int) -> list[int]:
        """Drop the keys of the longest unused blocks, unreported: what the next `needed` hand-outs would evict, and
        up to `look_ahead` blocks in all. They stand at the head of the queue already; returns them.
        """
        blocks = self.free_block_queue.walk(needed, look_ahead)
        for block in blocks:
            self._maybe_evict_cached_block(block)
        return [block.block_id for block in blocks]

    def withhold(self, block_id: int) -> None:
        """Withhold this block from allocation by a reference that is never dropped."""
        block = self.blocks[block_id]
        self._maybe_evict_cached_block(block)
        if block.ref_cnt == 0:
            self.free_block_queue.remove(block)
        block.ref_cnt += 1

    def has_spare(self, needed: int) -> bool:
        """Return whether the next `needed` allocations would evict nothing; counts `spare_blocks` again."""
        queue = self.free_block_queue
        free_blocks = int(queue.num_free_blocks)
        return queue.count_spare(needed + LOOK_AHEAD_BLOCKS) >= min(needed, free_blocks)


def governed_pool(pool: BlockPool, custody: PoolCustody) -> GovernedBlockPool:
    """Return `pool` itself, governed.

    Raises:
        ConfigError: it is not vLLM's own class.
    """
    if not isinstance(pool, GovernedBlockPool):
        check_type(pool, BlockPool, "the block pool")
        swap_class(pool, GovernedBlockPool)
        governed_free_queue(pool.free_block_queue)
    assert isinstance(pool, GovernedBlockPool)
    pool.custody = custody
    return pool


# vLLM's free queue, with blocks without a key at its head, the longest clean first.
#
# Rules of this section:
# 1. The first `spare_blocks` blocks have no key, and further ones join behind them. So memory without anyone's data
#    is used before anything cached is evicted. Among it the block that ended last is used last, when its scrub is
#    done.
# 2. `spare_blocks` may be less than the number of blocks without a key at the head, never more; `count_spare` counts
#    again.

LOOK_AHEAD_BLOCKS = 256  # that one walk along the free queue counts beyond what is needed


class GovernedFreeQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """vLLM's `FreeKVCacheBlockQueue`. Prepended blocks must have no key."""

    spare_blocks = 0
    _last_spare: KVCacheBlock | None = None

    def popleft(self) -> KVCacheBlock:
        """See vLLM's."""
        self._take(1)
        return super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """See vLLM's."""
        self._take(n)
        return super().popleft_n(n)  # type: ignore[no-any-return]

    def _take(self, count: int) -> None:
        left = self.spare_blocks - count
        if left > 0:
            self.spare_blocks = left
        else:
            self.spare_blocks, self._last_spare = 0, None

    def remove(self, block: KVCacheBlock) -> None:
        """See vLLM's; a spare block leaves from among the others only when it is withheld."""
        if block._block_hash is None:
            self.spare_blocks, self._last_spare = 0, None
        super().remove(block)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Insert blocks without a key behind the spare ones (rule 1)."""
        if not blocks:
            return
        before = self._last_spare
        if before is None:
            super().prepend_n(blocks)
            self.spare_blocks = len(blocks)
        else:
            after = before.next_free_block
            assert after is not None, "the last spare block is in the queue"
            for block in blocks:
                before.next_free_block, block.prev_free_block = block, before
                before = block
            before.next_free_block, after.prev_free_block = after, before
            self.num_free_blocks += len(blocks)
            self.spare_blocks += len(blocks)
        self._last_spare = blocks[-1]

    def count_spare(self, at_most: int) -> int:
        """Count the blocks without a key at the head, up to `at_most`."""
        block = last = self.fake_free_list_head
        count = 0
        most = min(at_most, self.num_free_blocks)
        while count < most and (block := block.next_free_block)._block_hash is None:
            last = block
            count += 1
        self._keep_spare(count, last)
        return count

    def _keep_spare(self, count: int, last: KVCacheBlock) -> None:
        self.spare_blocks, self._last_spare = (count, last) if count else (0, None)

    def walk(self, needed: int, look_ahead: int) -> list[KVCacheBlock]:
        """Return blocks with a key from the head on: all among the first `needed` blocks, up to `look_ahead` in total.

        The caller takes their keys, so everything that was walked is spare afterwards.
        """
        keyed: list[KVCacheBlock] = []
        last = self.fake_free_list_head
        walked = 0
        while walked < self.num_free_blocks and (walked < needed or len(keyed) < look_ahead):
            last = last.next_free_block
            if last._block_hash is not None:
                keyed.append(last)
            walked += 1
        self._keep_spare(walked, last)
        return keyed


def governed_free_queue(queue: FreeKVCacheBlockQueue) -> GovernedFreeQueue:
    """Return `queue` itself, governed.

    Raises:
        ConfigError: it is not vLLM's own class.
    """
    if not isinstance(queue, GovernedFreeQueue):
        check_type(queue, FreeKVCacheBlockQueue, "the free queue")
        swap_class(queue, GovernedFreeQueue)
    assert isinstance(queue, GovernedFreeQueue)
    return queue
