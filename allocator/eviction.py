"""Which cached node goes first: one queue per account, filled leaf before parent.

A queue is a set of levels, each a linked list from oldest to newest. A policy only says which level a node belongs to;
every operation is constant time, nothing is scanned and nothing is resized (ADR 0002).

E1  Only a node without children is evicted, from its tail; no policy and no priority overrides that.
E2  Within a level the oldest use goes first. Releasing a path enters the leaf before its parent, at a level no higher.
E3  A retention duration only demotes to the default priority when it lapses; it never extends a deadline.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from kvcustody.allocator.node import Node

DEFAULT_PRIORITY = 35  # as TensorRT-LLM's KvCacheRetentionConfig


class EvictionPolicy(Protocol):
    """Chooses the level of a node that becomes CACHED; the lowest level is evicted first."""

    name: str
    by_birth: bool

    def level(self, node: Node) -> int:
        """The level `node` belongs to now."""

    def evicted(self, node: Node) -> None:
        """Told of each eviction, for policies that age."""


class Lru:
    """Least recently used."""

    name = "lru"
    by_birth = False

    def level(self, node: Node) -> int:
        """One level: recency alone decides."""
        return 0

    def evicted(self, node: Node) -> None:
        """Nothing ages."""


class Fifo(Lru):
    """First in, first out: by birth, where a prefix counts as young as its youngest continuation (E1)."""

    name = "fifo"
    by_birth = True


class Lfu(Lru):
    """Least frequently used, then least recently."""

    name = "lfu"

    def level(self, node: Node) -> int:
        """The number of times later requests attached the node, up to 255."""
        return min(node.hits, 255)


class SegmentedLru(Lru):
    """Probation for nodes that were never re-used `protect_hits` times, protection for the rest (SGLang: 2)."""

    name = "slru"

    def __init__(self, protect_hits: int = 2) -> None:
        self.protect_hits = protect_hits

    def level(self, node: Node) -> int:
        """0 on probation, 1 protected."""
        return int(node.hits >= self.protect_hits)


class Priority(Lru):
    """Priorities 0–100 as TensorRT-LLM's retention config: lowest first, then least recently used."""

    name = "priority"

    def level(self, node: Node) -> int:
        """The node's priority."""
        return node.priority


class CostAware(Lru):
    """Greedy-dual: what it would cost to compute the node again, times how often it was wanted, plus age.

    Recomputing a block costs its own projections plus attention over everything before it, so the cost of a block
    grows with its depth; `attention_depth` is the depth in blocks at which the two are equal. Kinds of content enter
    through the priority (35 is neutral). Cao and Irani, "Cost-aware WWW proxy caching algorithms", 1997.
    """

    name = "cost"

    def __init__(self, attention_depth: int = 512) -> None:
        self.attention_depth = attention_depth
        self._clock = 0

    def level(self, node: Node) -> int:
        """The clock plus the value of the node: cost × wanted × kind, in quarter powers of two."""
        cost = 1 + (node.depth + node.length / 2) / self.attention_depth
        value = cost * (1 + node.hits) * (1 + node.priority) / (1 + DEFAULT_PRIORITY)
        return self._clock + int(16 * value).bit_length() * 4

    def evicted(self, node: Node) -> None:
        """Ageing: whatever enters from now on is worth at least what was just given up."""
        self._clock = max(self._clock, node.level)


POLICIES = {policy.name: policy for policy in (Lru, Fifo, Lfu, SegmentedLru, Priority, CostAware)}


class _Level:
    """A circular list; `newer` is the oldest node and `older` the newest one."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.newer: Node | _Level = self
        self.older: Node | _Level = self


class EvictionQueue:
    """The CACHED nodes of one account in the order they will be given up."""

    __slots__ = ("_levels", "_order", "policy")

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # heap of the levels that exist

    def add(self, node: Node, child: Node | None = None) -> None:
        """Enter `node` as the newest of its level, which is at least that of `child`, the path's next node (E2)."""
        policy = self.policy
        wanted = policy.level(node)
        if child is not None and wanted < child.level:
            wanted = child.level
        level = self._levels.get(wanted)
        if level is None:
            level = self._levels[wanted] = _Level()
            heapq.heappush(self._order, wanted)
        node.level = wanted
        before: Node | _Level = level.older
        if policy.by_birth:
            node.rank_us = node.born_us if child is None else max(node.born_us, child.rank_us)
            while isinstance(before, Node) and before.rank_us > node.rank_us:
                assert before.older is not None
                before = before.older
        _link(node, before)

    def insert_after(self, node: Node, before: Node) -> None:
        """Enter `node` just newer than `before`, at its level (a split: the head follows its tail)."""
        node.level, node.rank_us = before.level, before.rank_us
        _link(node, before)

    @staticmethod
    def remove(node: Node) -> None:
        """Take `node` out; constant time."""
        older, newer = node.older, node.newer
        assert older is not None and newer is not None, "node is not queued"
        older.newer = newer
        newer.older = older
        node.older = node.newer = None

    def front(self) -> Node | None:
        """The node to give up first: the oldest of the lowest level, or its deepest descendant (E1)."""
        order, levels = self._order, self._levels
        while order:
            level = levels[order[0]]
            node = level.newer
            if node is level:
                del levels[heapq.heappop(order)]
                continue
            assert isinstance(node, Node)
            while node.first_child is not None:
                node = node.first_child
            return node
        return None


def _link(node: Node, before: Node | _Level) -> None:
    after = before.newer
    node.older, node.newer = before, after  # type: ignore[assignment]
    before.newer = node
    after.older = node  # type: ignore[union-attr]
