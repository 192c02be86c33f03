"""The adapter's side of vLLM's cache manager: what a request may read, what it was given, and when it ended.

vLLM moves blocks in many places; none of them is wrapped on the path of a decode step. What happened is noted in the
journal and told to the port when nobody waits; its own block tables are compared with what the port was last told.

B1 Whatever asks the port to decide or to end something has the journal told first.
B2 Requests that end by themselves may be told late. Those that governance ends, and those that are preempted, are told
   at once: the port, or the request's successor, needs them over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from kvcustody.errors import IsolationError
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.external.block_keys import LazyKeys
from kvcustody.governance.external.engine_control import EngineView
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.integrations.vllm.scheduler.block_hasher import new_keys, running_hasher
from kvcustody.integrations.vllm.scheduler.block_tables import GroupTable, KnownTable, group_tables
from kvcustody.integrations.vllm.scheduler.deferred_calls import Journal, Late
from kvcustody.integrations.vllm.scheduler.eviction import Room
from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest, governed

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.integrations.vllm.scheduler.block_pool import GovernedBlockPool
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
        self.keys_early = False  # somebody beside us reads `block_hashes` (hasher, H3)
        self.is_ending = False  # governance ends requests now (B2)
        self.withheld: set[int] = set()
        self.events: SchedulerBlockEvents | None = None  # where somebody listens
        self._manager = manager
        self.pool: GovernedBlockPool = manager.block_pool
        self.caching = bool(manager.enable_caching)
        group = self.groups[0]
        self.simple = len(self.groups) == 1 and not group.drops and group.block_tokens == block_tokens
        self._fills = self.simple and not self.pool.enable_kv_cache_events  # blocks may be told one by one
        self.enters_late = False  # blocks that a step fills enter the index when it has left (journal, J5)
        self._null = manager.block_pool.null_block.block_id
        self.journal = Journal(self.groups, self._null, self._enter, simple=self.simple)
        self.room = Room(self.pool, self.journal, self.caused)
        self.make_room: Callable[[int], None] = self.room.make
        self._port: EnginePort

    @property
    def port(self) -> EnginePort:
        """Whom all this is told."""
        return self._port

    @port.setter
    def port(self, port: EnginePort) -> None:
        self._port = self.journal.port = port
        port.tell_late(self.journal.sync)

    # -- look-up ------------------------------------------------------------------------------------------------------

    def begin_look_up(self, request: Request) -> bool:
        """Ask the port what `request` may read now; False where that is nothing, or where it must wait."""
        mine = self._mine(request)
        residency = mine.residency
        mine.hit_blocks = (0,) * len(self.groups)
        if residency is None:
            mine.waits_for = "refused"
            return False
        tokens = request._all_token_ids
        if len(tokens) != mine.told_tokens:  # outputs in flight when it was preempted have arrived since
            residency = self._resume(mine, residency)
        mine.waits_for = self.port.may_start(residency)
        if mine.waits_for is not None:
            return False
        keys = self.port.look_up(residency, self._find, lazily=self.enters_late)
        mine.publishes = keys.publishable and self.caching
        request.block_hashes = keys.keys if type(keys.keys) is LazyKeys else list(keys.keys)
        mine.keyed_tokens = keys.whole * self.block_tokens
        mine.goes_on = mine.publishes and not mine.extras.begin_after(mine.keyed_tokens // self.block_tokens)
        early = self.keys_early and mine.goes_on
        request._block_hasher = (
            running_hasher(mine, self.port.extend_keys, self.block_tokens) if early else None
        )
        if mine.skips_reading or not keys.readable or not self.caching:
            return False
        if self.journal.late:
            self._enter_before(residency)
        mine.readable_tokens = keys.readable * self.block_tokens
        self.reading = mine
        return True

    def _enter_before(self, residency: ExternalResidency) -> None:
        """What was put off and this look-up may read enters the index first (journal, J5)."""
        if residency.reads_own_alone:
            domain = residency.domain
            writers = [mine.residency for mine, *_ in self.journal.late]
            if all(writer is not None and writer.domain is not domain for writer in writers):
                return
        self.journal.enter()

    def attachable_tokens(
        self, mine: GovernedRequest, found: Sequence[Sequence[KVCacheBlock]], hit_tokens: int
    ) -> int:
        """How many leading tokens of a hit pass the attach check in every group."""
        fine, residency = hit_tokens, mine.residency
        assert residency is not None
        journal = self.journal
        if journal.has_ends and journal.keeps_until_us <= self.port.clock.now_us():
            journal.sync()
        if self.simple:
            ids = [block.block_id for block in found[0]]
            count = self.port.attachable(residency, ids)
            if (
                count < len(ids) and not journal.is_empty
            ):  # what the port has not heard of cannot be attached yet
                journal.sync()
                count = self.port.attachable(residency, ids)
            return min(fine, count * self.block_tokens)
        for group, blocks in zip(self.groups, found, strict=True):
            places = [at for at, block in enumerate(blocks) if not block.is_null]
            ids = [blocks[at].block_id for at in places]
            count = self.port.attachable(residency, ids, group.positions(places)) if ids else 0
            if count < len(ids):
                fine = min(fine, places[count] * group.block_tokens)
        return fine

    def complete_keys(self, mine: GovernedRequest, tokens: int) -> None:
        """Blocks that end at token `tokens` or earlier are about to enter the index: they need their keys."""
        request = mine.request
        if type(request.block_hashes) is LazyKeys:
            request.block_hashes = request.block_hashes.complete()
        if tokens > mine.keyed_tokens and mine.goes_on:
            end = tokens // self.block_tokens * self.block_tokens
            request.block_hashes += new_keys(mine, self.port.extend_keys, end)

    def put_off(self) -> None:
        """Somebody calls while the workers compute, so blocks may enter the index then."""
        self.enters_late = self._fills and not self.keys_early

    def _enter(self, late: Late) -> None:
        mine, table, first, last = late
        self.pool.publish(mine, table, first, last, self.block_tokens, 0)

    def _find(self, key: bytes) -> int:
        if self.journal.late:
            self.journal.enter()
        block = self.pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(key, 0))
        return -1 if block is None else int(block.block_id)

    # -- what happened ------------------------------------------------------------------------------------------------

    def placed(self, request: Request) -> None:
        """A waiting request got its blocks: those it hit are attached, the others are new."""
        mine = self._mine(request)
        residency = mine.residency
        assert residency is not None
        attached, handed = self._first_tables(mine)
        self.journal.place(mine, attached, handed)
        mine.fills_one_by_one = self._fills and not residency.granted_blocks and residency.publishes
        if not self.simple:
            self.journal.settle()

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

    # -- ends ---------------------------------------------------------------------------------------------------------

    def before_release(self, request: Request) -> None:
        """A release must find everything that the request ever held on record."""
        if self.is_ending or self.journal.is_behind:
            self.journal.sync()

    def release(self, request: Request) -> None:
        """`request` has given its blocks back: it ended, or it was preempted and will start again."""
        mine = governed(request)
        if mine is None or mine.residency is None:
            self.requests.pop(request.request_id, None)
            return
        self.journal.running.pop(request.request_id, None)
        residency = mine.residency
        mine.end()
        if not request.is_finished():
            mine.forget_tables()
            request._block_hasher = None
            self._resume(mine, residency)
            return
        self.requests.pop(request.request_id, None)
        cause = mine.cause or _CAUSES.get(request.status, "finished")
        if self.is_ending or not self.simple:
            self.port.release(residency, cause)
        else:
            self.journal.end(residency, cause)

    def _resume(self, mine: GovernedRequest, residency: ExternalResidency) -> ExternalResidency:
        """It will start again, with every token that it has by now."""
        self.port.release(residency, "preempted")
        tokens = mine.request._all_token_ids
        again = self.port.resume(residency, tokens)
        assert not isinstance(again, AdmissionRefused), "the request's own id was just released"
        mine.residency, mine.told_tokens = again, len(tokens)
        return again

    def forgotten(self, blocks: Sequence[int], cause: str) -> None:
        """vLLM dropped the keys of `blocks` by itself."""
        self.port.unpublished(blocks, cause)

    def indexed_blocks(self) -> list[int]:
        """Blocks that the port believes to be in vLLM's index."""
        self.journal.sync()
        blocks: list[int] = np.flatnonzero(self.port.pool.indexed).tolist()
        return blocks

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
        self.journal.sync()
        requests = frozenset(one for one, mine in self.requests.items() if not mine.request.is_finished())
        blocks = self.pool.blocks
        refs = np.fromiter((block.ref_cnt for block in blocks), dtype=np.int64, count=len(blocks))
        refs[self._null] = 0
        if self.withheld:
            refs[list(self.withheld)] -= 1
        indexed = np.fromiter(
            (block.block_hash is not None for block in blocks), dtype=np.bool_, count=len(blocks)
        )
        return EngineView(refs, indexed, requests, self.journal.allocated_blocks)

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
        self.journal.enter()
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
