"""The engine's paged cache, governed: every question about blocks is answered by custody, never by its own pool.

1. The engine's own pool hands out nothing: a path that we do not know of fails instead of escaping custody.
2. The engine's own index is never written or read: no unkeyed hash, and no merging of blocks after the fact.
"""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvcustody.errors import IsolationError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.integrations.transformers.batching.custody import BatchCustody

FILLS = -1  # a step computes the last token of a decoding request's last block


class SealedPool:
    """Replaces the engine's pool of free blocks."""

    num_free_sectors = 0

    def try_to_free_sectors(self) -> None:
        """Do nothing: nothing is free here."""

    def reset(self) -> None:
        """Do nothing: there is nothing to forget."""

    def count_free_blocks(self, index: int) -> int:
        """Return 0: nothing is free here."""
        return 0

    def _refuse(self, *operands: object) -> NoReturn:
        raise IsolationError("the engine asked its own pool for blocks, which are in custody; check its version")

    allocate_sector = free_blocks = get_free_blocks = set_blocks_per_sector = _refuse


class GovernedPagedCache(PagedAttentionCache):  # type: ignore[misc, unused-ignore]
    """Replaces a `PagedAttentionCache`'s class. Made by `govern`, before anything is allocated."""

    custody: BatchCustody
    is_scheduling: bool

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Return whether the request has room for `request_len` more tokens; the room was allocated before."""
        record = self.custody.records.get(state.request_id)
        if record is not None:
            needed: int = state.position_offset + request_len
            return record.room_tokens >= needed
        if self.is_scheduling:  # not admitted
            return False
        tokens: int = state.position_offset + request_len
        if dry_run:
            return tokens <= self.custody.free_blocks() * self.custody.page
        return self._store_warmup(state, tokens)

    def _store_warmup(self, state: Any, tokens: int) -> bool:
        """Return a dummy request for capturing graphs; it has no owner, so it reuses nothing."""
        custody = self.custody
        with custody.turn:
            custody.take_claim(state.request_id)
            admitted = isinstance(custody.admit(state.request_id, [0] * tokens, None), Admission)
            if not admitted:
                custody.forget(state.request_id)
            return admitted

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Return no match: matches are made at admission."""
        return 0

    def count_new_complete_blocks(self, state: Any, request_len: int) -> Any:
        """Return what to report after this step: the computed part of the prompt, or a filled block; else nothing."""
        record = self.custody.records[state.request_id]
        end: int = state.position_offset + request_len
        if end <= record.prompt:
            return end
        return FILLS if end == record.room_tokens else 0

    def mark_complete_blocks(self, state: Any, complete_blocks: Any) -> None:
        """Report the step that has run."""
        if not complete_blocks:
            return
        with self.custody.turn:
            if complete_blocks == FILLS:
                self.custody.filled(state.request_id, state.generated_tokens)
            else:
                self.custody.computed(state.request_id, complete_blocks)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Release a request that the engine ends."""
        with self.custody.turn:
            self.custody.release(request_id, "finished")
            self.custody.forget(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Release all requests, because the engine starts over. CACHED blocks stay in custody until their deadline."""
        with self.custody.turn:
            self.custody.release_all("aborted")

    def reset(self) -> None:
        """Start over after a warm-up."""
        self.free_all_requests()

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: dict[str, tuple[list[int], list[int]]]
    ) -> list[str]:
        """Fork into as many of `dst_req_ids` as there is room for; the engine queues the others."""
        custody = self.custody
        forked: list[str] = []
        with custody.turn:
            custody.inherit(src_state.request_id, dst_req_ids)
            for child_id in dst_req_ids:
                copies = custody.fork(
                    src_state.request_id, child_id, src_state.initial_tokens, src_state.position_offset
                )
                if copies is None:
                    break
                for name, (sources, own) in zip(self.cache_allocators, copies, strict=True):
                    copy_src_and_dst[name][0].extend(sources)
                    copy_src_and_dst[name][1].extend(own)
                forked.append(child_id)
        return forked

    def evict_cached_blocks(self) -> bool:
        """Do nothing: the Governor makes room."""
        return False

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Return 0: the governed scheduler preempts."""
        raise IsolationError("the engine tried to offload requests on its own; check its version")

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Return what no running request uses, as a share or in bytes."""
        free = self.custody.free_blocks()
        return free / self.custody.blocks.blocks if relative else free * self.custody.blocks.bytes_per_block


def govern(cache: Any, custody: BatchCustody) -> None:
    """Turn the engine's cache into a governed one (rule 1)."""
    cache.pool = SealedPool()
    for allocator in cache.cache_allocators.values():
        allocator.pool = cache.pool
    cache.custody, cache.is_scheduling = custody, False
    cache.__class__ = GovernedPagedCache
