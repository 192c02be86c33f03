"""An engine behind the port whose cache is ranked by an eviction policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.pool.block_state import CACHED
from kvcustody.allocator.prefix.block_priority import BlockPriority
from kvcustody.allocator.prefix.eviction_policy import (
    EvictionPolicy,
)
from standins.allocator.world import MINUTE, SIZE

Key = tuple[str, tuple[int, ...]]
HOUR = 60 * MINUTE


class Engine:
    """The least of an engine that allocates by itself: an index by prefix, and a free list."""

    def __init__(self, blocks: int, policy: Callable[[], EvictionPolicy], tenants: tuple[str, ...] = ("a",)) -> None:
        self.pool = ExternalPool(blocks)
        self.pool.rank_by(policy)
        self.now = 1
        self.index: dict[Key, int] = {}
        self.free = list(range(blocks))
        self.domains = {
            name: self.pool.domain(self.pool.account(name), idle_us=HOUR, absolute_us=HOUR) for name in tenants
        }
        self.victims: list[Key] = []
        self._requests = 0

    def keys(self, tenant: str, tokens: list[int]) -> list[Key]:
        return [(tenant, tuple(tokens[: SIZE * at])) for at in range(1, len(tokens) // SIZE + 1)]

    def hit(self, tenant: str, tokens: list[int]) -> int:
        keys = self.keys(tenant, tokens)
        return next((at for at, key in enumerate(keys) if key not in self.index), len(keys))

    def cache(self, tenant: str, tokens: list[int], priorities: tuple[BlockPriority, ...] = ()) -> int:
        """One whole request; returns its hit in blocks."""
        domain, keys, hit = self.domains[tenant], self.keys(tenant, tokens), self.hit(tenant, tokens)
        self._requests += 1
        residency = self.pool.residency(domain.owner, domain, None, None, self._requests, self.now)
        residency.priorities = priorities
        cached = np.array([self.index[key] for key in keys[:hit]], dtype=np.int64)
        if hit:
            assert self.pool.attachable(cached, domain.tag, self.now) == hit
            self.pool.attach(residency, cached, self.now)
        self.make_room(len(keys) - hit, tenant)
        new = [self.free.pop(0) for _ in keys[hit:]]
        if new:
            self.pool.hand_out(residency, np.array(new), domain, self.now)
            self.pool.publish(np.array(new), int(cached[-1]) if hit else -1)
            self.index.update(zip(keys[hit:], new, strict=True))
        self.forget(self.pool.release(residency, "finished", self.now))
        self.check()
        return hit

    def check(self) -> None:
        if self.pool.ranking is not None:
            assert not len(self.pool.ranking.out_of_order(np.flatnonzero(self.pool.state == CACHED)))

    def make_room(self, count: int, tenant: str) -> None:
        if count > len(self.free):
            self.evict(count - len(self.free), tenant)

    def evict(self, count: int, tenant: str = "a") -> None:
        """As an engine does: the policy's victims or, where there is none, the least recently used."""
        account = None if self.pool.ranking is not None else self.pool.accounts[tenant]
        victims = self.pool.victims(count, self.now, account)
        names = {block: key for key, block in self.index.items()}
        self.victims += [names[block] for block in victims]
        ended = self.pool.evict(np.array(victims, dtype=np.int64), "evicted", self.now)
        assert sorted(ended) == sorted(victims), "no victim leaves a descendant behind"
        self.forget(ended)
        self.check()

    def forget(self, blocks: list[int]) -> None:
        gone = set(blocks)
        self.index = {key: block for key, block in self.index.items() if block not in gone}
        self.free += blocks
