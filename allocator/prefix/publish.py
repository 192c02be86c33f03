"""Publish a running sequence's own blocks as nodes of the tree that other requests may find.

The block manager calls `publish` when blocks are computed, and `end_private` when a sequence ends, for what it does not
leave in the tree.

- Only whole blocks of computed, accepted tokens are published; the partial tail never is (L10).
- Publishing a key that exists makes the request hold the canonical block; its own copy serves it until release.
  Every block it comes to refer to in this way is recorded once, in `Pool.attached`.
- Where a domain asks for it, what is published is summed at once, all of a call in one launch: it is whole, computed.
- Every block a sequence was handed ends with it, or lives on in exactly one node.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.pool.block_state import ACTIVE, EMPTY, Blocks
from kvcustody.allocator.pool.pool import Pool
from kvcustody.allocator.pool.records import AttachedBlocks, EndingRun, ReleasedBlocks
from kvcustody.allocator.prefix.hash_index import IndexChange
from kvcustody.allocator.prefix.node import KEY_BYTES, Node
from kvcustody.allocator.prefix.sequence import RunningSequence, Span
from kvcustody.allocator.prefix.tree import PrefixTree


class Publication:
    """Publishes runs of sequences into the tree."""

    def __init__(self, pool: Pool, tree: PrefixTree) -> None:
        self.pool = pool
        self.tree = tree
        self._unsummed: list[Blocks] = []

    def publish(self, sequence: RunningSequence, computed_blocks: int, now_us: int, born_us: int | None = None) -> None:
        """Publish blocks that are whole, computed and keyed, span by span, in token order.

        `born_us`: when it was first written, where it came from a tier.
        """
        self._publish_spans(sequence, computed_blocks, now_us, born_us)
        if self._unsummed:
            unsummed, self._unsummed = self._unsummed, []
            sums = self.pool.keep_sums()
            if sums is not None:
                sums.record(np.concatenate(unsummed))

    def _publish_spans(self, sequence: RunningSequence, computed_blocks: int, now_us: int, born_us: int | None) -> None:
        spans = sequence.spans
        while spans:
            span = spans[0]
            until = min(computed_blocks, span.last, span.first + len(span.keys) // KEY_BYTES)
            publishable = until > span.first and span.domain.cacheable and span.domain.is_open
            if publishable and not self._publish_run(sequence, span, until - span.first, now_us, born_us):
                # A key is taken by a node that cannot be attached: the rest stays private.
                span.keys, span.state = b"", None
                return
            if span.first < span.last or len(spans) == 1:
                return
            del spans[0]

    def _publish_run(self, sequence: RunningSequence, span: Span, count: int, now_us: int, born_us: int | None) -> bool:
        tree = self.tree
        keys = span.keys[: KEY_BYTES * count]
        blocks = sequence.table[span.first : span.first + count]
        joined, whole = 0, True
        canonical = tree.index.get(keys[:KEY_BYTES])
        while canonical is not None:
            shared = self._attach_canonical(sequence, span.domain, canonical, keys[KEY_BYTES * joined :], now_us)
            if shared < 0:
                whole, count = False, joined
                break
            if shared == 0:
                break
            sequence.duplicates.append((blocks[joined : joined + shared], span.domain))
            joined += shared
            at = KEY_BYTES * joined
            canonical = tree.index.get(keys[at : at + KEY_BYTES]) if joined < count else None
        if joined and sequence.windows:
            self._keep_duplicate_windows(sequence, span.domain, span.first + joined)
        if joined < count:
            run = blocks[joined:].copy()
            node = tree.publish(
                span.domain,
                sequence.leaf,
                span.start + joined,
                run,
                keys[KEY_BYTES * joined :],
                now_us,
                born_us=born_us,
                ceiling_us=sequence.ceiling_us,
            )
            sequence.leaf = node
            if tree.changes is not None:
                before = node.parent.keys[-KEY_BYTES:] if node.parent is not None else b""
                tree.changes.append(IndexChange(span.domain, node.keys, before, sequence.residency.id, ""))
            if sequence.windows:
                self._publish_windows(sequence, node, span.first + joined)
            if span.domain.integrity_share:
                self._unsummed += [node.blocks, *node.windows]
            if sequence.priorities:
                self._prioritise(sequence, node, now_us)
        span.keys = span.keys[KEY_BYTES * count :]
        span.first += count
        span.start += count
        sequence.published += count
        return whole

    def _attach_canonical(self, sequence: RunningSequence, domain: Domain, node: Node, keys: bytes, now_us: int) -> int:
        """Refer to the canonical node of these keys; returns how many blocks of it the sequence shares.

        0: the node was past its time and has ended, so the keys are free. -1: it cannot be attached nor ended now.
        """
        tree = self.tree
        if not tree.attachable(node, domain, now_us):
            if node.refs or node.domain.realm != domain.realm:
                return -1
            tree.end_subtree(node, "expired", min(now_us, node.deadline_us, node.ceiling_us), now_us)
            tree.flush(now_us)
            return 0
        if node.parent is not sequence.leaf:
            return -1
        span = min(node.length, len(keys) // KEY_BYTES)
        shared = span if node.keys.startswith(keys[: KEY_BYTES * span]) else 0
        if not shared:
            while node.keys.startswith(keys[KEY_BYTES * shared : KEY_BYTES * (shared + 1)], KEY_BYTES * shared):
                shared += 1
        if shared < node.length:
            node = tree.split(node, shared)
        tree.incref(node, now_us)
        blocks = np.concatenate((node.blocks, *node.windows)) if node.windows else node.blocks
        self.pool.attached.append(AttachedBlocks(sequence.residency, blocks, self.pool.generation[blocks], now_us))
        sequence.leaf = node
        return shared

    def _prioritise(self, sequence: RunningSequence, node: Node, now_us: int) -> None:
        """Cut the node where the retention priority changes."""
        tail = node
        for first, last, priority, duration_us in reversed(sequence.priorities):
            for edge in (last, first):
                if tail.depth < edge < tail.depth + tail.length:
                    tree_head = self.tree.split(tail, edge - tail.depth)
                    if edge == first:
                        _mark(tail, priority, duration_us)
                    tail = tree_head
            if first <= tail.depth and tail.depth + tail.length <= last:
                _mark(tail, priority, duration_us)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def end_private(self, sequence: RunningSequence, cause: str, now_us: int, fence: int) -> None:
        """End the blocks that the sequence does not leave in the tree: duplicates, unpublished blocks, tail,
        windows.
        """
        ending: list[EndingRun] = [
            EndingRun(blocks, domain, "duplicate", now_us, fence) for blocks, domain in sequence.duplicates
        ]
        sequence.duplicates = []
        reason = "partial-or-unpublished" if cause == "finished" else cause
        for first, last, domain in sequence.shares(sequence.published, sequence.block_count):
            ending.append(EndingRun(sequence.table[first:last].copy(), domain, reason, now_us, fence))
        for at, window in zip(sequence.window_first, sequence.windows, strict=True):
            for first, last, domain in sequence.shares(at, at + len(window)):
                ending.append(EndingRun(window[first - at : last - at], domain, reason, now_us, fence))
        sequence.windows = []
        self._end(ending, now_us)

    def _end(self, ending: list[EndingRun], now_us: int) -> None:
        for run in ending:
            run.domain.owner.charge_active(-len(run.blocks))
        if ending:
            self.pool.end(ending, ACTIVE, now_us)

    # -- sliding windows ----------------------------------------------------------------------------------------------

    def open_windows(
        self,
        sequence: RunningSequence,
        wanted: list[tuple[Account, int]],
        hit_blocks: int,
        take: Callable[[Account, int], Blocks],
    ) -> None:
        """Give the sequence its own blocks of every window group, for the blocks it will write."""
        for _ in sequence.domain.windows:
            parts = [take(account, count) for account, count in wanted]
            blocks = np.concatenate(parts) if parts else EMPTY
            sequence.windows.append(blocks)
            sequence.extra_written.append((blocks, self.pool.generation[blocks]))
            sequence.window_first.append(hit_blocks)

    def extend_windows(self, sequence: RunningSequence, blocks: Blocks) -> None:
        """Add one block to each window group."""
        sequence.extra_written.append((blocks, self.pool.generation[blocks]))
        for group in range(len(sequence.windows)):
            sequence.windows[group] = np.append(sequence.windows[group], blocks[group])

    @staticmethod
    def _keep_duplicate_windows(sequence: RunningSequence, domain: Domain, until: int) -> None:
        """Own window blocks of a joined part serve this sequence until release, as its other copies do."""
        for group, own in enumerate(sequence.windows):
            spare = until - sequence.window_first[group]
            sequence.duplicates.append((own[:spare], domain))
            sequence.windows[group] = own[spare:]
            sequence.window_first[group] = until

    def _publish_windows(self, sequence: RunningSequence, node: Node, first: int) -> None:
        """Give the node the last window of its run; what slid out of the sequence's window ends."""
        windows: list[Blocks] = []
        ending: list[EndingRun] = []
        end, fence = first + node.length, sequence.fence
        for group, needed in enumerate(node.domain.windows):
            own, at = sequence.windows[group], sequence.window_first[group]
            keep_from = max(at, first, end - needed)
            windows.append(own[keep_from - at : end - at])
            assert at == first, "windows are handed over as their run is published"
            if keep_from > first:
                passed = own[first - at : keep_from - at]
                ending.append(EndingRun(passed, node.domain, "window-passed", node.born_us, fence))
            sequence.windows[group] = own[end - at :]
            sequence.window_first[group] = end
        node.windows = tuple(windows)
        node.update_block_count()
        self._trim_windows(node, ending, fence)
        if ending:
            blocks = np.concatenate([run.blocks for run in ending])
            generations = self.pool.generation[blocks]
            sequence.passed.append(generations)
            self.pool.released.append(
                ReleasedBlocks(sequence.residency, blocks, generations, sequence.recorded_until, node.born_us)
            )
        self._end(ending, node.born_us)

    @staticmethod
    def _trim_windows(node: Node, ending: list[EndingRun], fence: int) -> None:
        """Earlier runs that only this sequence ever used keep no more of a window than it still needs."""
        needed = [window - node.length for window in node.domain.windows]
        at = node.parent
        # A run of another domain keeps its window: its other readers start from there.
        while at is not None and at.domain is node.domain and at.refs == 1 and at.hits == 0 and at.windows:
            kept = tuple(w[max(0, len(w) - max(0, n)) :] for w, n in zip(at.windows, needed, strict=True))
            for window, keep in zip(at.windows, kept, strict=True):
                if len(keep) < len(window):
                    passed = window[: len(window) - len(keep)]
                    ending.append(EndingRun(passed, at.domain, "window-passed", node.born_us, fence))
            at.windows = kept
            at.update_block_count()
            needed = [n - at.length for n in needed]
            at = at.parent


def _mark(node: Node, priority: int, duration_us: int) -> None:
    node.priority = priority
    node.demote_us = duration_us
