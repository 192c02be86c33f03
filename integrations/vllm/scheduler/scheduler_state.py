"""The adapter's state of one vLLM cache manager: a request's readable and allocated blocks, its end, and eviction.

The governed manager and pool call it, in the order of a request's life:

    begin_look_up -> attachable_tokens -> after_allocation -> (complete_keys)* -> before_release -> release
         |                                                                                            |
         +- False: it must wait, or reads nothing                preempted: resumed, begin_look_up again

vLLM moves blocks in many places; none of them is wrapped on the path of a decode step. What happened is recorded in
`deferred` and reported to the port when nobody waits; vLLM's own block tables are compared with what was last reported.

1. Whatever asks the port to decide or to end something has the deferred calls made first.
2. Requests that end by themselves may be reported late. Those that governance ends, and those that are preempted, are
   reported at once: the port, or the request's successor, needs them over.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from kvcustody.errors import IsolationError
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.decisions.access_plan import label_of
from kvcustody.governance.external.block_keys import LazyKeys
from kvcustody.governance.external.engine_control import EngineView
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.integrations.vllm.scheduler.block_hasher import new_keys, running_hasher
from kvcustody.integrations.vllm.scheduler.block_tables import GroupTable, KnownTable, group_tables
from kvcustody.integrations.vllm.scheduler.deferred_calls import DeferredCalls, PendingInsert
from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest, governed_request

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.governance.tiers.scope_salts import ScopeSalts
    from kvcustody.integrations.vllm.model_identity import Models
    from kvcustody.integrations.vllm.scheduler.block_pool import GovernedBlockPool
    from kvcustody.integrations.vllm.scheduler.deferred_calls import DeferredCalls
    from kvcustody.integrations.vllm.scheduler.kv_events import SchedulerBlockEvents

_CAUSES = {
    RequestStatus.FINISHED_ABORTED: "aborted",
    RequestStatus.FINISHED_ERROR: "error",
}


class SchedulerState:
    """The adapter's side of one cache manager and its pool."""

    def __init__(self, manager: KVCacheManager, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.groups: list[GroupTable] = group_tables(manager)
        self.requests: dict[str, GovernedRequest] = {}  # all that arrived and are not over
        self.reading: GovernedRequest | None = None
        self.is_releasing = False
        self.keys_early = False  # somebody beside us reads `block_hashes` (hasher, rule 3 of `block_hasher`)
        self.is_ending = False  # governance ends requests now (rule 2)
        self.withheld: set[int] = set()
        self._wait_for_token: dict[str, GovernedRequest] = {}  # have blocks, and no token yet
        self.events: SchedulerBlockEvents | None = None  # where somebody listens
        self.salts: ScopeSalts | None = None  # where a connector beside ours keeps blocks
        self._manager = manager
        self.pool: GovernedBlockPool = manager.block_pool
        self.caching = bool(manager.enable_caching)
        group = self.groups[0]
        self.simple = len(self.groups) == 1 and not group.drops and group.block_tokens == block_tokens
        self._fills = self.simple and not self.pool.enable_kv_cache_events  # blocks may be reported one by one
        self.defers_inserts = False  # blocks that a step fills enter the index when it has left
        self._null = manager.block_pool.null_block.block_id
        self.deferred = DeferredCalls(self.groups, self._null, self._insert_pending, simple=self.simple)
        self.evictor = Evictor(self.pool, self.deferred, self.caused)
        self.make_room: Callable[[int], None] = self.evictor.make_room
        self.models: Models
        self.admit_again: Callable[[GovernedRequest], None]
        self._port: EnginePort

    @property
    def port(self) -> EnginePort:
        """The port to which everything is reported."""
        return self._port

    @port.setter
    def port(self, port: EnginePort) -> None:
        self._port = self.deferred.port = port
        port.defer_calls(self.deferred.flush_unchecked, indexes_at_once=True)
        blocks = self.pool.blocks
        port.pool.is_held = lambda block: blocks[block].ref_cnt > 0

    # -- look-up ------------------------------------------------------------------------------------------------------

    def begin_look_up(self, request: Request) -> bool:
        """Ask the port what `request` may read now; return False where that is nothing, or where it must wait."""
        governed = self._mine(request)
        if governed.model_changes != self.models.changes:
            self.admit_again(governed)
        residency = governed.residency
        governed.hit_blocks = (0,) * len(self.groups)
        governed.readable_tokens = 0
        if residency is None:
            governed.waits_for = "refused"
            return False
        tokens = request._all_token_ids
        if len(tokens) != governed.reported_tokens:  # outputs in flight when it was preempted have arrived since
            residency = self._resume(governed, residency)
        governed.waits_for = self.port.may_start(residency)
        if governed.waits_for is not None:
            return False
        keys = self.port.look_up(residency, self._find, lazily=self.defers_inserts)
        if self.salts is not None:
            request.cache_salt = self._salt(self.salts, residency)
        governed.publishes = keys.publishable and self.caching
        request.block_hashes = keys.keys if type(keys.keys) is LazyKeys else list(keys.keys)
        governed.keyed_tokens = keys.whole * self.block_tokens
        governed.extends_keys = governed.publishes and not governed.extras.begin_after(
            governed.keyed_tokens // self.block_tokens
        )
        early = self.keys_early and governed.extends_keys
        request._block_hasher = running_hasher(governed, self.port.extend_keys, self.block_tokens) if early else None
        if governed.skips_reading or not keys.readable or not self.caching:
            return False
        if self.deferred.pending_inserts:
            self._insert_before_look_up(residency)
        governed.readable_tokens = keys.readable * self.block_tokens
        self.reading = governed
        return True

    @staticmethod
    def _salt(salts: ScopeSalts, residency: ExternalResidency) -> str:
        """Return the salt by which a connector beside ours stores this request's blocks: its domain's, where all are in
        one.
        """
        is_own = residency.reads_own_alone and not residency.segment_blocks and not residency.granted_blocks
        return salts.of(label_of(residency.domain)) if is_own and residency.publishes else salts.once()

    def _insert_before_look_up(self, residency: ExternalResidency) -> None:
        """Add deferred blocks that this look-up may read to the index first (journal, rule 5 of `deferred_calls`)."""
        if residency.reads_own_alone:
            domain = residency.domain
            writers = [governed.residency for governed, *_ in self.deferred.pending_inserts]
            if all(writer is not None and writer.domain is not domain for writer in writers):
                return
        self.deferred.insert_pending()

    def attachable_tokens(
        self, governed: GovernedRequest, hit_blocks: Sequence[Sequence[KVCacheBlock]], hit_tokens: int
    ) -> int:
        """Return how many leading tokens of a hit pass the attach check in every group."""
        fine, residency = hit_tokens, governed.residency
        assert residency is not None
        deferred = self.deferred
        if deferred.has_unreported_ends and deferred.keeps_until_us <= self.port.clock.now_us():
            deferred.flush_unchecked()
        if self.simple:
            ids = [block.block_id for block in hit_blocks[0]]
            count = self.port.attachable(residency, ids)
            if count < len(ids) and not deferred.is_empty:  # what the port has not heard of cannot be attached yet
                deferred.flush_unchecked()
                count = self.port.attachable(residency, ids)
            return min(fine, count * self.block_tokens)
        if deferred.freed_outside_release:  # what a window passed in this very step ends with its report
            deferred.flush_unchecked()
        for group, blocks in zip(self.groups, hit_blocks, strict=True):
            places = [at for at, block in enumerate(blocks) if not block.is_null]
            ids = [blocks[at].block_id for at in places]
            count = self.port.attachable(residency, ids, group.positions(places)) if ids else 0
            if count < len(ids):
                fine = min(fine, places[count] * group.block_tokens)
        return fine

    def compared_tokens(
        self, governed: GovernedRequest, hit_blocks: Sequence[Sequence[KVCacheBlock]], hit_tokens: int
    ) -> int | None:
        """Return how many leading tokens of a hit are unchanged in every group; None while that is being verified."""
        residency = governed.residency
        assert residency is not None
        if self.port.pool.sums is None:
            return hit_tokens
        places = [[at for at, block in enumerate(blocks) if not block.is_null] for blocks in hit_blocks]
        ids = [blocks[at].block_id for blocks, used in zip(hit_blocks, places, strict=True) for at in used]
        fine = self.port.may_read(residency, ids)
        if fine is None or fine.all():
            return None if fine is None else hit_tokens
        first = 0
        for group, used in zip(self.groups, places, strict=True):
            bad = np.flatnonzero(~fine[first : first + len(used)])
            if len(bad):
                hit_tokens = min(hit_tokens, used[bad[0]] * group.block_tokens)
            first += len(used)
        return hit_tokens

    def stop_publishing(self, requests: Iterable[Hashable]) -> None:
        """Stop these requests from publishing, because they have read changed blocks."""
        for request_id in requests:
            governed = self.requests.get(str(request_id))
            if governed is not None:
                governed.publishes = governed.fills_one_by_one = governed.extends_keys = False

    def complete_keys(self, governed: GovernedRequest, tokens: int) -> None:
        """Make the keys of blocks that end at token `tokens` or earlier, which are about to enter the index."""
        request = governed.request
        if type(request.block_hashes) is LazyKeys:
            request.block_hashes = request.block_hashes.complete()
        if tokens > governed.keyed_tokens and governed.extends_keys:
            end = tokens // self.block_tokens * self.block_tokens
            request.block_hashes += new_keys(governed, self.port.extend_keys, end)

    def keys_before_caching(self, request: Request, tokens: int) -> None:
        """Make keys before vLLM checks which blocks up to token `tokens` have them (0.33 and later)."""
        governed = governed_request(request)
        if governed is None or not governed.publishes:
            return
        if tokens >= governed.keyed_tokens + self.block_tokens or type(request.block_hashes) is LazyKeys:
            self.complete_keys(governed, tokens)

    def defer_inserts(self) -> None:
        """Defer index entries from now on, because a caller runs while the workers compute."""
        self.defers_inserts = self._fills and not self.keys_early

    def _insert_pending(self, pending: PendingInsert) -> None:
        governed, table, first, last = pending
        self.pool.publish(governed, table, first, last, self.block_tokens, 0)

    def _find(self, key: bytes) -> int:
        if self.deferred.pending_inserts:
            self.deferred.insert_pending()
        block = self.pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(key, 0))
        return -1 if block is None else int(block.block_id)

    def restorable_tokens(self, request: Request, computed_tokens: int) -> int:
        """Return how many tokens behind a hit of `computed_tokens` a tier would load."""
        tiers = self.deferred.tiers
        if tiers is None:
            return 0
        blocks = tiers.restorable(request, self._mine(request), computed_tokens // self.block_tokens)
        return blocks * self.block_tokens

    # -- what happened ------------------------------------------------------------------------------------------------

    def after_allocation(self, request: Request, restored_tokens: int = 0) -> None:
        """Report a waiting request's blocks: its hit is attached, the others are new.

        A tier fills `restored_tokens` of these; when it has, vLLM calls again, with what the request was handed since.
        """
        governed = self._mine(request)
        residency = governed.residency
        assert residency is not None
        if governed.request_id in self.deferred.running:
            self.deferred.has_unlisted_growth = True
            return
        attached, handed = self._first_tables(governed)
        self.deferred.record_allocation(governed, attached, handed)
        if residency.prompt_tokens:
            self._wait_for_token[governed.request_id] = governed
        governed.fills_one_by_one = self._fills and not residency.granted_blocks and residency.publishes
        if restored_tokens:
            assert self.deferred.tiers is not None
            self.deferred.tiers.allocated(governed)
        if not self.simple:
            self.deferred.flush()

    def _first_tables(self, governed: GovernedRequest) -> tuple[list[int], list[int]]:
        request_id = governed.request_id
        if self.simple:
            ids = [block.block_id for block in self.groups[0].blocks(request_id)]
            governed.tables[0] = KnownTable(ids)
            hits = governed.hit_blocks[0]
            return ids[:hits], ids[hits:]
        attached: list[int] = []
        handed: list[int] = []
        null = self._null
        for number, group in enumerate(self.groups):
            ids = [block.block_id for block in group.blocks(request_id)]
            governed.tables[number] = KnownTable(ids)
            hits = governed.hit_blocks[number]
            attached += [block for block in ids[:hits] if block != null]
            handed += [block for block in ids[hits:] if block != null]
        return attached, handed

    def note_first_tokens(self, now_us: int) -> None:
        """Report, once per step, requests with a first token since the last one."""
        waiting = self._wait_for_token
        if not waiting:
            return
        came = [governed for governed in waiting.values() if governed.request._output_token_ids]
        for governed in came:
            residency = governed.residency
            if residency is not None and residency.is_opened:
                del waiting[governed.request_id]
                self._has_first_token(governed, residency, now_us)

    def _has_first_token(
        self, governed: GovernedRequest, residency: ExternalResidency, now_us: int | None = None
    ) -> None:
        blocks = governed.hit_blocks[0] + governed.restored_blocks
        self.port.first_token(residency, blocks * self.groups[0].block_tokens, at_us=now_us)

    def tokens_of(self, request_id: object) -> int:
        """Return how many tokens a running request has."""
        governed = self.requests.get(str(request_id))
        return 0 if governed is None else int(governed.request.num_tokens)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def before_release(self, request: Request) -> None:
        """Ensure before a release that everything the request ever held is reported."""
        if self.is_ending or self.deferred.has_unreported_changes:
            self.deferred.flush_unchecked()

    def release(self, request: Request) -> None:
        """Release `request`, which ended, or was preempted and will start again."""
        governed = governed_request(request)
        if governed is None or governed.residency is None:
            self.requests.pop(request.request_id, None)
            return
        self.deferred.running.pop(request.request_id, None)
        residency = governed.residency
        if self._wait_for_token.pop(request.request_id, None) is not None and request.num_output_tokens:
            self._has_first_token(governed, residency)  # its only one
        if self.deferred.tiers is not None:
            self.deferred.tiers.released(governed)
        governed.end()
        if not request.is_finished():
            governed.forget_tables()
            request._block_hasher = None
            self._resume(governed, residency)
            return
        self.requests.pop(request.request_id, None)
        cause = governed.cause or _CAUSES.get(request.status, "finished")
        if self.is_ending or not self.simple:
            self.port.release(residency, cause)
        else:
            self.deferred.record_end(residency, cause)

    def _resume(self, governed: GovernedRequest, residency: ExternalResidency) -> ExternalResidency:
        """Prepare a request to start again with all its tokens."""
        self.port.release(residency, "preempted")
        tokens = governed.request._all_token_ids
        again = self.port.resume(residency, tokens)
        assert not isinstance(again, AdmissionRefused), "the request's own id was just released"
        governed.residency, governed.reported_tokens = again, len(tokens)
        return again

    def forgotten(self, blocks: Sequence[int], cause: str) -> None:
        """Take note that vLLM dropped the keys of `blocks` itself."""
        self.port.unpublished(blocks, cause)

    def indexed_blocks(self) -> list[int]:
        """Return the blocks that the port believes to be in vLLM's index."""
        self.deferred.flush_unchecked()
        blocks: list[int] = np.flatnonzero(self.port.pool.indexed).tolist()
        return blocks

    @contextmanager
    def caused(self, cause: str) -> Iterator[None]:
        """Set the cause of keys leaving vLLM's index while the block runs, for the events."""
        events = self.events
        if events is None:
            yield
            return
        before, events.cause = events.cause, cause
        try:
            yield
        finally:
            events.cause = before

    # -- the engine's own books ---------------------------------------------------------------------------------------

    def view(self, kept: Container[str] = ()) -> EngineView:
        """Return one row per block, from vLLM's own objects.

        A request that ended within a load has its blocks until that is over. `kept`: requests that vLLM keeps, ended
        or not; where a connector beside ours still saves an ended one's blocks, that one is among them.
        """
        self.deferred.flush_unchecked()
        tiers = self.deferred.tiers
        requests = frozenset(
            one
            for one, governed in self.requests.items()
            if not governed.request.is_finished()
            or (tiers is not None and tiers.is_loading(governed))
            or (self.keys_early and one in kept)
        )
        blocks = self.pool.blocks
        refs = np.fromiter((block.ref_cnt for block in blocks), dtype=np.int64, count=len(blocks))
        refs[self._null] = 0
        if self.withheld:
            refs[list(self.withheld)] -= 1
        indexed = np.fromiter((block.block_hash is not None for block in blocks), dtype=np.bool_, count=len(blocks))
        return EngineView(refs, indexed, requests, self.deferred.allocated_blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop ended blocks' keys, and allocate the unreferenced ones first."""
        self.pool.forget(blocks)

    def name_cause(self, request_id: str, cause: str) -> None:
        """Set the cause for which governance is about to end a request."""
        governed = self.requests.get(request_id)
        if governed is not None:
            governed.cause = cause

    def withhold(self, blocks: Sequence[int]) -> None:
        """Withhold `blocks` from allocation, each once."""
        self.deferred.insert_pending()
        with self.caused("scrub failed"):
            for block in blocks:
                if block not in self.withheld:
                    self.withheld.add(block)
                    self.pool.withhold(block)

    def _mine(self, request: Request) -> GovernedRequest:
        governed = governed_request(request)
        if governed is None:
            raise IsolationError(f"request `{request.request_id}` reached the cache without admission")
        return governed


# The custody that ends before vLLM would evict, in the policy's order or, without one, in vLLM's.
#
# The pool calls `make_room` when it would have to evict; `SchedulerSide` calls `evict_ahead` while the workers
# compute.
#
# Rules of this section:
# 1. vLLM never evicts a cached block itself: `make_room` has ended its custody before. So between two flushes the
#    port and vLLM's index differ only in new blocks.
# 2. Blocks end in batches, ahead of their use, so they are zero when they are allocated and no step waits for their
#    scrub. At most two batches end before they are needed.

EVICT_BLOCKS_MAX, EVICT_SHARE = 256, 1 / 64  # of the pool, that one batch ends ahead of their use


class Evictor:
    """Chooses custody to end, so that the next allocations evict nothing."""

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
        """The number of blocks to rank at once; ranking reads the whole pool, so it is done for many."""
        ranked = self._deferred.port.pool.ranking is not None
        return self._share if ranked else min(EVICT_BLOCKS_MAX, self._share)

    def evict_ahead(self) -> None:
        """Evict outside a step, so that the next steps probably have enough room (rule 2)."""
        if self._pool.spare_blocks < self._batch:
            self.make_room(self._batch)

    def make_room(self, blocks: int) -> None:
        """End some custody before vLLM would evict to allocate `blocks` (rule 1)."""
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
        """End the blocks that the policy gives up first, and those of tenants over their guarantee."""
        ended = self._deferred.port.victims(count)
        if ended:
            self._pool.forget(ended)
