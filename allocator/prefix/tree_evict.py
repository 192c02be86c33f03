"""How nodes of the prefix tree end: with their descendants, deepest first, and for room, from the leaves."""

from __future__ import annotations

from kvcustody.allocator.pool.account import Account
from kvcustody.allocator.pool.pool import Ending
from kvcustody.allocator.pool.residency import Residency
from kvcustody.allocator.prefix.index_change import IndexChange
from kvcustody.allocator.prefix.node import KEY_BYTES, Node
from kvcustody.allocator.prefix.tree_insert import TreeNodes
from kvcustody.errors import IsolationError


class TreeEnds(TreeNodes):
    """Ends nodes, and gathers the block moves that follow."""

    def end_subtree(self, node: Node, cause: str, due_us: int, now_us: int) -> None:
        """End an unreferenced node with all its descendants, deepest first (T1). The caller flushes.

        A descendant is due now, or when its own last hold ended: until then it could be reached.
        """
        while node.first_child is not None:
            deepest = node.first_child
            while deepest.first_child is not None:
                deepest = deepest.first_child
            self._end_cached(deepest, "unreachable", now_us, now_us)
        self._end_cached(node, cause, due_us, now_us)

    def _end_cached(self, node: Node, cause: str, due_us: int, now_us: int) -> None:
        if node.refs:
            raise IsolationError("a referenced node cannot end", refs=node.refs)
        account = node.domain.owner
        account.queue.remove(node)
        account.cached_blocks -= node.block_count
        self._collect(node, self._ending, cause, _due(node, due_us))
        parent = node.parent
        self._detach(node)
        if (
            account.queue.policy.by_priority
            and parent is not None
            and parent.first_child is None
            and parent.older is not None
        ):
            parent.domain.owner.queue.settle(parent)

    def _end_released(self, node: Node, cause: str, due_us: int, now_us: int) -> None:
        while node.first_child is not None:
            self.end_subtree(node.first_child, "unreachable", due_us, now_us)
        self._collect(node, self._ending_active, cause, due_us)
        self._detach(node)

    def _collect(self, node: Node, into: list[Ending], cause: str, due_us: int) -> None:
        if self.changes is not None and node.keys:
            self.changes.append(IndexChange(node.domain, node.keys, b"", 0, cause))
        if len(node.blocks):
            into.append((node.blocks, node.domain, cause, due_us, node.fence, node.ceiling_us))
        into += [
            (window, node.domain, cause, due_us, node.fence, node.ceiling_us)
            for window in node.windows
            if len(window)
        ]

    def _detach(self, node: Node) -> None:
        if node.keys:
            self.index.remove(node)
        self._raise_tips(node)
        self._unlink(node)
        node.length = 0
        self.node_count -= 1

    def _raise_tips(self, node: Node) -> None:
        """Holds whose leaf ends move to the nearest ancestor they hold; a hold without a block is over (R2)."""
        hold = node.tip
        node.tip = None
        while hold is not None:
            after = hold.next_at_leaf
            parent = node.parent
            while parent is not None and not is_holdable(parent, hold):
                parent = parent.parent
            if parent is not None:
                hold.leaf, hold.next_at_leaf, parent.tip = parent, parent.tip, hold
            else:
                hold.is_held = False
                hold.account.partition.wheel.remove(hold)
                hold.account.residencies.remove(hold)
            hold = after

    def hide(self, node: Node, cause: str) -> None:
        """Take a referenced node out of the index: its sequences keep it, and nobody finds it again."""
        if not node.keys:
            return
        self.index.remove(node)
        if self.changes is not None:
            self.changes.append(IndexChange(node.domain, node.keys, b"", 0, cause))
        node.keys = b""

    def evict(self, account: Account, count: int, now_us: int, reason: str) -> int:
        """Give up at least min(`count`, all) cached blocks of `account`, leaves first; returns how many."""
        queue, given = account.queue, 0
        queue.demote(now_us)
        while given < count:
            node = queue.front()
            if node is None:
                break
            if node.domain.owner is not account:  # what a reader through a grant has added below
                self._end_cached(node, "unreachable", now_us, now_us)
                continue
            queue.policy.evicted(node)
            surplus = node.block_count - (count - given)
            if surplus <= 0 or node.windows:
                given += node.block_count
                self._end_cached(node, reason, now_us, now_us)
            else:
                given += self._trim(node, count - given, reason, now_us)
        self.evicted[reason] = self.evicted.get(reason, 0) + given
        self.flush(now_us)
        return given

    def _trim(self, node: Node, count: int, reason: str, now_us: int) -> int:
        keep = node.length - count
        if node.keys:
            self.index.remove(node, keep)
            if self.changes is not None:
                self.changes.append(IndexChange(node.domain, node.keys[KEY_BYTES * keep :], b"", 0, reason))
            node.keys = node.keys[: KEY_BYTES * keep]
        due_us = _due(node, now_us)
        self._ending.append((node.blocks[keep:], node.domain, reason, due_us, node.fence, node.ceiling_us))
        node.blocks = node.blocks[:keep]
        node.length = node.block_count = keep
        node.domain.owner.cached_blocks -= count
        return count


def _due(node: Node, due_us: int) -> int:
    """When an unreferenced node was due: never before its last release, nor after the end of its last hold."""
    if node.deadline_us:
        due_us = min(due_us, node.deadline_us)
    return max(due_us, node.released_us)


def is_holdable(node: Node, hold: Residency) -> bool:
    """Whether `hold` can keep `node`.

    Readers through a grant get references, not holds; a segment's blocks are held in its owner's name.
    """
    return node.domain.owner is hold.account or node.domain.is_segment
