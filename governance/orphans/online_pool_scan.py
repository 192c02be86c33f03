"""Slices of a scan over one pool of the block manager.

A round notes what every node has (references, holds, uses), then counts sequences and holds, then compares. Steps lie
between these, so a node is compared only where nothing was attached to it or taken from it meanwhile. A node is known
by its first block: the head of a split keeps it, with all that the run had. The tail of a split may be entered where
the round has been already: blocks are marked as somebody's in the first pass over the nodes and in the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED
from kvcustody.allocator.prefix.node import Node, PathResidency
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.governance.orphans.slices import PIECE_BLOCKS, Budget, Slices, pieces, touched

_HOLD = 1 << 32  # in a count, holds stand above references
# What pieces of work cost, in units of the budget.
_PASS = 1  # past an entry, an empty slot or an empty stripe
_CLIMB = 3
_NOTE = 12
_COMPARE = 6
_MARK = 12  # and one for every 64 blocks
_PIECE = 96  # several operations on `PIECE_BLOCKS` blocks


class OnlineScan(Slices):
    """An online scan of one pool. `is_live`: whether a sequence's request has not ended."""

    def __init__(
        self, manager: BlockManager, is_live: Callable[[RunningSequence], bool], budget: Budget | None = None
    ) -> None:
        super().__init__(manager.number, budget)
        self._manager = manager
        self._is_live = is_live
        self._holds_counted = True
        blocks = manager.pool.blocks
        self._had = touched(blocks)  # generation in custody, when noted
        self._has = touched(blocks)  # generation that somebody has
        # By first block of a node: what it was (0: not noted), and what was counted.
        self._noted, self._counted = touched(blocks), touched(blocks)
        self._state_of, self._count_of = memoryview(self._noted.data), memoryview(self._counted.data)

    def _round(self) -> Iterator[None]:
        yield from self._note_blocks()
        yield from self._note_nodes()
        yield from self._count_sequences()
        yield from self._count_holds()
        yield from self._compare_nodes()
        yield from self._compare_blocks()

    # -- notes --------------------------------------------------------------------------------------------------------

    def _note_blocks(self) -> Iterator[None]:
        pool = self._manager.pool
        for part in pieces(pool.blocks):
            state = pool.state[part]
            np.multiply(pool.generation[part], (state == ACTIVE) | (state == CACHED), out=self._had[part])
            self._has[part] = self._noted[part] = self._counted[part] = 0
            self.blocks += len(state)
            if self._spend(_PIECE):
                yield

    def _note_nodes(self) -> Iterator[None]:
        state_of = self._state_of
        for stripe in self._manager.tree.index.stripes:
            for node in list(stripe.values()):
                self._spend(_PASS)
                if node.length and not state_of[first := int(node.blocks[0])]:
                    state_of[first] = self._state(node)
                    self._spend(_NOTE)
                    self.nodes += 1
                    for blocks in (node.blocks, *node.windows):
                        yield from self._mark(blocks)
                if self._left <= 0:
                    yield
            if self._spend(_PASS):
                yield

    def _state(self, node: Node) -> int:
        """What a node has, as one number that is never 0."""
        generation = int(self._manager.pool.generation[node.blocks[0]])
        return hash((node.refs, node.holds, node.hits, generation)) | 1

    def _mark(self, blocks: NDArray[np.int64]) -> Iterator[None]:
        """Somebody has these."""
        generation = self._manager.pool.generation
        for first in range(0, len(blocks), PIECE_BLOCKS):
            part = blocks[first : first + PIECE_BLOCKS]
            self._has[part] = generation[part]
            if self._spend(_MARK + len(part) // 64) and first + PIECE_BLOCKS < len(blocks):
                yield

    # -- counts -------------------------------------------------------------------------------------------------------

    def _see(self, node: Node, count: int) -> None:
        first = int(node.blocks[0])
        if self._state_of[first]:
            self._count_of[first] += count

    def _count_sequences(self) -> Iterator[None]:
        slots = self._manager.decode.sequences
        for slot in range(len(slots)):
            sequence = slots[slot] if slot < len(slots) else None
            if sequence is not None:
                self.sequences += 1
                if not self._is_live(sequence):
                    what = "lost finish", sequence.residency.id, 0
                    self._suspect(what, sequence.account.name, "a sequence without a live request")
                for _ in self._count_sequence(sequence):
                    yield
                    if slot >= len(slots) or slots[slot] is not sequence:  # it ended meanwhile
                        break
            if self._spend(_PASS):
                yield

    def _count_sequence(self, sequence: RunningSequence) -> Iterator[None]:
        node, above = sequence.leaf, 1 << 62
        while node is not None:
            if node.depth < above:  # a head that was split off meanwhile was counted with its run
                above = node.depth
                self._see(node, 1)
                for blocks in (node.blocks, *node.windows):
                    yield from self._mark(blocks)
            if self._spend(_CLIMB):
                yield
            node = node.parent
        own = [sequence.blocks, *sequence.windows, *(one for one, _ in sequence.duplicates)]
        for blocks in own:
            yield from self._mark(blocks)

    def _count_holds(self) -> Iterator[None]:
        self._holds_counted = True
        for partition in self._manager.pool.partitions:
            at = 0
            while at < len(partition.accounts):  # one may leave meanwhile: it holds nothing
                yield from self._count_account(self._manager.hold_table.of(partition.accounts[at]).oldest)
                at += 1
                if self._spend(_PASS):
                    yield

    def _count_account(self, hold: PathResidency | None) -> Iterator[None]:
        while hold is not None:
            self.holds += 1
            for _ in self._count_hold(hold):
                yield
                if not hold.is_held:  # it lapsed just now, and with it the place in the list: this count is lost
                    self._holds_counted = False
                    return
            hold = hold.newer

    def _count_hold(self, hold: PathResidency) -> Iterator[None]:
        node, above = hold.leaf, 1 << 62
        if node is None or node.length == 0:
            what = "residency without block", hold.id, 0
            self._suspect(what, hold.account.name, "its last block has ended")
        if self._spend(_PASS):
            yield
        while node is not None:
            if node.depth < above:
                above = node.depth
                if node.domain.owner is hold.account or node.domain.is_segment:
                    self._see(node, _HOLD)
            if self._spend(_CLIMB):
                yield
            node = node.parent

    # -- comparisons --------------------------------------------------------------------------------------------------

    def _compare_nodes(self) -> Iterator[None]:
        """Only what is as it was noted: nothing was attached to it or taken from it meanwhile."""
        state_of, count_of = self._state_of, self._count_of
        for stripe in self._manager.tree.index.stripes:
            for node in list(stripe.values()):
                self._spend(_PASS)
                if node.length and (noted := state_of[first := int(node.blocks[0])]):
                    state_of[first] = 0
                    if noted == self._state(node):
                        count = count_of[first]
                        self._compare(node, count % _HOLD, count // _HOLD)
                    self._spend(_COMPARE)
                for blocks in (node.blocks, *node.windows):
                    yield from self._mark(blocks)
                if self._left <= 0:
                    yield
            if self._spend(_PASS):
                yield

    def _compare(self, node: Node, refs: int, holds: int) -> None:
        if node.refs == refs and node.holds == holds:
            return
        pairs = (
            (node.refs, refs, "reference without sequence", "sequence without reference"),
            (node.holds, holds, "hold without residency", "residency without block"),
        )
        for kept, counted, more, fewer in pairs if self._holds_counted else pairs[:1]:
            if kept != counted:
                generation = int(self._manager.pool.generation[node.blocks[0]])
                what = more if kept > counted else fewer, int(node.blocks[0]), generation
                self._suspect(what, node.domain.owner.name, f"{kept} kept, {counted} counted")

    def _compare_blocks(self) -> Iterator[None]:
        pool = self._manager.pool
        for part in pieces(pool.blocks):
            state, had = pool.state[part], self._had[part]
            lost = (had > 0) & (pool.generation[part] == had) & (self._has[part] != had)
            lost &= (state == ACTIVE) | (state == CACHED)
            for place in np.flatnonzero(lost)[:16].tolist():
                block = part.start + place
                what = "reference without sequence", block, int(self._had[block])
                self._suspect(what, "", "a block in custody that no request and no chain holds", 3)
            if self._spend(_PIECE):
                yield
