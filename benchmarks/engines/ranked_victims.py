"""What an order of victims costs beside an engine: a request's calls to the external pool, and a batch of victims.

    python benchmarks/engines/ranked_victims.py [--blocks 100000]

`lru` is the engine's own order: its row is the cost of a request without any rank. Medians of five rounds, one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.pool.block_state import CACHED
from kvcustody.allocator.prefix.eviction_policy import POLICIES, EvictionPolicy

PROMPT_BLOCKS, HIT_BLOCKS, BATCH, ROUNDS = 64, 32, 256, 5
HOUR_US = 3_600_000_000


def measure(blocks: int, policy: Callable[[], EvictionPolicy]) -> tuple[float, float]:
    """Microseconds a request of 64 blocks (half of them hit), and a batch of 256 victims, in a full pool."""
    pool = ExternalPool(blocks)
    pool.rank_by(policy)
    account = pool.account("a")
    domain = pool.domain(account, idle_us=HOUR_US, absolute_us=HOUR_US)
    free = np.random.default_rng(0).permutation(blocks)
    heads: list[np.ndarray] = []
    request_us: list[float] = []
    batch_us: list[float] = []
    for number in range(10 * blocks // PROMPT_BLOCKS):
        if len(free) < PROMPT_BLOCKS:
            began = time.perf_counter()
            victims = pool.victims(BATCH, number, account)
            batch_us.append(1e6 * (time.perf_counter() - began))
            free = np.array(pool.evict(np.array(victims), "evicted", number))
            if len(batch_us) == 40:
                break
        head = heads[number % len(heads)] if len(heads) > 8 else None
        hit = head is not None and bool((pool.state[head] == CACHED).all())
        began = time.perf_counter()
        residency = pool.residency(account, domain, None, None, number, number)
        before = -1
        if head is not None and hit:
            pool.attach(residency, head, number)
            before = int(head[-1])
        new, free = np.split(free, [PROMPT_BLOCKS - (HIT_BLOCKS if hit else 0)])
        pool.hand_out(residency, new, domain, number)
        pool.publish(new, before)
        pool.release(residency, "finished", number)
        request_us.append(1e6 * (time.perf_counter() - began))
        if len(heads) < 16:
            heads.append(new[:HIT_BLOCKS])
    return statistics.median(request_us), statistics.median(batch_us)


def main() -> None:
    """Print a row a kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    blocks = parser.parse_args().blocks
    print(f"{'kind':10} {'request us':>10} {'batch of ' + str(BATCH) + ' us':>16}")
    for kind, policy in POLICIES.items():
        rounds = [measure(blocks, policy) for _ in range(ROUNDS)]
        request, batch = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{kind:10} {request:10.1f} {batch:16.1f}")


if __name__ == "__main__":
    main()
