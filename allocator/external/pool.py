"""Custody of a pool that an engine allocates by itself: what the engine did, block by block.

F1  A block is handed out only when nobody uses it: not ACTIVE, not CACHED. Anything else raises `IsolationError`.
F2  A generation changes at each hand-out (L3).
F3  A block whose last reference is gone stays only while it is indexed, held, before its ceiling and in an open domain;
    else its custody ends and the engine is told to forget it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.block_arrays import NO_BLOCK
from kvcustody.allocator.external.holds import ForeignHolds
from kvcustody.allocator.external.residency import ForeignResidency
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import (
    ACTIVE,
    CACHED,
    CLEAN,
    DIRTY,
    FENCED,
    QUARANTINED,
    Blocks,
    BlockState,
)
from kvcustody.allocator.pool.records import LetGo
from kvcustody.errors import IsolationError

_CLEAN = bytes([CLEAN])
_FREE = bytes([CLEAN, DIRTY, FENCED])
_HELD = bytes([ACTIVE, CACHED])
_least = np.minimum.reduce
_FEW_BLOCKS = 8  # up to so many are written one by one: an array operation costs more than that


class ForeignPool(ForeignHolds):
    """Custody of `blocks` physical blocks over `shards` workers. `reserved` indices are never anybody's."""

    # -- what the engine does -----------------------------------------------------------------------------------------

    def hand_out(self, residency: ForeignResidency, blocks: Blocks, domain: Domain, now_us: int) -> None:
        """`blocks` are the residency's from now on, written by it alone (F1, F2)."""
        count = len(blocks)
        first = self._take(blocks, now_us)
        self.state[blocks] = ACTIVE
        self.generation[blocks] = np.arange(first, first + count)
        self.refs[blocks] = 1
        self.tag[blocks] = domain.tag
        # the ceiling of what follows, too (L8)
        residency.ceiling_us = min(now_us + domain.absolute_us, residency.ceiling_us)
        self.ceiling_us[blocks] = residency.ceiling_us
        self.born_us[blocks] = now_us
        self._enter(domain)
        domain.owner.charge(count)
        residency.handed.append((blocks, first))
        if domain is not residency.domain:
            residency.is_mixed = True

    def _take(self, blocks: Blocks, now_us: int) -> int:
        """Check that nobody uses `blocks`; returns the first of as many new generations."""
        states = self.state[blocks]
        found = states.tobytes()
        if found.strip(_FREE):
            self._refuse_hand_out(blocks, states)
        if found.strip(_CLEAN):  # not all are CLEAN: what they held is in the order of this step
            self.queue.may_repeat = True
            if self.queue.has_fenced:
                self.queue.release_fence(blocks[states == FENCED], now_us)
        first = self.next_generation
        self.next_generation = first + len(blocks)
        return first

    def _enter(self, domain: Domain) -> None:
        self.domains[domain.tag] = domain
        if len(self.domains) > self._domains_max:
            self._prune_domains()

    def _refuse_hand_out(self, blocks: Blocks, states: NDArray[np.uint8]) -> None:
        for block, state in zip(blocks.tolist(), states.tolist(), strict=True):
            if state in (ACTIVE, CACHED, QUARANTINED):
                raise IsolationError(
                    f"block `{block}` is {BlockState(state).name} and cannot be handed out: the engine must "
                    "free it and forget its key first",
                    block=block,
                    state=BlockState(state).name,
                )

    def hand_out_each(self, residencies: Sequence[ForeignResidency], blocks: Blocks, now_us: int) -> None:
        """`hand_out` of one block each, in the residencies' own domains: the growth of a decode step."""
        first = self._take(blocks, now_us)
        tags: list[int] = []
        ceilings: list[int] = []
        for at, residency in enumerate(residencies):
            domain = residency.domain
            tags.append(domain.tag)
            residency.ceiling_us = min(now_us + domain.absolute_us, residency.ceiling_us)
            ceilings.append(residency.ceiling_us)
            domain.owner.charge(1)
            self.domains[domain.tag] = domain
            residency.handed.append((blocks[at : at + 1], first + at))
        if len(tags) > _FEW_BLOCKS:
            self.state[blocks] = ACTIVE
            self.generation[blocks] = np.arange(first, first + len(tags))
            self.refs[blocks] = 1
            self.tag[blocks] = tags
            self.ceiling_us[blocks] = ceilings
            self.born_us[blocks] = now_us
            return
        for at, block in enumerate(blocks.tolist()):
            self.state_bytes[block] = ACTIVE
            self.generation[block] = first + at
            self.refs[block] = 1
            self.tag[block] = tags[at]
            self.ceiling_us[block] = ceilings[at]
            self.born_us[block] = now_us

    def attachable(self, blocks: Blocks, expected: NDArray[np.int32] | int, now_us: int) -> int:
        """How many leading blocks may be attached now: in the expected domain, indexed, held, before their ceiling."""
        if self._are_held(blocks, expected, now_us):
            return len(blocks)
        fine = (self.tag[blocks] == expected) & self.indexed[blocks] & (self.ceiling_us[blocks] > now_us)
        cached = (self.state[blocks] == CACHED) & (self.hold_until_us[blocks] > now_us)
        fine &= cached | (self.refs[blocks] > 0)
        return len(blocks) if fine.all() else int(fine.argmin())

    def _are_held(self, blocks: Blocks, expected: NDArray[np.int32] | int, now_us: int) -> bool:
        """All of these may be attached, by holds that last: the common answer, for half the work."""
        return bool(
            _least(self.hold_until_us.take(blocks)) > now_us
            and _least(self.ceiling_us.take(blocks)) > now_us
            and b"\0" not in self.indexed.take(blocks).tobytes()
            and not self.state.take(blocks).tobytes().strip(_HELD)
            and (self.tag.take(blocks) == expected).all()
        )

    def are_clean(self, blocks: Sequence[int]) -> bool:
        """Every byte of these is zero and nobody uses them. There are few in a step: no array is worth its making."""
        state = self.state_bytes
        for block in blocks:  # noqa: SIM110 - a generator costs more than the loop
            if state[block]:
                return False
        return True

    def attach(self, residency: ForeignResidency, blocks: Blocks) -> None:
        """References on cached or running blocks. Raises `IsolationError` where one is neither."""
        states = self.state[blocks]
        if states.tobytes().strip(_HELD):
            at = int(np.flatnonzero((states != ACTIVE) & (states != CACHED))[0])
            raise IsolationError(
                f"block `{int(blocks[at])}` is {BlockState(int(states[at])).name} and cannot be attached",
                block=int(blocks[at]),
            )
        self.state[blocks] = ACTIVE
        self.refs[blocks] += 1
        residency.ceiling_us = min(residency.ceiling_us, int(self.ceiling_us[blocks[-1]]))
        if (self.tag[blocks] != residency.domain.tag).any():
            residency.is_mixed = True
        generations = self.generation[blocks]
        if len(residency.attached):
            blocks = np.concatenate((residency.attached, blocks))
            generations = np.concatenate((residency.attached_generations, generations))
        residency.attached, residency.attached_generations = blocks, generations

    def publish(self, blocks: Blocks, before: int = NO_BLOCK, *, chained: bool = True) -> None:
        """`blocks` are in the engine's index; each continues the one before it, the first continues `before`."""
        self.indexed[blocks] = True
        if not chained:
            return
        parents = blocks[:-1]
        self.parent[blocks[1:]] = parents
        self.children[parents] += 1
        if before >= 0:
            self.parent[blocks[0]] = before
            self.children[before] += 1

    def publish_each(self, blocks: Sequence[int], before: Sequence[int]) -> None:
        """`publish` of one block each; `before[i]` is the block that `blocks[i]` continues, or -1."""
        if len(blocks) > _FEW_BLOCKS:
            which, parents = np.array(blocks, dtype=np.int64), np.array(before, dtype=np.int64)
            self.indexed[which] = True
            self.parent[which] = parents
            np.add.at(self.children, parents[parents >= 0], 1)
            return
        for block, parent in zip(blocks, before, strict=True):
            self.indexed[block] = True
            self.parent[block] = parent
            if parent >= 0:
                self.children[parent] += 1

    def unpublish(self, blocks: Blocks, cause: str, now_us: int) -> list[int]:
        """The engine forgot these; returns further blocks that it must forget too (descendants, L7)."""
        unused = blocks[(self.state[blocks] == CACHED) & self.indexed[blocks]]
        self.indexed[blocks] = False
        if not len(unused):
            return []
        self.evicted[cause] = self.evicted.get(cause, 0) + len(unused)
        return self._end_cached(unused, cause, now_us, now_us, told=True)

    def let_go(self, residency: ForeignResidency, blocks: Blocks, now_us: int) -> list[int]:
        """A running residency gives some of its blocks back; returns what the engine must forget."""
        mine = np.isin(blocks, residency.blocks())
        if not mine.all():
            self._refuse_release(residency, blocks[~mine])
        generations = self.generation[blocks]
        self.let_go_events.append(LetGo(residency, blocks, generations, residency.recorded_until, now_us))
        residency.passed.append(generations)
        residency.drop(generations)
        return self.unreference(blocks, "passed", now_us)

    def release(
        self, residency: ForeignResidency, cause: str, now_us: int, fence: int | None = None
    ) -> list[int]:
        """The residency's request ended; holds what policy allows. Returns what the engine must forget (F3).

        fence: the newest that was open when it ended (0: none), where that is not now.
        """
        blocks = residency.blocks()
        residency.is_running = False
        if not len(blocks):
            return []
        self._place_hold(residency, blocks, now_us)
        self._ending_fence = fence
        forget = self.unreference(blocks, cause, now_us)
        self._ending_fence = None
        return forget

    def _refuse_release(self, residency: ForeignResidency, blocks: Blocks) -> None:
        raise IsolationError(
            f"request `{residency.request_id}` does not hold block `{int(blocks[0])}`", block=int(blocks[0])
        )

    def unreference(self, blocks: Blocks, cause: str, now_us: int) -> list[int]:
        """Give one reference on each of `blocks` back."""
        refs = self.refs[blocks] - 1
        if int(refs.min()) < 0:
            raise IsolationError(f"block `{int(blocks[int(refs.argmin())])}` was released twice")
        self.refs[blocks] = refs
        last = blocks[refs == 0] if refs.any() else blocks
        if not len(last):
            return []
        self._clock += 1
        stays = self.indexed[last] & (self.holds[last] > 0) & (self.ceiling_us[last] > now_us)
        kept = last[stays]
        self.state[kept] = CACHED
        self.used[kept] = self._clock
        self.released_us[kept] = now_us
        self._cached_fence = max(self._cached_fence, self._fence_now())
        if len(kept) == len(last):
            return []
        gone = last[~stays]
        passed = self.ceiling_us[gone] <= now_us
        if not passed.any():
            return self._end(gone, cause, now_us, now_us)
        forget = self._end(gone[passed], "ceiling", now_us, now_us)
        return forget + (self._end(gone[~passed], cause, now_us, now_us) if not passed.all() else [])
