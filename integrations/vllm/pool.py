"""vLLM's block pool under governance: the same pool, with what it does told, and three doors shut.

P1 `governed_pool` swaps the class of vLLM's own pool object; nothing in it is copied or rebuilt. Without `custody`
   every method is the original's.
P2 A block enters the index only under keys that governance made: what is not publishable is never cached.
P3 Entries for part of a block are not made: their later copies would run beside the scrub, and need a key inside a
   block.
P4 Blocks whose custody ended stand at the head of the free queue, so memory that holds nobody's data is used before
   anything cached is evicted.
P5 `spare_blocks` is never more than the blocks without a key that stand at that head: others only ever join behind
   them, and what leaves from among them is counted. So the queue is walked once in many hand-outs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from kvcustody.errors import IsolationError
from kvcustody.integrations.vllm.governed_request import ATTRIBUTE, Published
from kvcustody.integrations.vllm.versions import check_type

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvcustody.integrations.vllm.books import Books
    from kvcustody.integrations.vllm.governed_request import GovernedRequest

LOOK_AHEAD_BLOCKS = 256  # that one walk along the free queue counts beyond what is needed


class GovernedBlockPool(BlockPool):  # type: ignore[misc]
    """vLLM's `BlockPool`, telling `custody` what it does."""

    custody: Books | None = None
    spare_blocks = 0  # P5

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out, our evictions first."""
        custody = self.custody
        if custody is None:
            return super().get_new_blocks(num_blocks)  # type: ignore[no-any-return]
        if num_blocks > self.spare_blocks:
            custody.make_room(num_blocks)
        # None of them has a key (P5): vLLM need not look, block by block, for what it would have to evict.
        caching = custody.caching
        self.enable_caching = caching and num_blocks > self.spare_blocks
        try:
            blocks: list[KVCacheBlock] = super().get_new_blocks(num_blocks)
        finally:
            self.enable_caching = caching
        self.spare_blocks -= num_blocks
        custody.allocated_blocks += num_blocks
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give references back. Outside a request's release, note whose they may be: `Books.settle` finds out."""
        custody = self.custody
        if custody is None or custody.is_releasing:
            super().free_blocks(ordered_blocks)
            return
        blocks = list(ordered_blocks)
        if blocks:
            custody.loose = True
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
        """Publish whole blocks, if the request may (P2)."""
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
        mine: GovernedRequest | None = request.__dict__.get(ATTRIBUTE)
        if mine is None or not mine.publishes:
            return
        keys = request.block_hashes
        keyed_blocks = len(keys) * self.hash_block_size // block_size
        if num_full_blocks > keyed_blocks:  # nothing enters the index without a key of its own
            block_mask = block_mask and block_mask[: max(0, keyed_blocks - num_cached_blocks)]
            num_full_blocks = keyed_blocks
        if num_cached_blocks >= num_full_blocks:
            return
        if mine.fills_one_by_one and num_full_blocks == num_cached_blocks + 1 and block_mask is None:
            custody.filled.append((mine, num_cached_blocks))
            key = make_block_hash_with_group_id(keys[num_cached_blocks], kv_cache_group_id)
            self._insert_block_hash(key, blocks[num_cached_blocks], num_full_blocks * block_size)
        else:
            if not mine.notes:
                custody.noted.append(mine)
            mine.notes.append(Published(kv_cache_group_id, num_cached_blocks, num_full_blocks, block_mask))
            super().cache_full_blocks(
                request,
                blocks,
                num_cached_blocks,
                num_full_blocks,
                block_size,
                kv_cache_group_id,
                block_mask,
            )
        if custody.events is not None:
            filled = blocks[num_cached_blocks:num_full_blocks]
            custody.events.entered(mine, kv_cache_group_id, filled, num_cached_blocks, block_size)

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, num_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Nothing is cached for part of a block (P3); what the block held before is forgotten if it was replaced."""
        if self.custody is None:
            return super().cache_partial_block(request, block, num_tokens, *args, **kwargs)
        if kwargs.get("replace_existing_hashes"):
            self._maybe_evict_cached_block(block)
        return None

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Somebody else's wish: told, so that custody ends with the key."""
        custody = self.custody
        if custody is None:
            super().evict_blocks(block_ids)
            return
        with custody.caused("evicted by the engine"):
            super().evict_blocks(block_ids)
        custody.forgotten(sorted(block_ids), "evicted by the engine")

    def reset_prefix_cache(self) -> bool:
        """Withheld blocks are nobody's, so they do not stand in the way of a reset."""
        custody = self.custody
        if custody is None:
            return bool(super().reset_prefix_cache())
        custody.settle()
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
        """Raises `IsolationError`: somebody would go on reading blocks that nobody references."""
        if self.custody is not None:
            raise IsolationError(
                "a connector reads blocks after their release; it cannot run under kvcustody"
            )
        super().unpin_blocks(blocks, on_reuse)

    # -- for EngineControl --------------------------------------------------------------------------------------------

    def forget(self, block_ids: Sequence[int]) -> None:
        """Drop keys, without telling custody, and put the unreferenced blocks where they are used first (P4)."""
        first: list[KVCacheBlock] = []
        more_spare = 0
        for block_id in block_ids:
            block = self.blocks[block_id]
            had_key = self._maybe_evict_cached_block(block)
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
                first.append(block)
                more_spare += had_key  # one without a key may have been counted already
        self.free_block_queue.prepend_n(first)
        self.spare_blocks += more_spare

    def strip_oldest(self, needed: int, ahead: int) -> list[int]:
        """Drop the keys of the longest unused blocks, without telling custody: what the next `needed` hand-outs would
        evict, and up to `ahead` blocks in all. They stand at the head of the queue already; returns them.
        """
        stripped: list[int] = []
        walked = 0
        block = self.free_block_queue.fake_free_list_head.next_free_block
        while (
            block is not None
            and block.next_free_block is not None
            and (walked < needed or len(stripped) < ahead)
        ):
            if block._block_hash is not None:
                self._maybe_evict_cached_block(block)
                stripped.append(block.block_id)
            walked += 1
            block = block.next_free_block
        self.spare_blocks = walked
        return stripped

    def withhold(self, block_id: int) -> None:
        """Never hand this block out again: a reference that nobody gives back."""
        block = self.blocks[block_id]
        self._maybe_evict_cached_block(block)
        if block.ref_cnt == 0:
            self.free_block_queue.remove(block)
            self.spare_blocks = 0  # it may have been one of them
        block.ref_cnt += 1

    def has_spare(self, needed: int) -> bool:
        """The next `needed` hand-outs would evict nothing; counts `spare_blocks` anew."""
        queue = self.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        most = min(needed + LOOK_AHEAD_BLOCKS, queue.num_free_blocks)
        count = 0
        while count < most and block._block_hash is None:
            count += 1
            block = block.next_free_block
        self.spare_blocks = count
        return bool(count >= min(needed, queue.num_free_blocks))


def governed_pool(pool: BlockPool, custody: Books) -> GovernedBlockPool:
    """`pool` itself, governed. Raises `ConfigError` unless it is vLLM's own class."""
    if not isinstance(pool, GovernedBlockPool):
        check_type(pool, BlockPool, "the block pool")
        pool.__class__ = GovernedBlockPool
    assert isinstance(pool, GovernedBlockPool)
    pool.custody = custody
    return pool
