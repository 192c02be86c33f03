"""The prefix tree: published runs of blocks, their references, their holds, and the eviction order.

A radix tree over blocks. A node is a run of blocks of one chain; its parent is the run before it. Keys are found in the
hash index (`tree.index`), never by walking down, so that a look-up costs the same at any depth.

    node = tree.publish(domain, parent, start, blocks, keys, now_us)   # insert a run, referred to by its writer
    head = tree.split(node, position)                                  # cut where two requests diverge
    runs = tree.attach(node, now_us)                                   # one more reference on the whole path
    tree.release(node, hold, now_us, "finished")                       # give it back; `hold` keeps the path cached
    tree.evict(account, count, now_us, "pressure")                     # cached leaves first

A node is ACTIVE while referred to, then CACHED while a residency's hold keeps it, then it ends. Walks are over nodes,
never blocks: they gather the moves of block states, and `flush` makes each kind of move once.

- In full-attention groups a cached child is never reachable without its parent (L7): a node ends only after its
  descendants, and eviction takes leaves.
- Every walk is over nodes, never blocks; state arrays are touched once per run.
- No hold, renewal or attach moves a ceiling (L8); at its ceiling a node ends with its last reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, NEVER_US, Blocks
from kvcustody.allocator.pool.hold_table import HoldTable
from kvcustody.allocator.pool.pool import Pool
from kvcustody.allocator.pool.records import EndingRun
from kvcustody.allocator.prefix.evicted_keys import EvictedKeys
from kvcustody.allocator.prefix.eviction_policy import EvictionPolicy, EvictionQueue, Lru
from kvcustody.allocator.prefix.hash_index import IndexChange, PrefixIndex
from kvcustody.allocator.prefix.node import KEY_BYTES, Node, PathResidency
from kvcustody.errors import IsolationError


class PrefixTree:
    """The nodes of one pool. `now_us` is always passed in; the tree reads no clock."""

    def __init__(self, pool: Pool, policy: Callable[[], EvictionPolicy] = Lru) -> None:
        self.pool = pool
        self.index = PrefixIndex(pool.blocks)
        self.roots = Roots()
        self.node_count = 0
        self.hold_table: HoldTable[PathResidency] = HoldTable()
        self.queues: dict[Account, EvictionQueue] = {}
        self.evicted: dict[str, int] = {}
        self.evicted_keys = EvictedKeys(pool.blocks)
        self.demote: Callable[[Node, int], None] | None = (
            None  # told what is evicted, from which block on, before it is
        )
        self.changes: list[IndexChange] | None = None  # a list once somebody asks what may be found
        self._policy = policy
        self._reactivated: list[Blocks] = []
        self._cached: list[Blocks] = []
        self._ending: list[EndingRun] = []
        self._ending_active: list[EndingRun] = []

    def add_account(self, account: Account) -> None:
        """Create the eviction queue of a new account."""
        self.queues[account] = EvictionQueue(self._policy())

    def forget_account(self, account: Account) -> None:
        """Forget an account that has no node left."""
        del self.queues[account]
        self.hold_table.forget(account)
        self.evicted_keys.forget(account.name)

    def nodes(self) -> Iterator[Node]:
        """Yield every node, parents before their children; the tree must not change meanwhile."""
        stack = list(self.roots)
        while stack:
            node = stack.pop()
            yield node
            child = node.first_child
            while child is not None:
                stack.append(child)
                child = child.next_sibling

    # -- match and attach --------------------------------------------------------------------------------------

    @staticmethod
    def attachable(node: Node, domain: Domain, now_us: int) -> bool:
        """Check scope, deadline and ceiling again at attach, so that a lagging sweep serves nothing expired.

        Ceilings and hold deadlines never grow towards a leaf, so an attachable node has attachable ancestors in its
        own chain.
        """
        return (
            node.domain.realm == domain.realm
            and node.domain.is_open
            and not node.domain.is_withheld
            and now_us < node.ceiling_us
            and (node.refs > 0 or now_us < node.deadline_us)
        )

    def attach(self, leaf: Node, now_us: int) -> list[Blocks]:
        """Refer to the path that ends with `leaf`; return its runs from leaf to root."""
        parts: list[Blocks] = []
        node: Node | None = leaf
        while node is not None:
            if node.refs == 0:
                self._reactivate(node, now_us)
            node.refs += 1
            node.hits += 1
            node.used_us = now_us
            parts.append(node.blocks)
            node = node.parent
        if self._reactivated:
            self._move(self._reactivated, CACHED, ACTIVE)
            self._reactivated = []
        return parts

    def incref(self, node: Node, now_us: int) -> None:
        """Refer to one node whose parent this sequence already refers to."""
        if node.refs == 0:
            self._reactivate(node, now_us)
            self._move(self._reactivated, CACHED, ACTIVE)
            self._reactivated = []
        node.refs += 1
        node.hits += 1
        node.used_us = now_us

    def _reactivate(self, node: Node, now_us: int) -> None:
        account = node.domain.owner
        count = node.block_count
        queue = self.queues[account]
        if queue.listener is not None:
            queue.listener.reused(node, now_us)
        queue.remove(node)
        account.cached_blocks -= count
        account.charge_active(count)
        self._reactivated.append(node.blocks)
        self._reactivated.extend(node.windows)

    # -- insert and split --------------------------------------------------------------------------------------

    def publish(
        self,
        domain: Domain,
        parent: Node | None,
        start: int,
        blocks: Blocks,
        keys: bytes,
        now_us: int,
        *,
        born_us: int | None = None,
        ceiling_us: int = NEVER_US,
    ) -> Node:
        """Add a run under `parent`, referred to by its writer. A run without keys is shared but never found.

        `born_us`: when it was first written, where that was before now; `ceiling_us`: what nothing of it outlives.
        """
        depth = parent.depth + parent.length if parent is not None else 0
        node = Node(domain, parent, start, depth, blocks, len(blocks))
        node.refs = 1
        node.born_us, node.used_us = now_us if born_us is None else min(now_us, born_us), now_us
        ceiling = now_us + domain.absolute_us if domain.absolute_us < NEVER_US else NEVER_US
        ceiling = min(ceiling, ceiling_us)
        if parent is not None:
            ceiling = min(ceiling, parent.ceiling_us)
            parent.add_child(node)
        else:
            self.roots.add(node)
        node.ceiling_us = ceiling
        if keys:
            node.keys = keys
            self.index.insert(node)
        self.node_count += 1
        return node

    def split(self, node: Node, position: int) -> Node:
        """Cut `node` before its block `position` and return the head. `node` stays the tail, so leaves stay leaves."""
        assert 0 < position < node.length
        head = Node(node.domain, node.parent, node.start, node.depth, node.blocks[:position], position)
        head.keys = node.keys[: KEY_BYTES * position]
        head.refs, head.holds, head.hits = node.refs, node.holds, node.hits
        head.fence, head.born_us, head.used_us = node.fence, node.born_us, node.used_us
        head.ceiling_us, head.deadline_us = node.ceiling_us, node.deadline_us
        head.released_us, head.pause_us = node.released_us, node.pause_us
        head.priority, head.demote_us, head.rank_us = node.priority, node.demote_us, node.rank_us
        head.windows, tail_windows = split_windows(node, position)
        parent = node.parent
        self._unlink(node)
        if parent is not None:
            parent.add_child(head)
        else:
            self.roots.add(head)
        node.blocks, node.keys = node.blocks[position:], node.keys[KEY_BYTES * position :]
        node.windows = tail_windows
        node.update_block_count()
        head.update_block_count()
        node.start += position
        node.depth += position
        node.length -= position
        head.add_child(node)
        if node.keys:  # the coarse entries of the tail stand already
            self.index.insert(head)
            self.index.insert_first(node)
        if node.older is not None:
            self.queues[node.domain.owner].insert_after(head, node)
        self.node_count += 1
        return head

    def remove_node(self, node: Node) -> None:
        """Remove an unindexed leaf: its blocks go back to the one sequence that refers to it, still ACTIVE."""
        assert node.refs == 1 and node.first_child is None and not node.keys
        self._unlink(node)
        self.node_count -= 1

    def _unlink(self, node: Node) -> None:
        if node.parent is None:
            self.roots.remove(node)
        else:
            node.remove_from_parent()

    # -- release -----------------------------------------------------------------------------------------------

    def release(self, leaf: Node | None, hold: PathResidency | None, now_us: int, cause: str, fence: int = 0) -> None:
        """Give back one reference on the path of `leaf`; `hold` keeps what policy allows, until its deadline.

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

    def decref(self, node: Node, now_us: int, cause: str) -> None:
        """Give back one reference to one node whose children have none; the caller flushes."""
        assert node.refs > 0, "no reference to give back"
        node.refs -= 1
        if node.refs == 0:
            child = node.first_child
            while child is not None and child.older is None:
                child = child.next_sibling
            self._unreferenced(node, child, now_us, cause)

    def decref_shared(self, node: Node) -> None:
        """Give back one of several references to a shared tail; it stays ACTIVE."""
        assert node.refs > 1, "the last reference takes the tail back instead"
        node.refs -= 1

    def _cache(self, node: Node, child: Node | None, now_us: int) -> None:
        account = node.domain.owner
        node.released_us = now_us
        self.queues[account].add(node, child if child is not None and child.older is not None else None, now_us)
        account.cached_blocks += node.block_count
        self._cached.append(node.blocks)
        self._cached.extend(node.windows)

    # -- holds -------------------------------------------------------------------------------------------------

    def _place_hold(self, leaf: Node | None, hold: PathResidency, now_us: int) -> None:
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
        hold.next_at_leaf, leaf.hold_here = leaf.hold_here, hold
        self.hold_table.add(hold)

    def _replace_extended(self, leaf: Node, hold: PathResidency, now_us: int) -> None:
        """Drop the ended residency of the same principal and domain that `hold` extends."""
        node: Node | None = leaf
        while node is not None:
            ending_here, tries = node.hold_here, 8
            while ending_here is not None and tries:
                tries -= 1
                if ending_here.domain is hold.domain and ending_here.principal == hold.principal:
                    self._remove_hold(ending_here)
                    self._drop_holds(ending_here)
                    break
                ending_here = ending_here.next_at_leaf
            node = node.parent

    def lapse(self, hold: PathResidency, cause: str, now_us: int) -> None:
        """End one hold; nodes that lose their last hold and have no reference end. The caller flushes."""
        due = hold.deadline_us if cause == "expired" else now_us
        self._remove_hold(hold)
        node = hold.leaf
        while node is not None:
            parent = node.parent
            if hold.can_hold(node):
                node.holds -= 1
                if node.holds == 0 and node.refs == 0:
                    self.end_subtree(node, cause, due, now_us)
            node = parent

    @staticmethod
    def _drop_holds(hold: PathResidency) -> None:
        node = hold.leaf
        while node is not None:
            if hold.can_hold(node):
                node.holds -= 1
            node = node.parent

    def _remove_hold(self, hold: PathResidency) -> None:
        self.hold_table.remove(hold)
        leaf = hold.leaf
        assert leaf is not None
        ending_here = leaf.hold_here
        if ending_here is hold:
            leaf.hold_here = hold.next_at_leaf
            return
        while ending_here is not None:
            if ending_here.next_at_leaf is hold:
                ending_here.next_at_leaf = hold.next_at_leaf
                return
            ending_here = ending_here.next_at_leaf

    # -- evict and end -----------------------------------------------------------------------------------------

    def evict(self, account: Account, count: int, now_us: int, reason: str) -> int:
        """Evict at least min(`count`, all) cached blocks of `account`, leaves first; return how many."""
        queue, evicted_count = self.queues[account], 0
        queue.demote(now_us)
        queue.bound_protected(account.cached_blocks)
        while evicted_count < count:
            node = queue.front()
            if node is None:
                break
            if node.domain.owner is not account:  # what a reader through a grant has added below
                self._end_cached(node, "unreachable", now_us, now_us)
                continue
            queue.policy.evicted(node)
            surplus = node.block_count - (count - evicted_count)
            whole = surplus <= 0 or bool(node.windows)
            if self.demote is not None:
                self.demote(node, 0 if whole else node.length - (count - evicted_count))
            if whole:
                evicted_count += node.block_count
                if node.keys:
                    self.evicted_keys.add(account.name, node.keys[:KEY_BYTES], node.length)
                self._end_cached(node, reason, now_us, now_us)
            else:
                evicted_count += self._trim(node, count - evicted_count, reason, now_us)
        self.evicted[reason] = self.evicted.get(reason, 0) + evicted_count
        self.flush(now_us)
        return evicted_count

    def _trim(self, node: Node, count: int, reason: str, now_us: int) -> int:
        keep = node.length - count
        if node.keys:
            self.index.remove(node, keep)
            first = node.keys[KEY_BYTES * keep : KEY_BYTES * (keep + 1)]
            self.evicted_keys.add(node.domain.owner.name, first, count)
            if self.changes is not None:
                self.changes.append(IndexChange(node.domain, node.keys[KEY_BYTES * keep :], b"", 0, reason))
            node.keys = node.keys[: KEY_BYTES * keep]
        due_us = _due(node, now_us)
        self._ending.append(EndingRun(node.blocks[keep:], node.domain, reason, due_us, node.fence, node.ceiling_us))
        node.blocks = node.blocks[:keep]
        node.length = node.block_count = keep
        self.queues[node.domain.owner].trimmed(node, count)
        node.domain.owner.cached_blocks -= count
        return count

    def end_subtree(self, node: Node, cause: str, due_us: int, now_us: int) -> None:
        """End an unreferenced node with all its descendants, deepest first. The caller flushes.

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
        queue = self.queues[account]
        queue.remove(node)
        account.cached_blocks -= node.block_count
        self._gather_end(node, self._ending, cause, _due(node, due_us))
        parent = node.parent
        self._detach(node)
        if queue.policy.by_priority and parent is not None and parent.first_child is None and parent.older is not None:
            self.queues[parent.domain.owner].lower(parent)

    def _end_released(self, node: Node, cause: str, due_us: int, now_us: int) -> None:
        while node.first_child is not None:
            self.end_subtree(node.first_child, "unreachable", due_us, now_us)
        self._gather_end(node, self._ending_active, cause, due_us)
        self._detach(node)

    def _gather_end(self, node: Node, into: list[EndingRun], cause: str, due_us: int) -> None:
        if self.changes is not None and node.keys:
            self.changes.append(IndexChange(node.domain, node.keys, b"", 0, cause))
        if len(node.blocks):
            into.append(EndingRun(node.blocks, node.domain, cause, due_us, node.fence, node.ceiling_us))
        into += [
            EndingRun(window, node.domain, cause, due_us, node.fence, node.ceiling_us)
            for window in node.windows
            if len(window)
        ]

    def _detach(self, node: Node) -> None:
        if node.keys:
            self.index.remove(node)
        self._move_holds_up(node)
        self._unlink(node)
        node.length = 0
        self.node_count -= 1

    def _move_holds_up(self, node: Node) -> None:
        """Holds whose leaf ends move to the nearest ancestor they hold; a hold without a block is over."""
        hold = node.hold_here
        node.hold_here = None
        while hold is not None:
            after = hold.next_at_leaf
            parent = node.parent
            while parent is not None and not hold.can_hold(parent):
                parent = parent.parent
            if parent is not None:
                hold.leaf, hold.next_at_leaf, parent.hold_here = parent, parent.hold_here, hold
            else:
                self.hold_table.remove(hold)
            hold = after

    def unpublish(self, node: Node, cause: str) -> None:
        """Take a referenced node out of the index: its sequences keep it, and no look-up finds it again."""
        if not node.keys:
            return
        self.index.remove(node)
        if self.changes is not None:
            self.changes.append(IndexChange(node.domain, node.keys, b"", 0, cause))
        node.keys = b""

    def withdraw(self, node: Node, cause: str, now_us: int) -> None:
        """Take a referenced node and everything that continues it out for good; its sequences keep it. The caller
        flushes.

        No hold keeps it any longer, so it ends with its last reference; what nobody refers to ends now.
        """
        stack, inside = [node], []
        while stack:
            at = stack.pop()
            inside.append(at)
            child = at.first_child
            while child is not None:
                after = child.next_sibling
                if child.refs:
                    stack.append(child)
                else:
                    self.end_subtree(child, cause, now_us, now_us)
                child = after
        for at in reversed(inside):  # holds move up step by step, until they are outside
            self._move_holds_up(at)
            at.holds = 0
            self.unpublish(at, cause)

    def flush(self, now_us: int) -> None:
        """Carry out the block moves that the walks have gathered, one array operation for each kind of move."""
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


class Roots:
    """Nodes without a parent: a linked list through their sibling links, which never needs resizing."""

    __slots__ = ("first",)

    def __init__(self) -> None:
        self.first: Node | None = None

    def add(self, node: Node) -> None:
        """Add `node`."""
        head = self.first
        node.previous_sibling, node.next_sibling = None, head
        if head is not None:
            head.previous_sibling = node
        self.first = node

    def remove(self, node: Node) -> None:
        """Remove `node`."""
        if self.first is node:
            self.first = node.next_sibling
        node.remove_from_parent()

    def __iter__(self) -> Iterator[Node]:
        """Every root."""
        node = self.first
        while node is not None:
            after = node.next_sibling
            yield node
            node = after


def _can_hold(leaf: Node, hold: PathResidency, now_us: int) -> bool:
    domain = leaf.domain
    return domain.is_open and domain.cacheable and now_us < leaf.ceiling_us and hold.can_hold(leaf) and bool(leaf.keys)


def _due(node: Node, due_us: int) -> int:
    """When an unreferenced node was due: never before its last release, nor after the end of its last hold."""
    if node.deadline_us:
        due_us = min(due_us, node.deadline_us)
    return max(due_us, node.released_us)


def split_windows(node: Node, position: int) -> tuple[tuple[Blocks, ...], tuple[Blocks, ...]]:
    """Split windows at `position`: they end with the run, so the head gets what reaches below it and the tail the
    rest.
    """
    heads: list[Blocks] = []
    tails: list[Blocks] = []
    for window in node.windows:
        below = max(0, len(window) - (node.length - position))
        heads.append(window[:below])
        tails.append(window[below:])
    return tuple(heads), tuple(tails)
