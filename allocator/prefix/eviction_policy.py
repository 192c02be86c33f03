"""The eviction order of cached nodes: one queue for each account, leaves before their parents.

A queue is a set of levels, each a linked list from oldest to newest. A policy only says which level a node belongs to;
every operation is constant time, nothing is scanned and nothing is resized (docs/build/adr/0002-prefix-index.md).

    queue = EvictionQueue(Lru())
    queue.add(leaf); queue.add(parent, leaf)      # a released path, leaf first
    victim = queue.front()                        # the leaf to evict next

- Only a node without children is evicted, from its tail; no policy and no priority overrides that.
- Within a level the oldest use goes first. Releasing a path enters the leaf before its parent, at a level no higher.
- A retention duration starts when a node becomes CACHED and only demotes to the default priority when it lapses. It
  never extends a deadline, and a node stays at the level of its highest child, so leaves still go first.
- A policy with a protected share has no more of the cached blocks above level 0 when victims are chosen.
- Nodes wait for their demotion in a heap of at most twice the nodes that wait, plus a constant.
"""

from __future__ import annotations

import heapq
from collections.abc import Set as AbstractSet
from fractions import Fraction
from math import log2
from typing import Protocol

from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.prefix.block_priority import DEFAULT_PRIORITY
from kvcustody.allocator.prefix.node import Node
from kvcustody.allocator.prefix.think_times import ThinkTimes


class EvictionPolicy(Protocol):
    """Chooses the level of a node that becomes CACHED; nodes of the lowest level are evicted first."""

    name: str
    by_birth: bool
    by_priority: bool

    def level(self, node: Node) -> int:
        """Return the present level of `node`."""

    def evicted(self, node: Node) -> None:
        """Take note of an eviction, for policies that age."""


class ReuseListener(Protocol):
    """Additional methods of a policy that learns from when blocks are used again."""

    def kept(self, node: Node) -> None:
        """Note that `node` becomes CACHED, before its level is computed."""

    def reused(self, node: Node, now_us: int) -> None:
        """Note that `node`, CACHED since `released_us`, is attached, before it leaves the order."""


class Lru:
    """Least recently used."""

    name = "lru"
    by_birth = False
    by_priority = False

    def level(self, node: Node) -> int:
        """Return the only level: recency decides."""
        return 0

    def evicted(self, node: Node) -> None:
        """Ignore it: nothing ages."""


class Fifo(Lru):
    """First in, first out, by birth. A prefix counts as young as its youngest continuation."""

    name = "fifo"
    by_birth = True


class Lfu(Lru):
    """Least frequently used, then least recently."""

    name = "lfu"

    def level(self, node: Node) -> int:
        """Return the number of times later requests attached the node, up to 255."""
        return min(node.hits, 255)


class SegmentedLru(Lru):
    """Probation for nodes that were never re-used `protect_hits` times, protection for the rest (SGLang: 2).

    At most `protected` of an account's cached blocks keep their protection: what is over, the oldest first, goes back
    on probation as its newest. Karedla, Love and Wherry, "Caching strategies to improve disk system performance", 1994.
    """

    name = "slru"

    def __init__(self, protect_hits: int = 2, protected: Fraction | None = None) -> None:
        self.protect_hits = protect_hits
        self.protected = protected  # None: all of them

    def level(self, node: Node) -> int:
        """Return 0 on probation, 1 if protected."""
        return int(node.hits >= self.protect_hits)


class Priority(Lru):
    """Priorities 0–100 as in TensorRT-LLM's retention config: lowest first, then least recently used."""

    name = "priority"
    by_priority = True

    def __init__(self, base: int = DEFAULT_PRIORITY) -> None:
        self.base = base  # of what no range names, and of a range whose duration is over

    def level(self, node: Node) -> int:
        """Return the node's priority."""
        return node.priority


class CostAware(Lru):
    """Greedy-dual: the cost of computing the node again, times how often it was wanted, plus age.

    Recomputing a block costs its own projections plus attention over everything before it, so the cost of a block
    grows with its depth; `attention_depth` is the depth in blocks at which the two are equal. Kinds of content enter
    through the priority (35 is neutral). Cao and Irani, "Cost-aware WWW proxy caching algorithms", 1997.
    """

    name = "cost"
    by_priority = True

    def __init__(self, attention_depth: int = 512, base: int = DEFAULT_PRIORITY) -> None:
        self.attention_depth = attention_depth
        self.base = base
        self._clock = 0

    def level(self, node: Node) -> int:
        """Return the clock plus the value of the node: cost × wanted × kind, in quarter powers of two."""
        cost = 1 + (node.depth + node.length / 2) / self.attention_depth
        value = cost * (1 + node.hits) * (1 + node.priority) / (1 + DEFAULT_PRIORITY)
        return self._clock + int(16 * value).bit_length() * 4

    def evicted(self, node: Node) -> None:
        """Age: entries from now on are worth at least as much as the evicted node."""
        self._clock = max(self._clock, node.level)


SIGNALS = ("next-turn", "scope", "freshness", "pressure", "reuse", "position")
_MIDDLE = 32  # points of a block of which nothing is said
_STALE_POINTS = 8
_WANTED = 15  # uses
_YOUNG_US = 60_000_000  # a victim that was used since is young, where no think time is known


