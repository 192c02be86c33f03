"""Calls to the engine port, recorded in a step and made later in one batch while the workers compute.

Recording costs a list entry on the path of a decode step. `flush` makes every call that is due.
`SchedulerSide.run_deferred_work` runs it when a step has left. It also runs whenever something asks the port to decide
or to end; then the port itself calls back through `defer_calls`. The stages of a block, and the calls at each arrow:

    vLLM allocates -----------> recorded ---------------------> reported to the port
      get_new_blocks              allocated_blocks                handed_out
      after_allocation            allocations                     attached, handed_out
      cache_full_blocks           pending_inserts -> in vLLM's index -> to_publish, filled_blocks -> published
      free_blocks                 freed_outside_release           returned
      release                     _ended                          release
      workers' receipts           _scrub_replies                  scrubbed
                                                     (flush)

1. A flush reports in the order of the events: scrub replies and ends, blocks that running requests dropped, blocks
   handed out, blocks that entered the index. An end is recorded only after everything before it of its request was
   reported.
2. `allocated_blocks` counts hand-outs where vLLM makes them, `reported_blocks` those that the port heard of. They are
   equal after each step, whatever happened: a hand-out without a request is an error, not a gap. Inside an allocation
   some blocks are in no table yet; `flush_unchecked` reports what it can.
3. An attach is decided on what the port knows. Calls that it has not received can only make it refuse, with one
   exception: ends that may have taken indexed blocks with them. Those are reported first (`keeps_until_us`).
4. Every call carries the instant and the fence of its event, so making it later moves no deadline.
5. Blocks that a step fills enter vLLM's index when the step has left, under keys made then. They enter earlier where
   they could be missed: before a look-up in their domain, before their request gives them back, and before anything
   that is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvcustody.errors import IsolationError
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest, PublishedRange
from kvcustody.integrations.vllm.tiers.copy_plans import NOT_THERE

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.integrations.vllm.scheduler.block_tables import GroupTable
    from kvcustody.integrations.vllm.step_messages import ScrubReply
    from kvcustody.integrations.vllm.tiers.scheduler_tiers import SchedulerTiers

LATER_US = 1 << 62


class _Ended(NamedTuple):
    residency: ExternalResidency
    cause: str
    at_us: int
    fence: int


class _Allocation(NamedTuple):
    governed: GovernedRequest
    attached: list[int]
    handed: list[int]
    at_us: int


PendingInsert: TypeAlias = "tuple[GovernedRequest, list[KVCacheBlock], int, int]"
"""Entries [first, last) of a request's table that may enter the index, and have not yet."""


