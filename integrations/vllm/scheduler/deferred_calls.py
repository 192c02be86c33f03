"""What vLLM did and the port has yet to hear: noted on the way of a step, told while the workers compute.

Noting costs a list entry; telling is done in one go, out of the way of the next step (`SchedulerSide.attend`). Whatever
asks the port to decide or to end something has everything told first: the port itself calls back (`tell_late`).

J1 The order of telling is the order of what happened: workers' answers and ends, what running requests let go, what
   was handed out, what entered the index. An end is noted only when everything of its request before it has been told.
J2 `allocated_blocks` counts hand-outs where vLLM makes them, `told_blocks` those that the port was told. They are equal
   after each step, whatever happened: a hand-out that nobody attributes is an error, not a gap.
J3 An attach is decided on what the port knows. What it has not heard can only make it refuse, but for ends that may
   have taken indexed blocks with them: those are told first (`keeps_until_us`).
J4 Every fact keeps the instant and the fence of its happening; that it was told later moves no deadline.
J5 Blocks that a step fills enter vLLM's index when it has left, under keys made then, or before anybody could miss them
   there: before a look-up in their domain, before their request gives them back, before anything that is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvcustody.errors import IsolationError
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.integrations.vllm.scheduler.block_tables import GroupTable
    from kvcustody.integrations.vllm.step_messages import ScrubReply

LATER_US = 1 << 62


class _Ended(NamedTuple):
    residency: ExternalResidency
    cause: str
    at_us: int
    fence: int


class _Placed(NamedTuple):
    mine: GovernedRequest
    attached: list[int]
    handed: list[int]
    at_us: int


Late: TypeAlias = "tuple[GovernedRequest, list[KVCacheBlock], int, int]"
"""Entries [first, last) of a request's table that may enter the index, and have not yet (J5)."""


