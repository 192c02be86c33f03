"""vLLM's cache manager under governance: look-ups ask the port, and releases are reported to it.

1. `governed_manager` swaps the class of vLLM's own manager; its coordinator keeps its class and finds hits through
   `find_hit`, whatever kinds of layer groups there are.
2. A hit is never longer than what the port lets the request read, and every block of it passes the port's attach check.
   If a block does not pass, the hit is shortened: the coordinator is asked again with that bound, in every group.
3. Where the policy asks for checksums, a hit is read again by the workers first (`compared_tokens`). Its request waits
   for the answer, alone, and looks up again; what had changed is gone from the index by then.
4. From 0.33 on vLLM enters only blocks into its index that the request has hashes of: their keys are made as vLLM
   begins to, where before they were made as it does.
5. Skipping reads is the adapter's decision, not vLLM's, so that a request which skips them can still be deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvcustody.integrations.vllm.scheduler.governed_request import governed_request
from kvcustody.integrations.vllm.versions import check_type, running_version, swap_class

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvcustody.integrations.vllm.scheduler.scheduler_state import SchedulerState


class _ComparedLaterError(Exception):
    """The hit is being verified again."""


class GovernedKVCacheManager(KVCacheManager):  # type: ignore[misc]
    """vLLM's `KVCacheManager`, which asks `custody`."""

    custody: SchedulerState | None = None

    def get_computed_blocks(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Return the blocks that `request` may attach; none for a request that must wait or may not read."""
        custody = self.custody
        if custody is None:
            return super().get_computed_blocks(request, *args, **kwargs)
        if not custody.begin_look_up(request):
            return (self.empty_kv_cache_blocks, 0, 0)
        try:
            return super().get_computed_blocks(request, *args, **kwargs)
        except _ComparedLaterError:
            assert custody.reading is not None
            custody.reading.waits_for = "integrity"
            return (self.empty_kv_cache_blocks, 0, 0)
        finally:
            custody.reading = None

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Return whether a look-up counts in vLLM's statistics, as the request says (rule 5)."""
        if self.custody is None:
            return bool(super().prefix_cache_lookup_enabled(request))
        governed = governed_request(request)
        return bool(self.enable_caching) and governed is not None and not governed.skips_reading

    def free(self, request: Request) -> None:
        """Free a request that ended or was preempted."""
        custody = self.custody
        if custody is None:
            super().free(request)
            return
        custody.before_release(request)
        custody.is_releasing = True
        try:
            super().free(request)
        finally:
            custody.is_releasing = False
        custody.release(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Free as `free` does, where vLLM drops the blocks later: they have no owner from now on, and are reusable only
        then.
        """
        custody = self.custody
        if custody is None:
            return super().pop_blocks_for_free(request)  # type: ignore[no-any-return]
        custody.before_release(request)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request)
        custody.release(request)
        return blocks


def governed_manager(manager: KVCacheManager, custody: SchedulerState) -> GovernedKVCacheManager:
    """Return `manager` itself, governed.

    Raises:
        ConfigError: it is not vLLM's own class.
    """
    if not isinstance(manager, GovernedKVCacheManager):
        check_type(manager, KVCacheManager, "the cache manager")
        swap_class(manager, GovernedKVCacheManager)
        coordinator = manager.coordinator
        coordinator.find_longest_cache_hit = _finder(coordinator.find_longest_cache_hit, manager)
        if running_version().counts_hashes:
            coordinator.cache_blocks = _cacher(coordinator.cache_blocks, manager)
    assert isinstance(manager, GovernedKVCacheManager)
    manager.custody = custody
    return manager


def _cacher(original: Callable[..., None], manager: KVCacheManager) -> Callable[..., None]:
    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        custody = manager.custody
        if custody is not None:
            custody.keys_before_caching(request, num_computed_tokens)
        original(request, num_computed_tokens)

    return cache_blocks


def _finder(original: Callable[..., Any], manager: KVCacheManager) -> Callable[..., Any]:
    def find_hit(block_hashes: list[bytes], max_cache_hit_length: int) -> Any:
        custody = manager.custody
        governed = custody.reading if custody is not None else None
        if governed is None:
            return original(block_hashes, max_cache_hit_length)
        limit = min(max_cache_hit_length, governed.readable_tokens)
        while True:
            hit = original(block_hashes, limit)
            hit_tokens = hit[1]
            if not hit_tokens:
                governed.hit_blocks = (0,) * len(governed.tables)
                return hit
            attachable = custody.attachable_tokens(governed, hit[0], hit_tokens)
            if attachable >= hit_tokens:
                readable = custody.compared_tokens(governed, hit[0], hit_tokens)
                if readable is None:
                    raise _ComparedLaterError
                if readable >= hit_tokens:
                    governed.hit_blocks = tuple(map(len, hit[0]))
                    return hit
                attachable = readable
            limit = attachable

    return find_hit
