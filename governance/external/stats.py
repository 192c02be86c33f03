"""Snapshots and independent counters of a pool that an engine allocates by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.block_state import CACHED
from kvcustody.allocator.prefix.evicted_keys import EvictedKeys
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.governance.external.residency_events import unreported
from kvcustody.governance.observability.stats import PoolStats
from kvcustody.governance.observability.thrash import advised_blocks

_NO_EVICTIONS = ("erased", "orphan")  # nobody needed the room


def port_stats(
    pool: ExternalPool,
    evicted: EvictedKeys,
    running: Sequence[ExternalResidency],
    tokens: int | None,
    block_tokens: int,
    now_us: int,
) -> PoolStats:
    """The snapshot of one pool; the prefix index is the engine's. `tokens`: of running requests, where it tells."""
    due_us = pool.hold_table.next_due_us()
    age_us = now_us - pool.born_us[pool.state == CACHED]
    slots = sum(len(residency.blocks()) for residency in running) * block_tokens
    return PoolStats(
        pool.partition.size,
        pool.counts(),
        pool.next_generation - 1,
        tuple(pool.queue.device_blocks),
        None,
        len(pool.hold_table),
        {cause: blocks for cause, blocks in pool.evicted.items() if cause not in _NO_EVICTIONS},
        pool.expired_residencies,
        pool.hold_table.overdue(now_us),
        0 if due_us is None else max(0, now_us - due_us),
        tokens,
        None if tokens is None else slots,
        pool.unclean_hand_outs,
        advised_blocks(pool.partition.size, evicted.distances),
        cached_age_us=(int(age_us.mean()), int(age_us.max())) if len(age_us) else None,
        checked_blocks=pool.sums.checked_blocks if pool.sums is not None else 0,
        mismatched_blocks=pool.sums.mismatched_blocks if pool.sums is not None else 0,
    )


def pool_counts(pool: ExternalPool, running: Iterable[ExternalResidency]) -> PoolCounts:
    """Counts at a moment when every event has been handed over and every order answered."""
    states = pool.counts()
    opened = [residency for residency in running if residency.is_opened]
    queue = pool.queue
    return PoolCounts(
        allocated_total=pool.next_generation - 1,
        unreported=sum(map(unreported, opened)),
        live_blocks=states["active"] + states["cached"] + queue.fenced_blocks(),
        fenced=0,
        dirty=queue.pending_blocks(),
        quarantined=states["quarantined"],
        scrubbed=tuple(blocks + queue.repeats for blocks in queue.device_blocks),
        open_residencies=len(opened),
    )
