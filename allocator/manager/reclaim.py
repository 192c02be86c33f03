"""Make room: quotas, victims, the clean reserve, and the batched path from evicted to CLEAN.

    refused = reclaimer.ensure(account, count, now_us)     # None: `count` CLEAN blocks may be handed out
    reclaimer.keep_reserve(partition, now_us)              # each step: scrub what is due, refill the reserve

- A tenant within its guarantee is never refused for want of another tenant's cache, and never evicted by it.
- Under pressure: evict, scrub and hand out in one batched launch (L9).
- A request over its quota is refused alone; nobody else is stalled, preempted or evicted for it.
"""

from __future__ import annotations

from kvcustody.allocator.pool.accounting import Account, PoolPartition
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.allocator.pool.pool import Pool
from kvcustody.allocator.prefix.tree import PrefixTree

OVER_QUOTA = "over-quota"
POOL_FULL = "pool-full"
COMMON_AHEAD = 256  # a share of a partition that makes room at once for a tenant that does not borrow


class Reclaimer:
    """Provides blocks for an account. Counts are blocks."""

    def __init__(self, pool: Pool, tree: PrefixTree, options: PoolOptions) -> None:
        self.pool = pool
        self.tree = tree
        self.evict_ahead = options.evict_ahead
        self.refill_batch = options.refill_batch
        self.scrub_batch = options.scrub_batch
        self.fence_bound_us = options.fence_bound_us
        self.waits = 0  # hand-outs for which too few blocks were clean

    def ensure(self, account: Account, count: int, now_us: int, can_preempt: bool = False) -> str | None:
        """Make `count` CLEAN blocks available to `account`; return the reason if that is impossible."""
        partition = account.partition
        excess = account.used_blocks + count - account.limit_blocks
        if excess > 0:
            if excess > account.cached_blocks + self._waiting(account, partition):
                return OVER_QUOTA
            self._scrub_ended(partition, now_us)
            excess = account.used_blocks + count - account.limit_blocks
            if excess > 0:
                self.tree.evict(account, excess, now_us, "quota")
                self._scrub_ended(partition, now_us)
            if account.used_blocks + count > account.limit_blocks and self.pool.flight:
                self.pool.synchronize()  # its own blocks wait for their read-backs
            if account.used_blocks + count > account.limit_blocks:
                return OVER_QUOTA
        if not account.borrow and not self._within_common(account, partition, count, now_us):
            return OVER_QUOTA
        if not can_preempt and not self._may_activate(account, partition, count):
            return POOL_FULL
        if partition.clean_count < count:
            self._make_clean(account, partition, count, now_us)
            if partition.clean_count < count:
                return POOL_FULL
        return None

    def ensure_all(self, wanted: list[tuple[Account, int]], groups: int, now_us: int, can_preempt: bool) -> str | None:
        """Run `ensure` for all spans of one request: nothing is handed out unless all of it fits."""
        needed: dict[Account, int] = {}
        for account, count in wanted:
            needed[account] = needed.get(account, 0) + count * groups
        over: dict[PoolPartition, int] = {}
        clean: dict[PoolPartition, int] = {}
        for account, count in needed.items():
            partition = account.partition
            # Making room for one must leave the others' blocks CLEAN, so each asks for all of its partition.
            clean[partition] = clean.get(partition, 0) + count
            before = account.over_blocks()
            after = max(0, account.active_blocks + count - account.guaranteed_blocks)
            over[partition] = over.get(partition, partition.over_blocks) + after - before
            refused = self.ensure(account, count, now_us, can_preempt)
            if refused is not None:
                return refused
            if partition.clean_count < clean[partition]:
                self._make_clean(account, partition, clean[partition], now_us)
            lacks = partition.clean_count < clean[partition]
            if lacks or (not can_preempt and partition.over_blocks < over[partition] > partition.common_blocks):
                return POOL_FULL
        return None

    def _within_common(self, account: Account, partition: PoolPartition, count: int, now_us: int) -> bool:
        """Return whether a tenant that does not borrow stays within its guarantee plus what no guarantee has claimed.

        Others' cache beyond their guarantees makes room for it, whoever is furthest over first.
        """
        excess = _common_excess(account, partition, count)
        if excess > 0:
            self._scrub_ended(partition, now_us)
            excess = _common_excess(account, partition, count)
        if excess > 0:
            ahead = min(self.evict_ahead, partition.size // COMMON_AHEAD)  # else a launch, and evidence, a block
            self._evict_from(account, partition, max(excess, ahead), now_us)
            self._scrub_ended(partition, now_us)
        if self.pool.flight and _common_excess(account, partition, count) > 0:
            self.pool.synchronize()
        return _common_excess(account, partition, count) <= 0

    @staticmethod
    def _waiting(account: Account, partition: PoolPartition) -> int:
        """Charged blocks that are already on their way to CLEAN."""
        return account.used_blocks - account.active_blocks - account.cached_blocks

    @staticmethod
    def _may_activate(account: Account, partition: PoolPartition, count: int) -> bool:
        before = account.over_blocks()
        after = account.active_blocks + count - account.guaranteed_blocks
        return after <= 0 or partition.over_blocks - before + after <= partition.common_blocks

    def _make_clean(self, account: Account, partition: PoolPartition, count: int, now_us: int) -> None:
        self.waits += 1
        if partition.dirty_blocks or partition.fenced:
            self._scrub_ended(partition, now_us)
        needed = count - partition.clean_count
        if needed <= 0:
            return
        needed = max(needed, min(self.evict_ahead, partition.size // 8))
        self._evict_from(account, partition, needed, now_us)
        self._scrub_ended(partition, now_us)
        if self.pool.flight and partition.clean_count < count:  # nothing else is left but to wait for read-backs
            self.pool.synchronize()

    def _evict_from(self, account: Account | None, partition: PoolPartition, count: int, now_us: int) -> None:
        """Take from whoever is furthest over its guarantee, the asking account last in a tie."""
        while count > 0:
            victim = _victim(account, partition)
            if victim is None:
                return
            surplus = _over(victim)
            share = count if victim is account or len(partition.accounts) == 1 else min(count, max(1, surplus))
            given = self.tree.evict(victim, share, now_us, "pressure")
            if not given:
                return
            count -= given

    def _scrub_ended(self, partition: PoolPartition, now_us: int) -> None:
        self.pool.reclaim(partition, now_us, self.fence_bound_us)
        if partition.dirty_blocks:
            self.pool.scrub(partition, partition.dirty_blocks)
        if self.pool.flight:
            self.pool.collect()

    def keep_reserve(self, partition: PoolPartition, now_us: int) -> None:
        """Run the background part: reclaim, scrub what is due or worth a launch, and refill the clean reserve (L9)."""
        if self.pool.flight:
            self.pool.collect()
        if partition.fenced or partition.stuck:
            self.pool.reclaim(partition, now_us, self.fence_bound_us)
        elif partition.clean_count >= partition.reserve_low and not partition.dirty_blocks:
            return
        missing = partition.reserve_high - partition.clean_count - partition.dirty_blocks
        if partition.clean_count < partition.reserve_low and missing > 0:
            self._evict_from(None, partition, min(missing, self.refill_batch), now_us)
            self.pool.reclaim(partition, now_us, self.fence_bound_us)
        short = partition.clean_count < partition.reserve_low
        if partition.dirty_blocks and (
            short or partition.dirty_blocks >= self.scrub_batch or now_us >= partition.urgent_us
        ):
            at_most = max(self.scrub_batch, partition.reserve_high - partition.clean_count)
            self.pool.scrub(partition, partition.dirty_blocks if now_us >= partition.pressing_us else at_most)


def _common_excess(account: Account, partition: PoolPartition, count: int) -> int:
    """By how much `count` more blocks would exceed what no guarantee has claimed; at most 0 within the own."""
    after = account.used_blocks + count - account.guaranteed_blocks
    if after <= 0:
        return 0
    return partition.charged_over - account.charged_over_blocks() + after - partition.common_blocks


def _over(account: Account) -> int:
    """Blocks that `account` has beyond its guarantee, without those it has given up already."""
    return account.active_blocks + account.cached_blocks - account.guaranteed_blocks


def _victim(asking: Account | None, partition: PoolPartition) -> Account | None:
    """Return the account with cached blocks that exceeds its guarantee most; the asking account is always eligible."""
    best: Account | None = None
    most = 0
    for account in partition.accounts:
        if account.cached_blocks:
            over = _over(account)
            if over > most:
                best, most = account, over
    if best is not None:
        return best
    if asking is None and len(partition.accounts) == 1:
        asking = partition.accounts[0]  # the reserve of a partition that one tenant has to itself
    return asking if asking is not None and asking.cached_blocks else None
