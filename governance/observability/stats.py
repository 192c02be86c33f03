"""Snapshots of counters, for metrics and reports; nothing here decides anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Account
from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.governance.observability.tenant_counters import TenantCounters


class PoolStats(NamedTuple):
    """One pool's blocks by state, and its independent counters."""

    total: int
    by_state: dict[str, int]
    allocated: int
    scrubbed: tuple[int, ...]
    nodes: int | None  # None where the engine alone has an index
    residencies: int
    evicted: dict[str, int]
    expired_residencies: int
    overdue_residencies: int
    overdue_us: int = 0  # for how long the oldest of them has been
    active_tokens: int | None = None  # of running requests; None where the engine alone knows
    checked_blocks: int = 0  # compared with their checksums before they were reused
    mismatched_blocks: int = 0  # of them, those that had changed


class Stats(NamedTuple):
    """A snapshot of one Governor, consistent between steps; `tenants` and `departed` go on counting."""

    tenants: dict[str, TenantCounters]
    pools: tuple[PoolStats, ...]
    running: int
    drift_blocks: int = 0  # found by scans and not repaired: in custody, and nothing accounts for them
    charged: Mapping[str, int] = MappingProxyType({})  # blocks by the tenant that pays for them
    attempts: Mapping[str, int] = MappingProxyType({})  # identities that proved nobody, by reason
    departed: TenantCounters = TenantCounters()  # of tenants that have left, added up
    are_hits_leading: bool = True  # False: hit blocks are of several layer groups, not of so many tokens


class Counted(NamedTuple):
    """Counters with the time at which they were taken, by `time.monotonic`."""

    stats: Stats
    at: float


def pool_stats(manager: BlockManager, now_us: int) -> PoolStats:
    """The snapshot of one pool."""
    pool = manager.pool
    return PoolStats(
        pool.blocks,
        {state.name.lower(): pool.counts[state] for state in BlockState},
        pool.next_generation - 1,
        tuple(pool.memory.scrubbed(shard) for shard in range(pool.memory.shards)),
        manager.tree.node_count,
        len(manager.hold_table),
        dict(manager.tree.evicted),
        manager.expired_residencies,
        manager.hold_table.overdue(now_us),
        overdue_us(manager, now_us),
        int(manager.decode.length.sum()),
        pool.sums.checked_blocks if pool.sums is not None else 0,
        pool.sums.mismatched_blocks if pool.sums is not None else 0,
    )


def charged_blocks(accounts: Iterable[Account]) -> dict[str, int]:
    """What each tenant is charged for, over all of its accounts; those that are charged for nothing are left out."""
    found: dict[str, int] = {}
    for account in accounts:
        if account.used_blocks:
            found[account.name] = found.get(account.name, 0) + account.used_blocks
    return found


def overdue_us(manager: BlockManager, now_us: int) -> int:
    """For how long the oldest hold is past its deadline and not lapsed; 0 where none is, to within a wheel's tick."""
    due_us = manager.hold_table.next_due_us()
    return 0 if due_us is None else max(0, now_us - due_us)