class DeferredCalls:
    """One cache manager's calls to its port. insert: adds a pending block to vLLM's index."""

    def __init__(
        self,
        groups: Sequence[GroupTable],
        null: int,
        insert: Callable[[PendingInsert], None],
        *,
        simple: bool,
    ) -> None:
        self.pending_inserts: list[PendingInsert] = []
        self.running: dict[str, GovernedRequest] = {}  # those that hold blocks
        self.allocations: list[_Allocation] = []
        self.to_publish: list[GovernedRequest] = []
        self.filled_blocks: list[tuple[GovernedRequest, int]] = []  # requests and the place of one more full block
        self.freed_outside_release = False  # blocks were freed outside a release
        self.allocated_blocks = self.reported_blocks = 0
        self.scrub_within_us = LATER_US  # the shortest deadline among the ends not reported
        self.keeps_until_us = LATER_US  # from then on, reporting the ends may take blocks out of the index
        self.port: EnginePort
        self.tiers: SchedulerTiers | None = None  # where published blocks are copied off the device
        self.has_unlisted_growth = False  # a request whose load is over was handed blocks by itself
        self._insert = insert
        self._groups = groups
        self._simple = simple
        self._null = null
        self._ended: list[_Ended] = []
        self._scrub_replies: list[ScrubReply] = []
        self._is_flushing = False

    # -- recording ----------------------------------------------------------------------------------------------------

    def record_allocation(self, governed: GovernedRequest, attached: list[int], handed: list[int]) -> None:
        """Record a request's first blocks: some are attached, others new."""
        self.running[governed.request_id] = governed
        self.allocations.append(_Allocation(governed, attached, handed, self.port.clock.now_us()))

    def record_end(self, residency: ExternalResidency, cause: str) -> None:
        """Record that a request released all its blocks; everything that it ever held is reported (rule 1)."""
        port = self.port
        at_us = port.clock.now_us()
        self.scrub_within_us = min(self.scrub_within_us, residency.domain.scrub_within_us)
        keeps_until_us = port.keeps_until(residency, at_us, others=len(self._ended))
        self.keeps_until_us = min(self.keeps_until_us, keeps_until_us)
        self._ended.append(_Ended(residency, cause, at_us, port.pool.fences.newest_open))

    def record_scrub_replies(self, replies: Sequence[ScrubReply]) -> None:
        """Record workers' scrubs. Failed ones are reported at once, because those blocks may not be allocated any
        more.
        """
        self._scrub_replies += replies
        if any(len(result.failed) for reply in replies for result in reply.results):
            self.flush()

    # -- reporting ----------------------------------------------------------------------------------------------------

    @property
    def has_unreported_changes(self) -> bool:
        """Whether running requests hold or have released blocks that were not reported to the port."""
        return (
            bool(self.allocations or self.pending_inserts or self.to_publish or self.filled_blocks)
            or self.freed_outside_release
            or self._has_unreported_blocks
        )

    @property
    def has_unreported_ends(self) -> bool:
        """Whether requests have ended without a report to the port."""
        return bool(self._ended)

    @property
    def is_empty(self) -> bool:
        """Whether everything was reported to the port."""
        return not (self._ended or self._scrub_replies or self.has_unreported_changes)

    @property
    def _has_unreported_blocks(self) -> bool:
        return self.allocated_blocks != self.reported_blocks

    def flush_unchecked(self) -> None:
        """Report what can be reported now, without the check in rule 2."""
        if not self.is_empty:
            self.flush(strict=False)

    def insert_pending(self) -> None:
        """Add blocks with a deferred entry to vLLM's index now (rule 5)."""
        pending, self.pending_inserts = self.pending_inserts, []
        for one in pending:
            self._insert(one)

    def flush(self, grown: Sequence[str] | None = None, *, strict: bool = True) -> None:
        """Make every recorded call (rule 1), and check that no allocation is left over (`strict`, rule 2).

        grown: the requests that were handed blocks, where the caller knows; else all that run are compared.
        """
        if self._is_flushing:
            return
        self._is_flushing = True
        try:
            self._report(grown, strict)
        finally:
            self._is_flushing = False

    def _report(self, grown: Sequence[str] | None, strict: bool) -> None:
        if self.pending_inserts:
            self.insert_pending()
        if self._scrub_replies:
            replies, self._scrub_replies = self._scrub_replies, []
            for one in replies:
                self.port.scrubbed(one.order, one.shard, one.results, one.device_blocks)
        if self._ended:
            ended, self._ended = self._ended, []
            self.scrub_within_us = self.keeps_until_us = LATER_US
            for end in ended:
                self.port.release(end.residency, end.cause, at_us=end.at_us, fence=end.fence)
        if self.freed_outside_release:
            self.freed_outside_release = False
            for governed in self.running.values():
                self._report_dropped(governed)
        if self.allocations:
            self._report_allocations()
        if self._has_unreported_blocks:
            self._report_growth(grown)
            if strict and self._has_unreported_blocks:
                self._refuse_unattributed()
        if self.to_publish or self.filled_blocks:
            self._report_published()

    def _report_allocations(self) -> None:
        allocations, self.allocations = self.allocations, []
        for governed, attached, handed, at_us in allocations:
            residency = governed.residency
            assert residency is not None, "a request is released only when its allocation was reported"
            if attached:
                self.port.attached(residency, attached, at_us=at_us)
            if handed:
                self.port.handed_out(residency, handed, at_us=at_us)
                self.reported_blocks += len(handed)

    def _report_growth(self, grown: Sequence[str] | None) -> None:
        running = self.running
        known = running.values() if grown is None else [running[one] for one in grown if one in running]
        self._report_new_blocks(known)
        if self._has_unreported_blocks and grown is not None:
            self._report_new_blocks(running.values())

    def _refuse_unattributed(self) -> None:
        raise IsolationError(
            f"vllm handed out `{self.allocated_blocks}` blocks, requests account for `{self.reported_blocks}`: "
            "something else allocates from the pool; remove it or kvcustody"
        )

    def _report_new_blocks(self, growing: Iterable[GovernedRequest]) -> None:
        """Report running requests' new blocks since the last comparison: one block each, in a decode step."""
        whose: list[ExternalResidency] = []
        blocks: list[int] = []
        groups, simple = self._groups, self._simple
        tables = groups[0].tables
        for governed in growing:
            residency = governed.residency
            assert residency is not None
            if simple:
                known, table = governed.tables[0], tables[governed.request_id]
                if len(table) == len(known) + 1 and not residency.segment_blocks:
                    block = table[-1].block_id
                    known.append(block)
                    whose.append(residency)
                    blocks.append(block)
                    continue
            new: list[int] = []
            for group, known in zip(groups, governed.tables, strict=True):
                new += group.take_new(governed.request_id, known)
            if new:
                self.port.handed_out(residency, new)
                self.reported_blocks += len(new)
        if blocks:
            self.port.handed_out_each(whose, blocks)
            self.reported_blocks += len(blocks)

    def _report_dropped(self, governed: GovernedRequest) -> None:
        gone: list[int] = []
        for group, known in zip(self._groups, governed.tables, strict=True):
            if group.drops:
                gone += group.take_gone(governed.request_id, known)
        if gone and governed.residency is not None:
            self.port.returned(governed.residency, gone)

    def _report_published(self) -> None:
        """Report what running requests filled. Others report when they have their blocks."""
        if self.to_publish:
            pending, self.to_publish = self.to_publish, []
            for governed in pending:
                if governed.request_id in self.running:
                    self._report_range(governed)
                elif governed.unreported_ranges:
                    self.to_publish.append(governed)
        if self.filled_blocks:
            filled, self.filled_blocks = self.filled_blocks, []
            blocks, before, keys = [], [], []
            for governed, at in filled:
                table = governed.tables[0]
                blocks.append(table[at])
                before.append(table[at - 1] if at else -1)
                keys += governed.request.block_hashes[at : at + 1]
            self.port.published_each(blocks, before, keys if len(keys) == len(blocks) else ())
            if self.tiers is not None and len(keys) == len(blocks):
                for (governed, at), block, key in zip(filled, blocks, keys, strict=True):
                    self.tiers.published(governed, at, [[block]], [key])

    def _report_range(self, governed: GovernedRequest) -> None:
        """Report runs of full blocks that entered the index; a group with gaps has no chain of parents."""
        ranges, governed.unreported_ranges = governed.unreported_ranges, []
        null, residency = self._null, governed.residency
        assert residency is not None
        leaving = _Leaving(ranges, len(self._groups)) if self.tiers is not None and ranges else None
        for number, first, last, mask in ranges:
            table = governed.tables[number]
            group = self._groups[number]
            places = [
                at
                for at in range(first, last)
                if (mask is None or mask[at - first]) and not (group.drops and table[at] == null)
            ]
            blocks = [table[at] for at in places]
            chained = group.chains and mask is None
            before = table[first - 1] if chained and first else -1
            if blocks:
                depths = None if self._simple else group.depths(places)
                keys = governed.request.block_hashes[first:last] if self._simple else ()
                if len(keys) != len(blocks):
                    keys = ()
                self.port.published(residency, blocks, before, chained=chained, depths=depths, keys=keys)
                if leaving is not None:
                    leaving.note(number, places, blocks)
        if self.tiers is not None and leaving is not None:
            keys = governed.request.block_hashes[leaving.first : leaving.last]
            if len(keys) == leaving.last - leaving.first:
                self.tiers.published(governed, leaving.first, leaving.blocks, keys)


class _Leaving:
    """Blocks of a request's groups that entered the index together, by position, in the form for tiers.

    Groups of one model publish together; of one whose window begins later, what is before is not there.
    """

    def __init__(self, ranges: Sequence[PublishedRange], groups: int) -> None:
        self.first = min(one.first for one in ranges)
        self.last = max(one.last for one in ranges)
        self.blocks = [[NOT_THERE] * (self.last - self.first) for _ in range(groups)]

    def note(self, group: int, places: list[int], blocks: list[int]) -> None:
        for at, block in zip(places, blocks, strict=True):
            self.blocks[group][at - self.first] = block
