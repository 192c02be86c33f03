"""Snapshots of counters, for metrics and reports; no decision depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Account
from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.governance.observability.tenant_counters import TenantCounters
from kvcustody.governance.observability.thrash import advised_blocks

TREE_LOOK_NODES = 4096  # that a snapshot walks, so that it costs no engine step more than a millisecond or two


class TreeLook(NamedTuple):
    """The first `TREE_LOOK_NODES` runs of a prefix tree: depth in blocks, and shared blocks."""

    deepest_blocks: int = 0
    shared_blocks: int = 0  # counted once for every running request beyond the first
    cached_blocks: int = 0
    cached_age_us: int = 0  # of all these together: times `cached_blocks`
    oldest_us: int = 0


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
    active_slots: int | None = None  # tokens that their blocks have room for
    clean_waits: int = 0  # hand-outs that found too few clean blocks
    advised_blocks: int = 0  # a pool that would have kept what was evicted and computed again; 0: this one did
    tree: TreeLook | None = None  # of our own pools
    cached_age_us: tuple[int, int] | None = None  # of cached blocks: the mean, and the oldest
    checked_blocks: int = 0  # compared with their checksums before they were reused
    mismatched_blocks: int = 0  # of them, those that had changed


class Stats(NamedTuple):
    """A snapshot of one Governor, consistent between steps; `tenants` and `departed` are cumulative."""

    tenants: dict[str, TenantCounters]
    pools: tuple[PoolStats, ...]
    running: int
    drift_blocks: int = 0  # found by scans and not repaired: in custody, and nothing accounts for them
    charged: Mapping[str, int] = MappingProxyType({})  # blocks by the tenant that pays for them
    attempts: Mapping[str, int] = MappingProxyType({})  # identities that proved nobody, by reason
    departed: TenantCounters = TenantCounters()  # of tenants that have left, added up
    monitors: bool = False  # the policy is not enforced for everybody
    are_hits_leading: bool = True  # False: hit blocks are of several layer groups, not of so many tokens
    serving: Mapping[str, float] = MappingProxyType({})  # `ServingMeasures.figures`
    tiers: Mapping[str, float] = MappingProxyType({})  # `Offloading.figures`
    thrashing: Mapping[str, bool] = MappingProxyType({})  # by tenant, where it was judged
    room: Mapping[str, int] = MappingProxyType({})  # the most blocks that each tenant may have
    tenant_tokens: Mapping[str, int] = MappingProxyType({})  # of running requests, by tenant, where they are known
    leases: Mapping[str, float] = MappingProxyType({})  # seconds left of each that this process needs
    events: Mapping[str, float] = MappingProxyType({})  # `BlockEventFeed.figures`


class Counted(NamedTuple):
    """Counters with the time at which they were taken, by `time.monotonic`."""

    stats: Stats
    at: float


def pool_stats(manager: BlockManager, now_us: int) -> PoolStats:
    """Return the snapshot of one pool."""
    pool, tree = manager.pool, look_at_tree(manager, now_us)
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
        int(manager.decode.capacity.sum()),
        manager.reclaimer.waits,
        advised_blocks(pool.blocks, manager.tree.evicted_keys.distances),
        tree,
        (tree.cached_age_us // tree.cached_blocks, tree.oldest_us) if tree.cached_blocks else None,
        checked_blocks=pool.sums.checked_blocks if pool.sums is not None else 0,
        mismatched_blocks=pool.sums.mismatched_blocks if pool.sums is not None else 0,
    )


def look_at_tree(manager: BlockManager, now_us: int) -> TreeLook:
    """Return the newest branches of a prefix tree, as many runs as a snapshot may walk."""
    depth = shared = cached = age_us = oldest_us = 0
    for node in islice(manager.tree.nodes(), TREE_LOOK_NODES):
        depth = max(depth, node.depth + node.length)
        if node.refs > 1:
            shared += (node.refs - 1) * node.length
        if not node.refs:
            since_us = now_us - node.born_us
            cached += node.length
            age_us += since_us * node.length
            oldest_us = max(oldest_us, since_us)
    return TreeLook(depth, shared, cached, age_us, oldest_us)


def charged_blocks(accounts: Iterable[Account]) -> dict[str, int]:
    """Return each tenant's charged blocks over all of its accounts, without zeros."""
    found: dict[str, int] = {}
    for account in accounts:
        if account.used_blocks:
            found[account.name] = found.get(account.name, 0) + account.used_blocks
    return found


def overdue_us(manager: BlockManager, now_us: int) -> int:
    """Return for how long the oldest hold is past its deadline and not lapsed, to within a wheel's tick; 0
    without one.
    """
    due_us = manager.hold_table.next_due_us()
    return 0 if due_us is None else max(0, now_us - due_us)
