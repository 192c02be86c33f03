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

from kvcustody.allocator.block import ACTIVE, CACHED, FENCED, QUARANTINED, Blocks, BlockState
from kvcustody.allocator.domain import Domain
from kvcustody.allocator.foreign_blocks import (
    CEILING,
    CHILDREN,
    COLUMNS,
    GENERATION,
    HOLD_UNTIL,
    HOLDS,
    INDEXED,
    NO_BLOCK,
    PARENT,
    REFS,
    STATE,
    TAG,
    USED,
)
from kvcustody.allocator.foreign_holds import ForeignHolds
from kvcustody.allocator.foreign_residency import ForeignResidency
from kvcustody.allocator.pool import LetGo
from kvcustody.errors import IsolationError

# By state: whether a block in it cannot be handed out, or attached.
_IN_USE = np.isin(np.arange(len(BlockState)), [ACTIVE, CACHED, QUARANTINED])
_NOT_HELD = np.isin(np.arange(len(BlockState)), [ACTIVE, CACHED], invert=True)


class ForeignPool(ForeignHolds):
    """Custody of `blocks` physical blocks over `shards` workers. `reserved` indices are never anybody's."""

    # -- what the engine does -----------------------------------------------------------------------------------------

    def hand_out(self, residency: ForeignResidency, blocks: Blocks, domain: Domain, now_us: int) -> None:
        """`blocks` are the residency's from now on, written by it alone (F1, F2)."""
        count = len(blocks)
        first = self._take(blocks, now_us)
        rows = np.empty((count, COLUMNS), dtype=np.int64)
        ceiling = min(now_us + domain.absolute_us, residency.ceiling_us)
        rows[:] = (0, ACTIVE, 1, 0, domain.tag, ceiling, 0, now_us, 0, 0, NO_BLOCK, 0)
        rows[:, GENERATION] = np.arange(first, first + count)
        self.rows[blocks] = rows
        self._enter(domain)
        domain.owner.charge(count)
        residency.handed.append((blocks, first))
        if domain is not residency.domain:
            residency.is_mixed = True

    def _take(self, blocks: Blocks, now_us: int) -> int:
        """Check that nobody uses `blocks`; returns the first of as many new generations."""
        states = self.state[blocks]
        if _IN_USE[states].any():
            self._refuse_hand_out(blocks, states)
        if states.any():  # not all are CLEAN: what they held is in the order of this step
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

    def _refuse_hand_out(self, blocks: Blocks, states: NDArray[np.int64]) -> None:
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
        number = self._take(blocks, now_us)
        rows: list[tuple[int, ...]] = []
        for at, residency in enumerate(residencies):
            domain = residency.domain
            ceiling = min(now_us + domain.absolute_us, residency.ceiling_us)
            rows.append((number, ACTIVE, 1, 0, domain.tag, ceiling, 0, now_us, 0, 0, NO_BLOCK, 0))
            domain.owner.charge(1)
            self.domains[domain.tag] = domain
            residency.handed.append((blocks[at : at + 1], number))
            number += 1
        self.rows[blocks] = rows

    def attachable(self, blocks: Blocks, expected: NDArray[np.int32] | int, now_us: int) -> int:
        """How many leading blocks may be attached now: in the expected domain, indexed, held, before their ceiling."""
        rows = self.rows[blocks]
        fine = (rows[:, TAG] == expected) & (rows[:, INDEXED] != 0) & (rows[:, CEILING] > now_us)
        fine &= (rows[:, REFS] > 0) | ((rows[:, STATE] == CACHED) & (rows[:, HOLD_UNTIL] > now_us))
        return len(blocks) if fine.all() else int(fine.argmin())

    def attach(self, residency: ForeignResidency, blocks: Blocks, now_us: int) -> None:
        """References on cached or running blocks. Raises `IsolationError` where one is neither."""
        rows = self.rows[blocks]
        states = rows[:, STATE]
        if _NOT_HELD[states].any():
            at = int(_NOT_HELD[states].argmax())
            raise IsolationError(
                f"block `{int(blocks[at])}` is {BlockState(int(states[at])).name} and cannot be attached",
                block=int(blocks[at]),
            )
        rows[:, STATE] = ACTIVE
        rows[:, REFS] += 1
        self.rows[blocks] = rows
        residency.ceiling_us = min(residency.ceiling_us, int(rows[-1, CEILING]))
        if (rows[:, TAG] != residency.domain.tag).any():
            residency.is_mixed = True
        generations = rows[:, GENERATION]
        if len(residency.attached):
            blocks = np.concatenate((residency.attached, blocks))
            generations = np.concatenate((residency.attached_generations, generations))
        residency.attached, residency.attached_generations = blocks, generations

    def publish(self, blocks: Blocks, before: int = NO_BLOCK, *, chained: bool = True) -> None:
        """`blocks` are in the engine's index; each continues the one before it, the first continues `before`."""
        rows = self.rows[blocks]
        rows[:, INDEXED] = 1
        if chained:
            rows[0, PARENT] = before
            rows[1:, PARENT] = blocks[:-1]
            rows[:-1, CHILDREN] += 1
        else:
            rows[:, PARENT] = NO_BLOCK
        self.rows[blocks] = rows
        if chained and before >= 0:
            self.rows[before, CHILDREN] += 1

    def publish_each(self, blocks: Blocks, before: Blocks) -> None:
        """`publish` of one block each; `before[i]` is the block that `blocks[i]` continues, or -1."""
        self.rows[blocks, INDEXED] = 1
        self.rows[blocks, PARENT] = before
        np.add.at(self.children, before[before >= 0], 1)

    def unpublish(self, blocks: Blocks, cause: str, now_us: int) -> list[int]:
        """The engine forgot these; returns further blocks that it must forget too (descendants, L7)."""
        rows = self.rows[blocks]
        unused = blocks[(rows[:, STATE] == CACHED) & (rows[:, INDEXED] != 0)]
        self.rows[blocks, INDEXED] = 0
        if not len(unused):
            return []
        self.evicted[cause] = self.evicted.get(cause, 0) + len(unused)
        return self._end(unused, cause, now_us, now_us, told=True)

    def let_go(self, residency: ForeignResidency, blocks: Blocks, now_us: int) -> list[int]:
        """A running residency gives some of its blocks back; returns what the engine must forget."""
        mine = np.isin(blocks, residency.blocks())
        if not mine.all():
            self._refuse_release(residency, blocks[~mine])
        rows = self.rows[blocks]
        generations = rows[:, GENERATION].copy()
        self.let_go_events.append(LetGo(residency, blocks, generations, residency.recorded_until, now_us))
        residency.passed.append(generations)
        residency.drop(generations)
        return self._unreference(blocks, rows, "passed", now_us)

    def release(self, residency: ForeignResidency, cause: str, now_us: int) -> list[int]:
        """The residency's request ended; holds what policy allows. Returns what the engine must forget (F3)."""
        blocks = residency.blocks()
        residency.is_running = False
        if not len(blocks):
            return []
        rows = self.rows[blocks]
        replaced = self._place_hold(residency, blocks, rows, now_us)
        forget = self._unreference(blocks, rows, cause, now_us)
        if replaced is not None:  # this residency holds all of it now, once more
            self.holds[replaced] -= 1
        return forget

    def _refuse_release(self, residency: ForeignResidency, blocks: Blocks) -> None:
        raise IsolationError(
            f"request `{residency.request_id}` does not hold block `{int(blocks[0])}`", block=int(blocks[0])
        )

    def _unreference(self, blocks: Blocks, rows: NDArray[np.int64], cause: str, now_us: int) -> list[int]:
        """Give one reference on each of `blocks` back; `rows` are theirs, written back here."""
        rows[:, REFS] -= 1
        refs = rows[:, REFS]
        if int(refs.min()) < 0:
            raise IsolationError(f"block `{int(blocks[int(refs.argmin())])}` was released twice")
        self._clock += 1
        last = refs == 0
        stays = last & (rows[:, INDEXED] != 0) & (rows[:, HOLDS] > 0) & (rows[:, CEILING] > now_us)
        rows[stays, STATE] = CACHED
        rows[stays, USED] = self._clock
        self.rows[blocks] = rows
        gone = last ^ stays
        if not gone.any():
            return []
        ended, ceilings = blocks[gone], rows[gone, CEILING]
        passed = ceilings <= now_us
        if not passed.any():
            return self._end(ended, cause, now_us, now_us)
        forget = self._end(ended[passed], "ceiling", now_us, now_us)
        return forget + (self._end(ended[~passed], cause, now_us, now_us) if not passed.all() else [])
