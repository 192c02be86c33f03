"""The eviction order of an external pool's CACHED blocks under an `EvictionPolicy`: the counterpart of its queue.

    ranking = BlockRanking(pool, lambda: SegmentedLru(2))
    ranking.handed_out(blocks); ranking.attached(blocks); ranking.published(blocks, before)
    ranking.cached(blocks, now_us)                             # they have no reference left
    victims = ranking.victims(account, candidates, 256, now_us)

A block has a level and an age. The policy sets the level when the block becomes CACHED; the age is the block's last
use, or its birth. Blocks of the lowest level are evicted first, and within a level the oldest; among blocks of equal
age, the deepest goes first. The policy is asked once for each run of one chain whose blocks were used alike, never for
each block. A whole batch of victims is ordered at once.

- A parent stands no lower than any child, so the victims of one order are closed under descendants: children first.
- A block that has lost the children that raised its level returns to its own level.
- Each account has its own policy, so one account's use does not change how another account's ages rank.
- Two kinds of block are demoted before an order is made: those whose priority has expired, and those that overflow the
  protected share. A demoted block enters its new level as the newest. Both work as in `EvictionQueue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import Account, Domain, PoolPartition
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.prefix.block_priority import DEFAULT_PRIORITY, BlockPriority
from kvcustody.allocator.prefix.eviction_policy import (
    EvictionPolicy,
    base_priority,
    head_start_us,
    protected_blocks_max,
    reuse_listener,
)
from kvcustody.allocator.prefix.node import Node

_LOWEST = -(1 << 62)


class RankedPool(Protocol):
    """The part of the pool that ranking reads."""

    blocks: int
    parent: NDArray[np.int64]
    children: NDArray[np.int32]
    tag: NDArray[np.int32]
    refs: NDArray[np.int32]
    born_us: NDArray[np.int64]
    used: NDArray[np.int64]
    released_us: NDArray[np.int64]
    ceiling_us: NDArray[np.int64]
    domains: dict[int, Domain]

    def tick(self, uses: int, /) -> int:
        """Return the first of `count` new use numbers; all are greater than every earlier one."""


class BlockRanking:
    """The ranks of one pool's blocks. Arrays have one row for each block; `now_us` is always passed in."""

    def __init__(self, pool: RankedPool, make: Callable[[], EvictionPolicy]) -> None:
        count = pool.blocks
        self._pool = pool
        self._make = make
        sample = make()
        self.by_birth, self.by_priority = sample.by_birth, sample.by_priority
        self._learns = reuse_listener(sample) is not None
        self.base = base_priority(sample)
        self.hits: NDArray[np.int32] = np.zeros(count, dtype=np.int32)  # attached so often by later requests
        self.depth: NDArray[np.int32] = np.zeros(count, dtype=np.int32)  # in its prompt
        self.priority: NDArray[np.int32] = np.full(count, DEFAULT_PRIORITY, dtype=np.int32)
        self.demote_us: NDArray[np.int64] = np.zeros(count, dtype=np.int64)  # 0: the priority never lapses
        self.demote_at_us: NDArray[np.int64] = np.zeros(count, dtype=np.int64)  # 0: not waiting
        self.pause_us: NDArray[np.int64] = np.zeros(count, dtype=np.int64)  # before its last use; 0: unknown
        self.level: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self.age: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        # the highest that stood on it, while any child is left
        self._floor_level: NDArray[np.int64] = np.full(count, _LOWEST, dtype=np.int64)
        self._floor_age: NDArray[np.int64] = np.full(count, _LOWEST, dtype=np.int64)
        self._raised: NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self._policies: dict[Account, EvictionPolicy] = {}

    def forget_account(self, account: Account) -> None:
        """Forget an account that has no block left."""
        self._policies.pop(account, None)

    def out_of_order(self, cached: Blocks) -> Blocks:
        """Return the CACHED blocks that rank above the block they continue; always none."""
        parents = self._pool.parent[cached]
        has = np.isin(parents, cached)
        blocks, parents = cached[has], parents[has]
        level, under = self.level[blocks], self.level[parents]
        above: Blocks = blocks[(level > under) | ((level == under) & (self.age[blocks] > self.age[parents]))]
        return above

    # -- what happens to blocks ---------------------------------------------------------------------------------------

    def handed_out(self, blocks: Blocks) -> None:
        """Reset the ranks of newly handed-out blocks: nothing counts from their previous use."""
        self.hits[blocks] = 0
        self.depth[blocks] = 0
        self.priority[blocks] = DEFAULT_PRIORITY
        self.demote_us[blocks] = 0
        self.pause_us[blocks] = 0
        self._drop_floor(blocks)

    def attached(self, blocks: Blocks, now_us: int) -> None:
        """Record that a later request uses these blocks; it holds the only reference on those that were CACHED."""
        if self._learns:
            self._learn(blocks[self._pool.refs[blocks] == 1], now_us)
        self.hits[blocks] += 1
        self.demote_at_us[blocks] = 0

    def _learn(self, blocks: Blocks, now_us: int) -> None:
        for first, last in reversed(list(self._runs(blocks, self._pool.released_us[blocks]))):
            node = self._node(blocks[first:last])
            listener = reuse_listener(self._policy(node.domain.owner))
            assert listener is not None
            listener.reused(node, now_us)
            self.pause_us[blocks[first:last]] = node.pause_us

    def published(self, blocks: Blocks, before: int, depths: Sequence[int] | None = None) -> None:
        """Record that these blocks are indexed. `depths`: their places in the prompt, unless each directly follows
        `before`.
        """
        if depths is not None:
            self.depth[blocks] = depths
        else:
            first = 0 if before < 0 else int(self.depth[before]) + 1
            self.depth[blocks] = np.arange(first, first + len(blocks))

    def published_each(self, blocks: Sequence[int], before: Sequence[int]) -> None:
        """Record `published` for single blocks; one may continue another of the same call."""
        depth = self.depth
        for block, parent in zip(blocks, before, strict=True):
            depth[block] = depth[parent] + 1 if parent >= 0 else 0

    def prioritise(self, blocks: Blocks, ranges: Sequence[BlockPriority]) -> None:
        """Give the blocks that a request wrote the priorities from the policy."""
        depth = self.depth[blocks]
        at = np.searchsorted(np.array([each.first for each in ranges]), depth, "right") - 1
        inside = at >= 0
        inside[inside] = depth[inside] < np.array([each.last for each in ranges])[at[inside]]
        chosen, at = blocks[inside], at[inside]
        self.priority[chosen] = np.array([each.priority for each in ranges])[at]
        self.demote_us[chosen] = np.array([each.duration_us for each in ranges])[at]

    def cached(self, blocks: Blocks, now_us: int) -> None:
        """Enter blocks that lost their last reference together into the order, the deepest first."""
        depth = self.depth[blocks]
        if (depth[1:] < depth[:-1]).any():  # several layer groups
            blocks = blocks[np.argsort(depth, kind="stable")]
        own = self._own_levels(blocks, are_new=True)
        age = self._pool.born_us[blocks] if self.by_birth else self._pool.used[blocks]
        level = _highest_below(np.maximum(own, self._floor_level[blocks]))
        age = _highest_below(np.maximum(age, self._floor_age[blocks]))
        self.level[blocks], self.age[blocks] = level, age
        self._raised[blocks] = level > own
        self._stand_on_parents(blocks)
        if self.by_priority:
            waits = (self.demote_us[blocks] > 0) & (self.priority[blocks] > self.base)
            self.demote_at_us[blocks] = np.where(waits, now_us + self.demote_us[blocks], 0)

    def _stand_on_parents(self, blocks: Blocks) -> None:
        parents = self._pool.parent[blocks]
        has = parents >= 0
        parents, standing = parents[has], blocks[has]
        np.maximum.at(self._floor_level, parents, self.level[standing])
        np.maximum.at(self._floor_age, parents, self.age[standing])

    def childless(self, parents: Blocks) -> None:
        """Let blocks that lost their last child sink to their own level, as its newest: nothing keeps them up any
        more.
        """
        self._drop_floor(parents)
        for parent in parents[self._raised[parents]].tolist():
            self._sink(parent)

    def _sink(self, block: int) -> None:
        """And with it what only it has kept up, as far as that is one chain."""
        parents, children, raised = self._pool.parent, self._pool.children, self._raised
        up: list[int] = []
        while block >= 0 and raised[block] and (not up or children[block] == 1):
            up.append(block)
            block = int(parents[block])
        chain = np.array(up[::-1], dtype=np.int64)
        own = self._own_levels(chain)
        level = _highest_below(own)
        sinks = level < self.level[chain]
        chain, level, own = chain[sinks], level[sinks], own[sinks]
        if not len(chain):
            return
        self._drop_floor(chain)
        self.level[chain], self._raised[chain] = level, level > own
        self.age[chain] = self._newest(chain)
        self._lift_parents(chain)

    def _drop_floor(self, blocks: Blocks) -> None:
        self._floor_level[blocks] = _LOWEST
        self._floor_age[blocks] = _LOWEST

    # -- the policy ---------------------------------------------------------------------------------------------------

    def _policy(self, account: Account) -> EvictionPolicy:
        policy = self._policies.get(account)
        if policy is None:
            policy = self._policies[account] = self._make()
        return policy

    def _own_levels(self, blocks: Blocks, *, are_new: bool = False) -> NDArray[np.int64]:
        levels = np.empty(len(blocks), dtype=np.int64)
        more = (
            (self.pause_us[blocks], self._pool.ceiling_us[blocks], self._pool.released_us[blocks])
            if self._learns
            else ()
        )
        runs = list(self._runs(blocks, *more))
        for first, last in reversed(runs) if self._learns else runs:  # as our own tree enters a path
            node = self._node(blocks[first:last])
            policy = self._policy(node.domain.owner)
            if are_new and (listener := reuse_listener(policy)) is not None:
                listener.kept(node)
            levels[first:last] = policy.level(node)
        return levels

    def _runs(self, blocks: Blocks, *more: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """[first, last) of each stretch of one chain that was used alike, and has the same of `more`."""
        depth, tag = self.depth[blocks], self._pool.tag[blocks]
        step = depth[1:] - depth[:-1]
        cut = (step != 0) & (step != 1)
        rows: tuple[NDArray[np.integer[Any]], ...] = (
            self.hits[blocks],
            self.priority[blocks],
            self.demote_us[blocks],
            tag,
            *more,
        )
        for row in rows:
            cut |= row[1:] != row[:-1]
        edges = [0, *(np.flatnonzero(cut) + 1).tolist(), len(blocks)]
        return pairwise(edges)

    def _node(self, blocks: Blocks) -> Node:
        """Return a run as the node that a policy expects; it belongs to no tree and has no keys."""
        pool, first, last = self._pool, int(blocks[0]), int(blocks[-1])
        depth = int(self.depth[first])
        node = Node(
            pool.domains[int(pool.tag[first])],
            None,
            depth,
            depth,
            blocks,
            int(self.depth[last]) - depth + 1,
        )
        node.hits = int(self.hits[first])
        node.priority = int(self.priority[first])
        node.demote_us = int(self.demote_us[first])
        node.born_us = int(pool.born_us[first])
        node.used_us = node.released_us = int(pool.released_us[first])
        node.ceiling_us = int(pool.ceiling_us[last])
        node.pause_us = int(self.pause_us[first])
        node.level = int(self.level[last])
        return node

    # -- victims ------------------------------------------------------------------------------------------------------

    def victims(self, account: Account, candidates: Blocks, count: int, now_us: int) -> Blocks:
        """Return the first `count` of `candidates`, CACHED blocks of `account`, in the order in which they are
        evicted.
        """
        if self.by_priority:
            self._demote(candidates, now_us)
        policy = self._policy(account)
        bound = protected_blocks_max(policy, len(candidates))
        if bound is not None:
            self._bound_protected(candidates, bound)
        level, age = self.level, self.age
        head_start = head_start_us(policy)
        if head_start is not None:
            age = self._pool.released_us + np.where(level > 0, int(head_start), 0)
            level = np.zeros_like(level)
        chosen = candidates
        if len(candidates) > count:
            chosen = _lowest(candidates, level[candidates], count)
            if len(chosen) > count:  # those of the highest level among them by age
                top = level[chosen] == level[chosen].max()
                below, tied = chosen[~top], chosen[top]
                chosen = np.concatenate((below, _lowest(tied, age[tied], count - len(below))))
        return self._in_order(chosen, level, age)[:count]

    def evicted(self, victims: Blocks) -> None:
        """Tell the policies which runs were evicted."""
        up = victims[::-1]
        for first, last in reversed(list(self._runs(up, self.level[up], self._pool.used[up]))):
            node = self._node(up[first:last])
            self._policy(node.domain.owner).evicted(node)

    def _in_order(self, blocks: Blocks, level: NDArray[np.int64], age: NDArray[np.int64]) -> Blocks:
        ordered: Blocks = blocks[np.lexsort((-self.depth[blocks], self._pool.used[blocks], age[blocks], level[blocks]))]
        return ordered

    def _demote(self, candidates: Blocks, now_us: int) -> None:
        due_us = self.demote_at_us[candidates]
        due = candidates[(due_us > 0) & (due_us <= now_us)]
        if not len(due):
            return
        due = due[np.lexsort((self.depth[due], self._pool.used[due], self.demote_at_us[due]))]
        age = self._newest(due, self.demote_at_us[due], self._pool.used[due])
        self.priority[due] = self.base
        self.demote_us[due] = self.demote_at_us[due] = 0
        self.age[due] = age
        lower = np.union1d(due, candidates[self._raised[candidates]])  # and what the demoted have kept up
        self._drop_floor(lower)
        self._raised[lower] = False
        self.level[lower] = self._own_levels(lower)
        on_them = candidates[np.isin(self._pool.parent[candidates], lower)]
        self._lift_parents(np.union1d(on_them, lower))

    def _lift_parents(self, children: Blocks) -> None:
        """What these stand on is no lower than they are; in waves, as many as their chain is deep at most."""
        while len(children):
            self._stand_on_parents(children)
            parents = self._pool.parent[children]
            parents = np.unique(parents[parents >= 0])
            level = np.maximum(self.level[parents], self._floor_level[parents])
            age = np.maximum(self.age[parents], self._floor_age[parents])
            raised = level > self.level[parents]
            children = parents[raised | (age > self.age[parents])]
            self._raised[parents[raised]] = True
            self.level[parents], self.age[parents] = level, age

    def _bound_protected(self, candidates: Blocks, bound: int) -> None:
        """The oldest protected go on probation as its newest; their children, older or as old, go before them."""
        protected = candidates[self.level[candidates] > 0]
        over = len(protected) - bound
        if over <= 0:
            return
        demoted = self._in_order(protected, self.level, self.age)[:over]
        self.level[demoted] = 0
        self.age[demoted] = self._newest(demoted, self.age[demoted], self._pool.used[demoted])
        self._drop_floor(demoted)
        self._lift_parents(demoted)

    def _newest(self, blocks: Blocks, *keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ages newer than any, one for each stretch of equal keys."""
        if self.by_birth:
            return self._pool.born_us[blocks]
        changed = np.zeros(len(blocks), dtype=np.int64)
        for row in keys:
            changed[1:] |= row[1:] != row[:-1]
        steps = np.cumsum(changed)
        ages: NDArray[np.int64] = self._pool.tick(int(steps[-1]) + 1) + steps
        return ages


def _highest_below(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each block of a path from root to leaf, the highest among it and what continues it."""
    highest: NDArray[np.int64] = np.maximum.accumulate(values[::-1])[::-1]
    return highest


def _lowest(blocks: Blocks, keys: NDArray[np.int64], count: int) -> Blocks:
    """Blocks with the `count` lowest keys, and all that tie with the last of them."""
    if len(blocks) <= count:
        return blocks
    lowest: Blocks = blocks[keys <= np.partition(keys, count - 1)[count - 1]]
    return lowest


def ranked_sample() -> Node:
    """Return a run in the form that policies expect, with every field that one of them needs."""
    account = Account("sample", PoolPartition(0, 1, 0, 0))
    blocks: Blocks = np.zeros(1, dtype=np.int64)
    return Node(Domain(0, account), None, 0, 0, blocks, 1)
