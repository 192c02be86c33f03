"""vLLM's free queue, in which blocks without a key stand at the head, the longest clean first.

1. The first `spare_blocks` blocks have no key, and the last of them is where further ones join. So memory that holds
   nobody's data is used before anything cached is evicted, what ended last is used last among it, and its scrub is
   done by then.
2. `spare_blocks` may be less than the blocks without a key at the head, never more; `count_spare` counts anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from kvcustody.integrations.vllm.versions import check_type, swap_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock

LOOK_AHEAD_BLOCKS = 256  # that one walk along the free queue counts beyond what is needed


class GovernedFreeQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """vLLM's `FreeKVCacheBlockQueue`. Whoever prepends blocks has made sure that they have no key."""

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
        """See vLLM's; one of the spare ones leaves from among them only when a block is withheld."""
        if block._block_hash is None:
            self.spare_blocks, self._last_spare = 0, None
        super().remove(block)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks without a key, behind the spare ones (rule 1)."""
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
        """Blocks with a key from the head on: all among the first `needed` blocks, up to `look_ahead` in all.

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
    """`queue` itself, governed. Raises `ConfigError` unless it is vLLM's own class."""
    if not isinstance(queue, GovernedFreeQueue):
        check_type(queue, FreeKVCacheBlockQueue, "the free queue")
        swap_class(queue, GovernedFreeQueue)
    assert isinstance(queue, GovernedFreeQueue)
    return queue
