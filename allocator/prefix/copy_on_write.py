"""Forks: a second sequence over the same blocks, for parallel sampling and beam search, and the copy at the first
divergent write.

- A forked block table shares every block; only the partial tail is ever written again, and it is copied first.
- The last sequence on a shared tail takes it back without a copy.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.pool import Pool
from kvcustody.allocator.pool.records import ReleasedBlocks
from kvcustody.allocator.prefix.decode_table import DecodeTable
from kvcustody.allocator.prefix.node import PathResidency
from kvcustody.allocator.prefix.sequence import RunningSequence, Span
from kvcustody.allocator.prefix.tree import PrefixTree


class Forks:
    """Forking and copy-on-write over one pool."""

    def __init__(self, pool: Pool, tree: PrefixTree, decode: DecodeTable) -> None:
        self.pool = pool
        self.tree = tree
        self.decode = decode

    def fork(self, parent: RunningSequence, id_: Hashable, residency: PathResidency, now_us: int) -> RunningSequence:
        """Return a child that shares all of `parent`'s blocks, which must be published as far as possible."""
        self._share_rest(parent, now_us)
        child = RunningSequence(id_, residency, parent.pool)
        assert parent.leaf is not None, "a running sequence has at least one block"
        path = self.tree.attach(parent.leaf, now_us)
        child.leaf, child.shared_tail = parent.leaf, parent.shared_tail
        # The path, not the parent's table: where the parent has a duplicate, the block ends with the parent.
        child.table = np.concatenate(path[::-1])
        child.block_count = child.hit_blocks = child.published = parent.block_count
        child.earlier_blocks = child.hit_blocks
        child.active_until_us = parent.active_until_us
        child.recorded_until = self.pool.next_generation
        child.spans = [_copy(span) for span in parent.spans]
        table, slot = self.decode, parent.slot
        table.add(child, int(table.length[slot]), table.pending[slot].tobytes())
        table.computed[child.slot] = table.computed[slot]
        return child

    def _share_rest(self, parent: RunningSequence, now_us: int) -> None:
        """Move the unpublished blocks into unindexed nodes: whole ones, then the partial tail by itself."""
        if parent.shared_tail is not None or parent.published == parent.block_count:
            return
        size = self.decode.block_tokens
        whole = int(self.decode.length[parent.slot]) // size
        if whole > parent.published:  # not computed yet: these blocks, and what follows them, are never published
            for span in parent.spans:
                span.keys = b""
                span.state = None
        whole = max(whole, parent.published)
        parts = [*parent.shares(parent.published, whole), *parent.shares(whole, parent.block_count)]
        for first, last, domain in parts:
            run = parent.table[first:last].copy()
            parent.leaf = self.tree.publish(domain, parent.leaf, 0, run, b"", now_us)
            parent.published = last
            if last > whole:
                parent.shared_tail = parent.leaf

    def unshare_tail(self, sequence: RunningSequence, fresh: Blocks | None, now_us: int) -> None:
        """Take the shared tail back before the next write, or copy it into `fresh`, one block for each tail block."""
        tail = sequence.shared_tail
        assert tail is not None
        sequence.leaf = tail.parent
        sequence.shared_tail = None
        sequence.published -= tail.length
        # Device work of either side may still touch the tail: the newest fence follows the blocks (L6).
        fence = max(tail.fence, sequence.fence)
        if fresh is None:
            sequence.fence = fence
            self.tree.remove_node(tail)
            return
        tail.fence = fence
        generations = self.pool.generation[tail.blocks]
        sequence.passed.append(generations)
        self.pool.released.append(
            ReleasedBlocks(sequence.residency, tail.blocks, generations, sequence.recorded_until, now_us)
        )
        at = sequence.block_count - tail.length
        sequence.admitted_blocks = -1
        self.pool.memory.copy(tail.blocks, fresh)
        if at < sequence.hit_blocks:
            sequence.hit_blocks = at
        else:
            sequence.extra_written.append((tail.blocks, generations))
        sequence.table = np.concatenate((sequence.table[:at], fresh))
        sequence.block_count = len(sequence.table)
        self.tree.decref_shared(tail)


def _copy(span: Span) -> Span:
    state = span.state.copy() if span.state is not None else None
    return Span(span.domain, span.first, span.last, span.start, span.keys, state)
