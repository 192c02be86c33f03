"""The prefix tree: nodes, their references and holds, and the eviction queues that follow from them.

T1  In full-attention groups a cached child is never reachable without its parent (L7): a node ends only after its
    descendants, and eviction takes leaves.
T2  Every walk is over nodes, never blocks; state arrays are touched once per run.
T3  No hold, renewal or attach moves a ceiling (L8); at its ceiling a node ends with its last reference.
"""

from __future__ import annotations

from kvcustody.allocator.pool.residency import Residency
from kvcustody.allocator.prefix.node import Node
from kvcustody.allocator.prefix.tree_evict import TreeEnds, is_holdable


class PrefixTree(TreeEnds):
    """Nodes over one pool. `now_us` is always passed in; nothing here reads a clock."""

    # -- release ------------------------------------------------------------------------------------------------------

    def release(
        self, leaf: Node | None, hold: Residency | None, now_us: int, cause: str, fence: int = 0
    ) -> None:
        """Give back one reference on the path of `leaf`; `hold` keeps what policy allows, until its deadline (R3).

        `fence` is the newest fence whose device work may still touch the path (0: none).
        """
        if hold is not None:
            self._place_hold(leaf, hold, now_us)
        child: Node | None = None
        node = leaf
        while node is not None:
            parent = node.parent
            node.refs -= 1
            assert node.refs >= 0, "negative references"
            if node.fence < fence:
                node.fence = fence
            if node.refs == 0:
                self._unreferenced(node, child, now_us, cause)
            child = node
            node = parent
        self.flush(now_us)

    def _unreferenced(self, node: Node, child: Node | None, now_us: int, cause: str) -> None:
        """The last reference is gone: CACHED while something holds it, else ended."""
        node.domain.owner.charge_active(-node.block_count)
        if node.holds and now_us < node.ceiling_us and node.domain.is_open:
            self._cache(node, child, now_us)
        else:
            # Due now: no custody is due before its last release, however long ago the ceiling was.
            self._end_released(node, "ceiling" if node.ceiling_us <= now_us else cause, now_us, now_us)

    def give_back(self, node: Node, now_us: int, cause: str) -> None:
        """Give one reference to one node back, whose children have none; the caller flushes."""
        assert node.refs > 0, "no reference to give back"
        node.refs -= 1
        if node.refs == 0:
            child = node.first_child
            while child is not None and child.older is None:
                child = child.next_sibling
            self._unreferenced(node, child, now_us, cause)

    def _cache(self, node: Node, child: Node | None, now_us: int) -> None:
        account = node.domain.owner
        node.released_us = now_us
        account.queue.add(node, child if child is not None and child.older is not None else None, now_us)
        account.cached_blocks += node.block_count
        self._cached.append(node.blocks)
        self._cached.extend(node.windows)

    # -- hold ---------------------------------------------------------------------------------------------------------

    def _place_hold(self, leaf: Node | None, hold: Residency, now_us: int) -> None:
        while leaf is not None and not _can_hold(leaf, hold, now_us):
            leaf = leaf.parent
        if leaf is None:
            return
        account, last = hold.account, leaf.domain
        idle = last.idle_us
        node: Node | None = leaf.parent
        while node is not None:
            if node.domain is not last:
                last = node.domain
                if last.idle_us < idle and (last.owner is account or last.is_segment):
                    idle = last.idle_us
            node = node.parent
        deadline = now_us + idle if now_us + idle < leaf.ceiling_us else leaf.ceiling_us
        hold.deadline_us, hold.leaf, hold.is_held = deadline, leaf, True
        self._replace_extended(leaf, hold, now_us)
        node = leaf
        while node is not None:
            if node.domain.owner is account or node.domain.is_segment:
                node.holds += 1
                if node.deadline_us < deadline:
                    node.deadline_us = deadline
            node = node.parent
        hold.next_at_leaf, leaf.tip = leaf.tip, hold
        account.residencies.add(hold)
        hold.account.partition.wheel.add(hold)

    def _replace_extended(self, leaf: Node, hold: Residency, now_us: int) -> None:
        """Drop the ended residency of the same principal and domain that `hold` extends (design §2)."""
        node: Node | None = leaf
        while node is not None:
            tip, tries = node.tip, 8
            while tip is not None and tries:
                tries -= 1
                if tip.domain is hold.domain and tip.principal == hold.principal:
                    self._forget(tip)
                    self._drop_holds(tip)
                    break
                tip = tip.next_at_leaf
            node = node.parent

    def lapse(self, hold: Residency, cause: str, now_us: int) -> None:
        """End one hold; nodes that lose their last hold and have no reference end. The caller flushes."""
        due = hold.deadline_us if cause == "expired" else now_us
        self._forget(hold)
        node = hold.leaf
        while node is not None:
            parent = node.parent
            if is_holdable(node, hold):
                node.holds -= 1
                if node.holds == 0 and node.refs == 0:
                    self.end_subtree(node, cause, due, now_us)
            node = parent

    @staticmethod
    def _drop_holds(hold: Residency) -> None:
        node = hold.leaf
        while node is not None:
            if is_holdable(node, hold):
                node.holds -= 1
            node = node.parent

    def _forget(self, hold: Residency) -> None:
        hold.is_held = False
        hold.account.partition.wheel.remove(hold)
        hold.account.residencies.remove(hold)
        leaf = hold.leaf
        assert leaf is not None
        tip = leaf.tip
        if tip is hold:
            leaf.tip = hold.next_at_leaf
            return
        while tip is not None:
            if tip.next_at_leaf is hold:
                tip.next_at_leaf = hold.next_at_leaf
                return
            tip = tip.next_at_leaf


def _can_hold(leaf: Node, hold: Residency, now_us: int) -> bool:
    domain = leaf.domain
    return (
        domain.is_open
        and domain.cacheable
        and now_us < leaf.ceiling_us
        and is_holdable(leaf, hold)
        and bool(leaf.keys)
    )
