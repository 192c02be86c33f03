"""A small pool to test with: a block manager, keyed domains, and requests in one line.

Blocks are 4 tokens, so that a prompt of a few dozen tokens crosses several nodes and the coarse step of the index.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.manager.check_invariants import check
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.pool.memory_protocol import Memory, UnbackedMemory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.allocator.prefix.longest_prefix import Chain, Prompt, ReadPlan
from kvcustody.allocator.prefix.node import Node
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.clock import VirtualClock

SIZE = 4  # tokens a block
SECOND = 1_000_000
MINUTE = 60 * SECOND
OPTIONS = PoolOptions(block_tokens=SIZE, evict_ahead=1, scrub_batch=1)


def state_of(name: str):
    """A primed state; two names never share a key."""
    return hashlib.blake2b(key=hashlib.sha256(name.encode()).digest(), digest_size=32)


def run(first: int, blocks: int, tail: int = 0) -> list[int]:
    """Tokens of `blocks` whole blocks and a tail, unlike those of any other `first`."""
    return [1000 * first + at for at in range(SIZE * blocks + tail)]


class World:
    """One pool. `tenants` maps a name to `BlockManager.account` limits; each gets one domain of its own name."""

    def __init__(
        self,
        blocks: int = 64,
        tenants: dict[str, dict[str, Any]] | tuple[str, ...] = ("a", "b"),
        *,
        memory: Memory | None = None,
        options: dict[str, Any] | None = None,
        domain: dict[str, Any] | None = None,
        **manager: Any,
    ) -> None:
        self.memory = memory or UnbackedMemory(blocks, 0, clock=VirtualClock())
        self.m = BlockManager(self.memory, blocks, OPTIONS._replace(**(options or {})), **manager)
        self.m.boot()
        self.now = SECOND
        self.chains: dict[str, Chain] = {}
        for name in tenants:
            limits = tenants[name] if isinstance(tenants, dict) else {}
            self.m.account(name, **limits)
        for name in tenants:
            self.domain(name, name, **(domain or {}))

    def domain(self, name: str, owner: str, **limits: Any) -> Chain:
        domain = self.m.domain(self.m.accounts[owner], **limits)
        self.chains[name] = Chain(domain, state_of(name))
        return self.chains[name]

    def plan(self, own: str, grants: tuple[str, ...] = (), segment: str = "", segment_blocks: int = 0):
        return ReadPlan(
            self.chains[own],
            self.chains[segment] if segment else None,
            segment_blocks,
            tuple(self.chains[name] for name in grants),
        )

    def prompt(self, tokens: list[int]) -> Prompt:
        count = len(tokens)
        keep = self.m.options.keep_last_token
        limit = (count - 1) // SIZE if keep else count // SIZE
        return Prompt(np.array(tokens, dtype=np.int32).tobytes(), count, count // SIZE, limit, 4 * SIZE, {})

    def hit(self, own: str, tokens: list[int], **plan: Any) -> int:
        """Blocks that a request of `own` would attach now."""
        return self.m.match_prefix(self.plan(own, **plan), self.prompt(tokens), self.now).hit_blocks

    def admit(
        self,
        own: str,
        tokens: list[int],
        *,
        principal: object = None,
        active_us: int = NEVER_US,
        lookahead: int = 0,
        can_preempt: bool = False,
        **plan: Any,
    ) -> RunningSequence | str:
        read, prompt = self.plan(own, **plan), self.prompt(tokens)
        account, domain = read.own.domain.owner, read.own.domain
        residency = self.m.residency(account, domain, principal or object(), None, self.now)
        return self.m.allocate(
            object(),
            self.m.match_prefix(read, prompt, self.now),
            prompt,
            residency,
            self.now,
            active_us=active_us,
            lookahead_tokens=lookahead,
            can_preempt=can_preempt,
        )

    def start(self, own: str, tokens: list[int], **how: Any) -> RunningSequence:
        """Admit, and compute the whole prompt."""
        sequence = self.admit(own, tokens, **how)
        assert isinstance(sequence, RunningSequence), sequence
        self.m.commit(sequence, len(tokens), self.now)
        return sequence

    def cache(self, own: str, tokens: list[int], **how: Any) -> int:
        """One whole request; returns its hit in blocks."""
        sequence = self.start(own, tokens, **how)
        hit = sequence.hit_blocks
        self.m.release(sequence, self.now, "finished")
        return hit

    def extend(self, sequence: RunningSequence, *tokens: int) -> list[RunningSequence]:
        """Accept these tokens, one step each."""
        stalled: list[RunningSequence] = []
        for token in tokens:
            slots = np.array([sequence.slot])
            stalled += self.m.extend_many(slots, np.array([token], dtype=np.int32), self.now)
        return stalled

    def wait(self, microseconds: int) -> list[RunningSequence]:
        self.now += microseconds
        return self.m.step(self.now)

    def scrub(self) -> None:
        """Everything that can be CLEAN is."""
        for partition in self.m.pool.partitions:
            self.m.pool.reclaim(partition, self.now, self.m.options.fence_bound_us)
            self.m.pool.scrub(partition, partition.dirty_blocks)

    def nodes(self) -> list[Node]:
        return list(self.m.tree.nodes())

    def states(self) -> dict[str, int]:
        names = ("clean", "active", "cached", "fenced", "dirty", "quarantined")
        return {name: count for name, count in zip(names, self.m.pool.counts, strict=True) if count}

    def ok(self) -> None:
        problems = check(self.m)
        assert not problems, problems
