"""Nodes of the prefix tree: who refers to them, how they are cut and entered; no node ends here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, Blocks
from kvcustody.allocator.pool.domain import Domain
from kvcustody.allocator.pool.pool import Ending, Pool
from kvcustody.allocator.pool.residency import DeadlineWheels
from kvcustody.allocator.prefix.hash_index import PrefixIndex
from kvcustody.allocator.prefix.index_change import IndexChange
from kvcustody.allocator.prefix.node import KEY_BYTES, NEVER_US, Node
from kvcustody.allocator.prefix.roots import Roots


class TreeNodes:
    """Nodes over one pool, with what the walks gather until `flush`."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.index = PrefixIndex(pool.blocks)
        self.roots = Roots()
        self.node_count = 0
        self.evicted: dict[str, int] = {}
        self.changes: list[IndexChange] | None = None  # told here, once somebody has asked (index change, H1)
        self._revived: list[Blocks] = []
        self._cached: list[Blocks] = []
        self._ending: list[Ending] = []
        self._ending_active: list[Ending] = []

    @property
    def wheel(self) -> DeadlineWheels:
        """The deadlines of every hold, over all partitions."""
        return DeadlineWheels(partition.wheel for partition in self.pool.partitions)

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before their children; the tree must not change meanwhile."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            child = node.first_child
            while child is not None:
                stack.append(child)
                child = child.next_sibling

    @staticmethod
    def attachable(node: Node, domain: Domain, now_us: int) -> bool:
        """The scope re-check at attach, with deadline and ceiling, so that a lagging sweep serves nothing expired.

        Ceilings and hold deadlines never grow towards a leaf, so an attachable node has attachable ancestors in its
        own chain.
        """
        return (
            node.domain is domain
            and domain.is_open
            and now_us < node.ceiling_us
            and (node.refs > 0 or now_us < node.deadline_us)
        )

    def attach(self, leaf: Node, now_us: int) -> list[Blocks]:
        """Refer to the path that ends with `leaf`; returns its runs from leaf to root."""
        parts: list[Blocks] = []
        node: Node | None = leaf
        while node is not None:
            if node.refs == 0:
                self._revive(node)
            node.refs += 1
            node.hits += 1
            node.used_us = now_us
            parts.append(node.blocks)
            node = node.parent
        if self._revived:
            self._move(self._revived, CACHED, ACTIVE)
            self._revived = []
        return parts

    def refer(self, node: Node, now_us: int) -> None:
        """Refer to one node whose parent this sequence refers to already."""
        if node.refs == 0:
            self._revive(node)
            self._move(self._revived, CACHED, ACTIVE)
            self._revived = []
        node.refs += 1
        node.hits += 1
        node.used_us = now_us

    def unrefer(self, node: Node) -> None:
        """Give back one of several references to a shared tail; it stays ACTIVE."""
        assert node.refs > 1, "the last reference takes the tail back instead"
        node.refs -= 1

    def dissolve(self, node: Node) -> None:
        """Take an unindexed leaf apart: its blocks go back to the one sequence that refers to it, still ACTIVE."""
        assert node.refs == 1 and node.first_child is None and not node.keys
        self._unlink(node)
        self.node_count -= 1

    def _unlink(self, node: Node) -> None:
        if node.parent is None:
            self.roots.remove(node)
        else:
            node.leave()

    def _revive(self, node: Node) -> None:
        account = node.domain.owner
        count = node.block_count
        account.queue.remove(node)
        account.cached_blocks -= count
        account.charge_active(count)
        self._revived.append(node.blocks)
        self._revived.extend(node.windows)

    def split(self, node: Node, position: int) -> Node:
        """Cut `node` before its block `position`; returns the head. `node` stays the tail, so leaves stay leaves."""
        assert 0 < position < node.length
        head = Node(node.domain, node.parent, node.start, node.depth, node.blocks[:position], position)
        head.keys = node.keys[: KEY_BYTES * position]
        head.refs, head.holds, head.hits = node.refs, node.holds, node.hits
        head.fence, head.born_us, head.used_us = node.fence, node.born_us, node.used_us
        head.ceiling_us, head.deadline_us = node.ceiling_us, node.deadline_us
        head.released_us = node.released_us
        head.priority, head.demote_us = node.priority, node.demote_us
        head.windows, tail_windows = _split_windows(node, position)
        parent = node.parent
        self._unlink(node)
        if parent is not None:
            parent.adopt(head)
        else:
            self.roots.add(head)
        node.blocks, node.keys = node.blocks[position:], node.keys[KEY_BYTES * position :]
        node.windows = tail_windows
        node.recount()
        head.recount()
        node.start += position
        node.depth += position
        node.length -= position
        head.adopt(node)
        if node.keys:  # the coarse entries of the tail stand already
            self.index.enter(head)
            self.index.enter_first(node)
        if node.older is not None:
            node.domain.owner.queue.insert_after(head, node)
        self.node_count += 1
        return head

    def publish(
        self, domain: Domain, parent: Node | None, start: int, blocks: Blocks, keys: bytes, now_us: int
    ) -> Node:
        """Enter a run under `parent`, referred to by its writer. A run without keys is shared but never found."""
        depth = parent.depth + parent.length if parent is not None else 0
        node = Node(domain, parent, start, depth, blocks, len(blocks))
        node.refs = 1
        node.born_us = node.used_us = now_us
        ceiling = now_us + domain.absolute_us if domain.absolute_us < NEVER_US else NEVER_US
        if parent is not None:
            ceiling = min(ceiling, parent.ceiling_us)
            parent.adopt(node)
        else:
            self.roots.add(node)
        node.ceiling_us = ceiling
        if keys:
            node.keys = keys
            self.index.enter(node)
        self.node_count += 1
        return node

    def flush(self, now_us: int) -> None:
        """Carry out the block moves that the walks above have gathered, one array operation per kind of move."""
        if self._cached:
            self._move(self._cached, ACTIVE, CACHED)
            self._cached = []
        if self._ending:
            self.pool.end(self._ending, CACHED, now_us)
            self._ending = []
        if self._ending_active:
            self.pool.end(self._ending_active, ACTIVE, now_us)
            self._ending_active = []

    def _move(self, parts: list[Blocks], source: int, target: int) -> None:
        self.pool.move(parts[0] if len(parts) == 1 else np.concatenate(parts), source, target)


def _split_windows(node: Node, position: int) -> tuple[tuple[Blocks, ...], tuple[Blocks, ...]]:
    """Windows end with the run, so the head keeps what reaches below `position` and the tail the rest."""
    heads: list[Blocks] = []
    tails: list[Blocks] = []
    for window in node.windows:
        below = max(0, len(window) - (node.length - position))
        heads.append(window[:below])
        tails.append(window[below:])
    return tuple(heads), tuple(tails)
