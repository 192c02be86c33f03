"""What vLLM did with its blocks, told to the port in the order in which it happened, in batches.

vLLM moves blocks in many places; none of them is wrapped on the path of a decode step. Its own block tables are
compared with what the port was last told, when something was allocated, and where an answer depends on the port
being up to date.

B1 `settle` brings the port up to date: first what running requests gave back, then what they were handed, then what
   entered the index. Whatever asks the port to decide or to end something settles first.
B2 `allocated_blocks` counts hand-outs where vLLM makes them; `_told_blocks` counts those that the port was told.
   They are equal after `settle`, whatever happened: a hand-out that nobody attributes is an error, not a gap.
B3 vLLM never evicts a cached block by itself: `make_room` has ended its custody before vLLM comes to it. So between
   two settlements the port and vLLM's index differ only in blocks that are new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from kvcustody.errors import IsolationError
from kvcustody.governance.engine_port import EnginePort, EngineView
from kvcustody.governance.outcome import Refused
from kvcustody.integrations.vllm.governed_request import GovernedRequest, governed
from kvcustody.integrations.vllm.hasher import running_hasher
from kvcustody.integrations.vllm.tables import GroupTable, KnownTable, group_tables

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvcustody.allocator.foreign_residency import ForeignResidency
    from kvcustody.integrations.vllm.block_events import BlockEvents
    from kvcustody.integrations.vllm.pool import GovernedBlockPool

EVICT_BLOCKS_MAX, EVICT_SHARE = 256, 1 / 64  # of the pool, that one eviction ends ahead of their use

_CAUSES = {
    RequestStatus.FINISHED_ABORTED: "aborted",
    RequestStatus.FINISHED_ERROR: "error",
}


class Books:
    """The adapter's side of one cache manager and its pool."""

    def __init__(self, manager: KVCacheManager, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.groups: list[GroupTable] = group_tables(manager)
        self.running: dict[str, GovernedRequest] = {}  # those that hold blocks
        self.requests: dict[str, GovernedRequest] = {}  # all that arrived and are not over
        self.noted: list[GovernedRequest] = []
        self.filled: list[tuple[GovernedRequest, int]] = []  # requests and the place of one more full block
        self.reading: GovernedRequest | None = None
        self.loose = False  # blocks were freed outside a release
        self.is_releasing = False
        self.allocated_blocks = 0
        self.withheld: set[int] = set()
        self._evict_blocks = min(EVICT_BLOCKS_MAX, int(manager.block_pool.num_gpu_blocks * EVICT_SHARE))
        self.port: EnginePort
        self.events: BlockEvents | None = None  # where somebody listens
        self._told_blocks = 0
        self._manager = manager
        self.pool: GovernedBlockPool = manager.block_pool
        self.caching = bool(manager.enable_caching)
        group = self.groups[0]
        self.simple = len(self.groups) == 1 and not group.drops and group.block_tokens == block_tokens
        self._fills = self.simple and not self.pool.enable_kv_cache_events  # blocks may be told one by one
        self._null = manager.block_pool.null_block.block_id

    # -- look-up ------------------------------------------------------------------------------------------------------

    def begin_look_up(self, request: Request) -> bool:
        """Ask the port what `request` may read now; False where that is nothing, or where it must wait."""
        mine = self._mine(request)
        residency = mine.residency
        mine.hit_blocks = (0,) * len(self.groups)
        if residency is None:
            mine.waits_for = "refused"
            return False
        if self.loose:
            self.settle()
        tokens = request._all_token_ids
        if len(tokens) != mine.told_tokens:  # outputs in flight when it was preempted have arrived since
            residency = self._resume(mine, residency)
        mine.waits_for = self.port.may_start(residency)
        if mine.waits_for is not None:
            return False
        keys = self.port.look_up(residency, self._find)
        mine.publishes = keys.publishable and self.caching
        request.block_hashes = list(keys.keys)
        mine.keyed_tokens = len(keys.keys) * self.block_tokens
        goes_on = mine.publishes and not mine.extras.begin_after(mine.keyed_tokens // self.block_tokens)
        request._block_hasher = (
            running_hasher(mine, self.port.extend_keys, self.block_tokens) if goes_on else None
        )
        if mine.skips_reading or not keys.readable or not self.caching:
            return False
        mine.readable_tokens = keys.readable * self.block_tokens
        self.reading = mine
        return True

    def attachable_tokens(
        self, mine: GovernedRequest, found: Sequence[Sequence[KVCacheBlock]], hit_tokens: int
    ) -> int:
        """How many leading tokens of a hit pass the attach check in every group."""
        fine, residency = hit_tokens, mine.residency
        assert residency is not None
        if self.simple:
            count = self.port.attachable(residency, [block.block_id for block in found[0]])
            return min(fine, count * self.block_tokens)
        for group, blocks in zip(self.groups, found, strict=True):
            places = [at for at, block in enumerate(blocks) if not block.is_null]
            ids = [blocks[at].block_id for at in places]
            count = self.port.attachable(residency, ids, group.positions(places)) if ids else 0
            if count < len(ids):
                fine = min(fine, places[count] * group.block_tokens)
        return fine

    def _find(self, key: bytes) -> int:
        block = self.pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(key, 0))
        return -1 if block is None else int(block.block_id)

    # -- what happened ------------------------------------------------------------------------------------------------

    def placed(self, request: Request) -> None:
        """A waiting request got its blocks: those it hit are attached, the others are new."""
        mine = self._mine(request)
        assert mine.residency is not None
        attached, handed = self._first_tables(mine)
        if self.loose:  # one of these may have been let go in this very step
            self.settle(besides=len(handed))
        self.port.attached(mine.residency, attached)
        self._hand_out(mine, handed)
        self.running[request.request_id] = mine
        mine.fills_one_by_one = self._fills and not mine.residency.granted_blocks and mine.residency.publishes
        if mine.notes:
            self._publish(mine)

    def _first_tables(self, mine: GovernedRequest) -> tuple[list[int], list[int]]:
        request_id = mine.request_id
        if self.simple:
            ids = [block.block_id for block in self.groups[0].blocks(request_id)]
            mine.tables[0] = KnownTable(ids)
            hits = mine.hit_blocks[0]
            return ids[:hits], ids[hits:]
        attached: list[int] = []
        handed: list[int] = []
        null = self._null
        for number, group in enumerate(self.groups):
            ids = [block.block_id for block in group.blocks(request_id)]
            mine.tables[number] = KnownTable(ids)
            hits = mine.hit_blocks[number]
            attached += [block for block in ids[:hits] if block != null]
            handed += [block for block in ids[hits:] if block != null]
        return attached, handed

    @property
    def has_unsettled(self) -> bool:
        """The port has yet to hear of something."""
        return bool(self.noted or self.filled) or self.loose or self.allocated_blocks != self._told_blocks

    def sync(self) -> None:
        """Settle if there is anything to settle."""
        if self.has_unsettled:
            self.settle()

    def settle(self, grown: Sequence[str] | None = None, *, besides: int = 0) -> None:
        """Tell the port everything that it has not heard (B1).

        grown: the requests that were handed blocks, where the caller knows; else all that run are compared.
        besides: new blocks of a request that is not running yet; the caller tells of them.
        """
        if self.loose:
            self.loose = False
            for mine in self.running.values():
                self._let_go(mine)
        if self.allocated_blocks != self._told_blocks + besides:
            running = self.running
            self._grow(running.values() if grown is None else [running[one] for one in grown])
            if self.allocated_blocks != self._told_blocks + besides:
                self._refuse_unattributed(grown, besides)
        if self.noted or self.filled:
            self._publish_noted()

    def _refuse_unattributed(self, grown: Sequence[str] | None, besides: int) -> None:
        if grown is not None:
            self.settle(besides=besides)
            return
        raise IsolationError(
            f"vllm handed out `{self.allocated_blocks}` blocks, requests account for "
            f"`{self._told_blocks + besides}`: something else allocates from the pool; remove it or kvcustody"
        )

    def _grow(self, growing: Iterable[GovernedRequest]) -> None:
        """What running requests were handed since they were last compared: one block each, in a decode step."""
        whose: list[ForeignResidency] = []
        blocks: list[int] = []
        groups, simple = self.groups, self.simple
        tables = groups[0].tables
        for mine in growing:
            if simple:
                residency, known, table = mine.residency, mine.tables[0], tables[mine.request_id]
                assert residency is not None
                if len(table) == len(known) + 1 and not residency.segment_blocks:
                    block = table[-1].block_id
                    known.append(block)
                    whose.append(residency)
                    blocks.append(block)
                    continue
            new: list[int] = []
            for group, known in zip(groups, mine.tables, strict=True):
                new += group.take_new(mine.request_id, known)
            self._hand_out(mine, new)
        if blocks:
            self.port.handed_out_each(whose, blocks)
            self._told_blocks += len(blocks)

    def _let_go(self, mine: GovernedRequest) -> None:
        gone: list[int] = []
        for group, known in zip(self.groups, mine.tables, strict=True):
            if group.drops:
                gone += group.take_gone(mine.request_id, known)
        if gone and mine.residency is not None:
            self.port.let_go(mine.residency, gone)

    def _hand_out(self, mine: GovernedRequest, blocks: list[int]) -> None:
        if not blocks:
            return
        assert mine.residency is not None
        self.port.handed_out(mine.residency, blocks)
        self._told_blocks += len(blocks)

    def _publish_noted(self) -> None:
        """What running requests filled. Others tell when they are placed."""
        if self.noted:
            noted, self.noted = self.noted, []
            for mine in noted:
                if mine.request_id in self.running:
                    self._publish(mine)
                elif mine.notes:
                    self.noted.append(mine)
        if self.filled:
            filled, self.filled = self.filled, []
            whose, blocks, before = [], [], []
            for mine, at in filled:
                table = mine.tables[0]
                whose.append(mine.residency)
                blocks.append(table[at])
                before.append(table[at - 1] if at else -1)
            self.port.published_each(whose, blocks, before)  # type: ignore[arg-type]

    def _publish(self, mine: GovernedRequest) -> None:
        """Runs of full blocks that entered the index; a group with gaps has no chain of parents."""
        notes, mine.notes = mine.notes, []
        null, residency = self._null, mine.residency
        assert residency is not None
        for number, first, last, mask in notes:
            table = mine.tables[number]
            group = self.groups[number]
            blocks = table[first:last]
            if mask is not None:
                blocks = [block for block, kept in zip(blocks, mask, strict=False) if kept]
            if group.drops:
                blocks = [block for block in blocks if block != null]
            chained = group.chains and mask is None
            before = table[first - 1] if chained and first else -1
            if blocks:
                self.port.published(residency, blocks, before, chained=chained)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def before_release(self, request: Request) -> None:
        """A release must find everything that the request ever held on record."""
        self.sync()

    def release(self, request: Request) -> None:
        """`request` has given its blocks back: it ended, or it was preempted and will start again."""
        mine = governed(request)
        if mine is None or mine.residency is None:
            self.requests.pop(request.request_id, None)
            return
        self.running.pop(request.request_id, None)
        residency = mine.residency
        mine.forget_tables()
        if request.is_finished():
            self.requests.pop(request.request_id, None)
            self.port.release(residency, mine.cause or _CAUSES.get(request.status, "finished"))
            return
        request._block_hasher = None
        self._resume(mine, residency)

    def _resume(self, mine: GovernedRequest, residency: ForeignResidency) -> ForeignResidency:
        """It will start again, with every token that it has by now."""
        self.port.release(residency, "preempted")
        tokens = mine.request._all_token_ids
        again = self.port.resume(residency, tokens)
        assert not isinstance(again, Refused), "the request's own id was just released"
        mine.residency, mine.told_tokens = again, len(tokens)
        return again

    def forgotten(self, blocks: Sequence[int], cause: str) -> None:
        """vLLM dropped the keys of `blocks` by itself."""
        self.sync()
        self.port.unpublished(blocks, cause)

    def indexed_blocks(self) -> list[int]:
        """Blocks that the port believes to be in vLLM's index."""
        blocks: list[int] = np.flatnonzero(self.port.pool.indexed).tolist()
        return blocks

    # -- eviction -----------------------------------------------------------------------------------------------------

    def make_room(self, blocks: int) -> None:
        """Before vLLM would evict to hand out `blocks`: end some custody now, in our order or, without one, in vLLM's.

        vLLM therefore never takes a key away by itself, and whole batches end, and are scrubbed, ahead of their use.
        """
        pool = self.pool
        if pool.has_spare(blocks):
            return
        with self.caused("evicted"):
            partition = self.port.pool.partition
            if partition.common_blocks != partition.size:  # some tenant has a guarantee
                self._end_over_guarantee(max(blocks, self._evict_blocks))
                if pool.has_spare(blocks):
                    return
            stripped = pool.strip_oldest(blocks, self._evict_blocks)
        self.port.unpublished(stripped, "evicted")

    def _end_over_guarantee(self, count: int) -> None:
        """Those that are over their guarantee go first."""
        blocks = self.pool.blocks
        wanted = [one for one in self.port.pool.victims(count) if blocks[one].ref_cnt == 0]
        if wanted:
            now_us = self.port.clock.now_us()
            victims = np.array(wanted, dtype=np.int64)
            self.pool.forget(self.port.pool.end_cached(victims, "evicted", now_us))

    @contextmanager
    def caused(self, cause: str) -> Iterator[None]:
        """Why keys leave vLLM's index now, for the events."""
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

    def view(self) -> EngineView:
        """One row a block, from vLLM's own objects."""
        self.sync()
        requests = frozenset(one for one, mine in self.requests.items() if not mine.request.is_finished())
        blocks = self.pool.blocks
        refs = np.fromiter((block.ref_cnt for block in blocks), dtype=np.int64, count=len(blocks))
        refs[self._null] = 0
        if self.withheld:
            refs[list(self.withheld)] -= 1
        indexed = np.fromiter(
            (block.block_hash is not None for block in blocks), dtype=np.bool_, count=len(blocks)
        )
        return EngineView(refs, indexed, requests, self.allocated_blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        """The port ended these: their keys go, and the unreferenced ones are handed out first."""
        self.pool.forget(blocks)

    def name_cause(self, request_id: str, cause: str) -> None:
        """Why governance is about to end a request."""
        mine = self.requests.get(request_id)
        if mine is not None:
            mine.cause = cause

    def withhold(self, blocks: Sequence[int]) -> None:
        """Take `blocks` out of circulation, each once."""
        with self.caused("scrub failed"):
            for block in blocks:
                if block not in self.withheld:
                    self.withheld.add(block)
                    self.pool.withhold(block)

    def _mine(self, request: Any) -> GovernedRequest:
        mine = governed(request)
        if mine is None:
            raise IsolationError(f"request `{request.request_id}` reached the cache without admission")
        return mine