class ValueAware(Lru):
    """Greedy-dual on the product of the signals that an administrator selects.

    Each signal multiplies a block's value, so it adds points, quarter powers of two; kinds of content enter through
    the priority, as with `cost`. The points come on top of the level of what was last given up, so a factor of two
    counts as a use an eighth of the cache's turnover later. Without `pressure` it always ranks; with it, only while
    what is given up is young: otherwise the least recently used goes first. Cao and Irani, "Cost-aware WWW proxy
    caching algorithms", 1997.
    """

    name = "value"
    by_priority = True

    def __init__(
        self,
        signals: AbstractSet[str] = frozenset(SIGNALS),
        *,
        base: int = DEFAULT_PRIORITY,
        attention_depth: int = 512,
        think_times: ThinkTimes | None = None,
    ) -> None:
        self.base = base
        self.attention_depth = attention_depth
        self.think_times = ThinkTimes() if think_times is None else think_times
        self._next_turn, self._scope, self._freshness, self._pressure, self._reuse, self._position = (
            signal in signals for signal in SIGNALS
        )
        self._clock = 0
        self._now_us = 0
        self._lifetime_us: int | None = None  # how long ago what is given up was used; None: nothing was

    def kept(self, node: Node) -> None:
        """Count blocks that may return."""
        self.think_times.kept(node.pause_us, node.length)

    def reused(self, node: Node, now_us: int) -> None:
        """Learn the length of the pause, which predicts the next one."""
        pause_us = max(1, now_us - node.released_us)
        self.think_times.returned(node.pause_us, node.length, pause_us)
        node.pause_us = pause_us

    def level(self, node: Node) -> int:
        """Return the clock plus the points of the node."""
        self._now_us = max(self._now_us, node.released_us)
        points = _MIDDLE
        if self.is_ranking:
            points += _points((1 + node.priority) / (1 + DEFAULT_PRIORITY))
            if self._next_turn and self._lifetime_us is not None:
                points += self.think_times.odds_points(node.pause_us, self._lifetime_us)
            if self._scope:
                points += 4 * (node.domain.reach - 1)
            if self._freshness:
                points += _fresh_points(node)
            if self._reuse:
                points += _points(1 + min(node.hits, _WANTED))
            if self._position:
                points += 4 * (1 + node.depth // self.attention_depth).bit_length() - 4
        return self._clock + max(0, points)

    @property
    def is_ranking(self) -> bool:
        """Whether the signals count now: always, or only while long pauses take at least a fourth of the cache's
        lifetime.
        """
        if not self._pressure:
            return True
        if self._lifetime_us is None:
            return False
        long_us = self.think_times.long_pause_us()
        return self._lifetime_us < (_YOUNG_US if long_us is None else 4 * long_us)

    def evicted(self, node: Node) -> None:
        """Age, as with `cost`, and learn how long entries last."""
        self._clock = max(self._clock, node.level - _MIDDLE // 2)
        age_us = max(0, self._now_us - node.released_us)
        known = self._lifetime_us
        self._lifetime_us = age_us if known is None else known + (age_us - known) // 16


def _points(factor: float) -> int:
    return round(4 * log2(factor))


def _fresh_points(node: Node) -> int:
    """What is left of its absolute time, as a share of all of it: 0 when new, -8 below a fourth."""
    if node.ceiling_us >= NEVER_US:
        return 0
    left = (node.ceiling_us - node.released_us) / max(1, node.ceiling_us - node.born_us)
    return max(-_STALE_POINTS, _points(left)) if left > 0 else -_STALE_POINTS


def reuse_listener(policy: EvictionPolicy) -> ReuseListener | None:
    """Return the policy if it learns from when blocks are used again."""
    return policy if isinstance(policy, ValueAware) else None


def base_priority(policy: EvictionPolicy) -> int:
    """Return the priority that remains when a duration is over."""
    return int(getattr(policy, "base", DEFAULT_PRIORITY))


def head_start_us(policy: EvictionPolicy) -> float | None:
    """Return the head start of uses above level 0 over level 0; None: a higher level always wins."""
    found: float | None = getattr(policy, "head_start_us", None)
    return found


def protected_blocks_max(policy: EvictionPolicy, cached_blocks: int) -> int | None:
    """Return how many of so many cached blocks may be above level 0; None: all, for a policy without `protected`."""
    share: Fraction | None = getattr(policy, "protected", None)
    return None if share is None else int(share * cached_blocks)


POLICIES = {policy.name: policy for policy in (Lru, Fifo, Lfu, SegmentedLru, Priority, CostAware, ValueAware)}


class _Level:
    """A circular list; `newer` is the oldest node and `older` the newest one."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.newer: Node | _Level = self
        self.older: Node | _Level = self


class EvictionQueue:
    """The CACHED nodes of one account in eviction order."""

    __slots__ = (
        "_base",
        "_demotions",
        "_levels",
        "_order",
        "_protected",
        "_serial",
        "_waiting",
        "listener",
        "policy",
    )

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.listener = reuse_listener(policy)
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # heap of the levels that exist
        self._demotions: list[tuple[int, int, Node]] = []  # heap by time; an entry may be out of date
        self._serial = 0
        self._waiting = 0  # queued nodes whose demotion is to come
        self._base = base_priority(policy)
        self._protected = 0  # blocks above level 0

    def add(self, node: Node, child: Node | None = None, now_us: int = 0) -> None:
        """Add `node` as the newest of its level, which is at least that of `child`, the path's next node."""
        policy = self.policy
        if self.listener is not None:
            self.listener.kept(node)
        wanted = policy.level(node)
        if child is not None and wanted < child.level:
            wanted = child.level
        if node.demote_us and policy.by_priority and node.priority > self._base:
            self._wait(node, now_us + node.demote_us)
        node.level = wanted
        if wanted > 0:
            self._protected += node.block_count
        before: Node | _Level = self._level(wanted).older
        if policy.by_birth:
            youngest = 0 if node.first_child is None else node.rank_us
            node.rank_us = max(node.born_us, youngest, 0 if child is None else child.rank_us)
            while isinstance(before, Node) and before.rank_us > node.rank_us:
                assert before.older is not None
                before = before.older
        _link(node, before)

    def insert_after(self, node: Node, before: Node) -> None:
        """Add `node` just newer than `before`, at its level (a split: the head follows its tail)."""
        node.level, node.rank_us = before.level, before.rank_us
        if before.demote_at_us:
            self._wait(node, before.demote_at_us)
        _link(node, before)

    def remove(self, node: Node) -> None:
        """Remove `node`; constant time."""
        if node.demote_at_us:
            node.demote_at_us = 0
            self._waiting -= 1
        if node.level > 0:
            self._protected -= node.block_count
        older, newer = node.older, node.newer
        assert older is not None and newer is not None, "node is not queued"
        older.newer = newer
        newer.older = older
        node.older = node.newer = None

    def trimmed(self, node: Node, blocks: int) -> None:
        """Record that `blocks` of a queued node have ended."""
        if node.level > 0:
            self._protected -= blocks

    def front(self) -> Node | None:
        """Return the node to evict first: the oldest of the lowest level, or its deepest descendant."""
        order, levels = self._order, self._levels
        while order:
            level = levels[order[0]]
            node = level.newer
            if node is level:
                del levels[heapq.heappop(order)]
                continue
            assert isinstance(node, Node)
            below = self._below(node, order[0])
            if below is not None:
                return below
        return None

    def _below(self, node: Node, level: int) -> Node | None:
        """Return the leaf to evict for `node`, or None if one below is above `level`; its parent then joins it
        there.
        """
        child = node.first_child
        while child is not None:
            if child.level > level and child.domain.owner is node.domain.owner:
                self._relevel(node, child.level)
                return None
            node, child = child, child.first_child
        return node

    # -- demotion -----------------------------------------------------------------------------------------------------

    def demote(self, now_us: int) -> None:
        """Move nodes whose durations have lapsed to the default priority. Call it before victims are chosen."""
        heap = self._demotions
        while heap and heap[0][0] <= now_us:
            due, _, node = heapq.heappop(heap)
            if node.demote_at_us != due:
                continue  # attached, ended or released again since
            node.demote_at_us = node.demote_us = 0
            self._waiting -= 1
            node.priority = self._base
            self.lower(node)

    def bound_protected(self, cached_blocks: int) -> None:
        """Move nodes beyond the protected share to probation. Call it before victims are chosen."""
        most = protected_blocks_max(self.policy, cached_blocks)
        while most is not None and self._protected > most:
            lowest = min(wanted for wanted, level in self._levels.items() if wanted > 0 and level.newer is not level)
            oldest = self._levels[lowest].newer
            assert isinstance(oldest, Node)
            self._relevel(oldest, 0)

    def lower(self, node: Node) -> None:
        """Let a queued node sink to its own level, after it was demoted or lost the child that kept it up."""
        wanted = self.policy.level(node)
        if wanted < node.level:
            self._relevel(node, wanted)

    def _relevel(self, node: Node, wanted: int) -> None:
        older, newer = node.older, node.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        self._protected += node.block_count * ((wanted > 0) - (node.level > 0))
        node.level = wanted
        _link(node, self._level(wanted).older)

    def _level(self, wanted: int) -> _Level:
        level = self._levels.get(wanted)
        if level is None:
            level = self._levels[wanted] = _Level()
            heapq.heappush(self._order, wanted)
        return level

    def _wait(self, node: Node, due_us: int) -> None:
        heap = self._demotions
        if len(heap) > 2 * self._waiting + 64:
            heap[:] = [entry for entry in heap if entry[2].demote_at_us == entry[0]]
            heapq.heapify(heap)
        node.demote_at_us = due_us
        self._serial += 1
        self._waiting += 1
        heapq.heappush(heap, (due_us, self._serial, node))


def _link(node: Node, before: Node | _Level) -> None:
    after = before.newer
    node.older, node.newer = before, after  # type: ignore[assignment]
    before.newer = node
    after.older = node  # type: ignore[union-attr]