class Journal:
    """The facts of one cache manager, on their way to the port. enter: publishes what was put off, in vLLM's index."""

    def __init__(
        self, groups: Sequence[GroupTable], null: int, enter: Callable[[Late], None], *, simple: bool
    ) -> None:
        self.late: list[Late] = []
        self.running: dict[str, GovernedRequest] = {}  # those that hold blocks
        self.placed: list[_Placed] = []
        self.noted: list[GovernedRequest] = []
        self.filled: list[tuple[GovernedRequest, int]] = []  # requests and the place of one more full block
        self.loose = False  # blocks were freed outside a release
        self.allocated_blocks = self.told_blocks = 0
        self.scrub_within_us = LATER_US  # the shortest deadline among what has ended and was not told
        self.keeps_until_us = LATER_US  # from then on, telling the ends may take blocks out of the index
        self.port: EnginePort
        self._enter = enter
        self._groups = groups
        self._simple = simple
        self._null = null
        self._ended: list[_Ended] = []
        self._answers: list[ScrubReply] = []
        self._is_telling = False

    # -- noting -------------------------------------------------------------------------------------------------------

    def place(self, mine: GovernedRequest, attached: list[int], handed: list[int]) -> None:
        """A request got its first blocks: it attached some, others are new."""
        self.running[mine.request_id] = mine
        self.placed.append(_Placed(mine, attached, handed, self.port.clock.now_us()))

    def end(self, residency: ExternalResidency, cause: str) -> None:
        """A request gave all its blocks back; everything that it ever held has been told (J1)."""
        port = self.port
        at_us = port.clock.now_us()
        self.scrub_within_us = min(self.scrub_within_us, residency.domain.scrub_within_us)
        keeps_until_us = port.keeps_until(residency, at_us, others=len(self._ended))
        self.keeps_until_us = min(self.keeps_until_us, keeps_until_us)
        self._ended.append(_Ended(residency, cause, at_us, port.pool.fences.newest_open))

    def answer(self, answers: Sequence[ScrubReply]) -> None:
        """Workers did scrubs. What failed is told at once: those blocks may be handed out no more."""
        self._answers += answers
        if any(len(result.failed) for answer in answers for result in answer.results):
            self.settle()

    # -- telling ------------------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Requests that run hold something of which the port has not heard, or have given it back."""
        return bool(self.placed or self.late or self.noted or self.filled) or self.loose or self._has_grown

    @property
    def has_ends(self) -> bool:
        """Requests have ended of which the port has not heard."""
        return bool(self._ended)

    @property
    def is_empty(self) -> bool:
        """The port has heard of everything."""
        return not (self._ended or self._answers or self.is_behind)

    @property
    def _has_grown(self) -> bool:
        return self.allocated_blocks != self.told_blocks

    def sync(self) -> None:
        """Tell everything that can be told now: inside an allocation some blocks are in no table yet."""
        if not self.is_empty:
            self.settle(strict=False)

    def enter(self) -> None:
        """What was put off enters vLLM's index now (J5)."""
        late, self.late = self.late, []
        for one in late:
            self._enter(one)

    def settle(self, grown: Sequence[str] | None = None, *, strict: bool = True) -> None:
        """Tell the port everything that it has not heard (J1), and see that this is all (`strict`, J2).

        grown: the requests that were handed blocks, where the caller knows; else all that run are compared.
        """
        if self._is_telling:
            return
        self._is_telling = True
        try:
            self._tell(grown, strict)
        finally:
            self._is_telling = False

    def _tell(self, grown: Sequence[str] | None, strict: bool) -> None:
        if self.late:
            self.enter()
        if self._answers:
            answers, self._answers = self._answers, []
            for one in answers:
                self.port.scrubbed(one.order, one.shard, one.results, one.device_blocks)
        if self._ended:
            ended, self._ended = self._ended, []
            self.scrub_within_us = self.keeps_until_us = LATER_US
            for end in ended:
                self.port.release(end.residency, end.cause, at_us=end.at_us, fence=end.fence)
        if self.loose:
            self.loose = False
            for mine in self.running.values():
                self._let_go(mine)
        if self.placed:
            self._tell_placed()
        if self._has_grown:
            self._tell_growth(grown)
            if strict and self._has_grown:
                self._refuse_unattributed()
        if self.noted or self.filled:
            self._tell_published()

    def _tell_placed(self) -> None:
        placed, self.placed = self.placed, []
        for mine, attached, handed, at_us in placed:
            residency = mine.residency
            assert residency is not None, "a request is released only when its placement was told"
            if attached:
                self.port.attached(residency, attached, at_us=at_us)
            if handed:
                self.port.handed_out(residency, handed, at_us=at_us)
                self.told_blocks += len(handed)

    def _tell_growth(self, grown: Sequence[str] | None) -> None:
        running = self.running
        known = running.values() if grown is None else [running[one] for one in grown if one in running]
        self._grow(known)
        if self._has_grown and grown is not None:
            self._grow(running.values())

    def _refuse_unattributed(self) -> None:
        raise IsolationError(
            f"vllm handed out `{self.allocated_blocks}` blocks, requests account for `{self.told_blocks}`: "
            "something else allocates from the pool; remove it or kvcustody"
        )

    def _grow(self, growing: Iterable[GovernedRequest]) -> None:
        """What running requests were handed since they were last compared: one block each, in a decode step."""
        whose: list[ExternalResidency] = []
        blocks: list[int] = []
        groups, simple = self._groups, self._simple
        tables = groups[0].tables
        for mine in growing:
            residency = mine.residency
            assert residency is not None
            if simple:
                known, table = mine.tables[0], tables[mine.request_id]
                if len(table) == len(known) + 1 and not residency.segment_blocks:
                    block = table[-1].block_id
                    known.append(block)
                    whose.append(residency)
                    blocks.append(block)
                    continue
            new: list[int] = []
            for group, known in zip(groups, mine.tables, strict=True):
                new += group.take_new(mine.request_id, known)
            if new:
                self.port.handed_out(residency, new)
                self.told_blocks += len(new)
        if blocks:
            self.port.handed_out_each(whose, blocks)
            self.told_blocks += len(blocks)

    def _let_go(self, mine: GovernedRequest) -> None:
        gone: list[int] = []
        for group, known in zip(self._groups, mine.tables, strict=True):
            if group.drops:
                gone += group.take_gone(mine.request_id, known)
        if gone and mine.residency is not None:
            self.port.let_go(mine.residency, gone)

    def _tell_published(self) -> None:
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
            blocks, before = [], []
            for mine, at in filled:
                table = mine.tables[0]
                blocks.append(table[at])
                before.append(table[at - 1] if at else -1)
            self.port.published_each(blocks, before)

    def _publish(self, mine: GovernedRequest) -> None:
        """Runs of full blocks that entered the index; a group with gaps has no chain of parents."""
        notes, mine.notes = mine.notes, []
        null, residency = self._null, mine.residency
        assert residency is not None
        for number, first, last, mask in notes:
            table = mine.tables[number]
            group = self._groups[number]
            blocks = table[first:last]
            if mask is not None:
                blocks = [block for block, kept in zip(blocks, mask, strict=False) if kept]
            if group.drops:
                blocks = [block for block in blocks if block != null]
            chained = group.chains and mask is None
            before = table[first - 1] if chained and first else -1
            if blocks:
                self.port.published(residency, blocks, before, chained=chained)
