"""The product's own pool under the same stream: block manager, prefix tree and eviction queue as they ship.

One block of the stream is one token of the pool, so that chains meet where the stream's do; nothing else is set that
serving does not set. One account, one domain, no deadline: what differs between two runs is the policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from streams import Stream

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.manager.check_invariants import check
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.allocator.prefix.block_priority import BlockPriority
from kvcustody.allocator.prefix.eviction_policy import EvictionPolicy
from kvcustody.allocator.prefix.longest_prefix import Chain, Prompt, ReadPlan
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.clock import VirtualClock

OPTIONS = PoolOptions(block_tokens=1, evict_ahead=1, scrub_batch=1, keep_last_token=False)
SECRET = hashlib.sha256(b"eviction benchmark").digest()
FIRST_US = 1_000_000  # the pool's clock when the stream begins


def replay(
    stream: Stream,
    capacity: int,
    policy: Callable[[], EvictionPolicy],
    priorities: Sequence[tuple[BlockPriority, ...]] = (),
) -> list[int]:
    """The blocks that each request finds; `priorities` are those of each request's blocks."""
    manager = BlockManager(UnbackedMemory(capacity, 0, clock=VirtualClock()), capacity, OPTIONS, policy=policy)
    manager.boot()
    account = manager.account("all")
    domain = manager.domain(account)
    plan = ReadPlan(Chain(domain, hashlib.blake2b(key=SECRET, digest_size=32)))
    hits = []
    for number, chain in enumerate(stream.chains):
        now_us, count = FIRST_US + stream.at_us[number], len(chain)
        prompt = Prompt(chain.astype(np.int32).tobytes(), count, count, count, 4, {})
        sequence = manager.allocate(
            number,
            manager.match_prefix(plan, prompt, now_us),
            prompt,
            manager.residency(account, domain, number, None, now_us),
            now_us,
        )
        if not isinstance(sequence, RunningSequence):
            raise RuntimeError(f"request {number} of {count} blocks: {sequence}")
        if priorities:
            sequence.priorities = priorities[number]
        hits.append(sequence.hit_blocks)
        manager.commit(sequence, count, now_us)
        manager.release(sequence, now_us, "finished")
        manager.step(now_us)
        manager.pool.released.clear()
        manager.pool.attached.clear()
    problems = check(manager)
    if problems:
        raise RuntimeError(f"the pool is not sound after {stream.name}: {problems[:3]}")
    return hits
