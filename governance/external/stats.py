"""Snapshots and independent counters of a pool that an engine allocates by itself."""

from __future__ import annotations

from collections.abc import Iterable

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.audit.coverage.conservation import PoolCounts
from kvcustody.governance.external.residency_events import unreported
from kvcustody.governance.observability.stats import PoolStats

_NO_EVICTIONS = ("erased", "orphan")  # nobody needed the room


def port_stats(pool: ExternalPool, now_us: int) -> PoolStats:
    """The snapshot of one pool; the prefix index is the engine's."""
    due_us = pool.hold_table.next_due_us()
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
