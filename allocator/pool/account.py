"""Who pays for a block: one account per tenant, in one partition of the pool.

Q1  Blocks are charged to the owner of their domain, once, from hand-out until they are CLEAN again.
Q2  `used <= cap`. Without borrowing a tenant uses its guarantee and what no guarantee has claimed, as far as others
    have left it; with borrowing also, for its cache, what others' guarantees leave idle.
Q3  Only CACHED blocks are lent: the ACTIVE blocks that tenants hold beyond their guarantees fit in what no
    guarantee has claimed, so a tenant within its guarantee always gets its blocks by evicting somebody's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcustody.allocator.pool.residency import HoldList
from kvcustody.allocator.prefix.eviction_policy import EvictionQueue

if TYPE_CHECKING:
    from kvcustody.allocator.pool.pool import PoolPartition


class Account:
    """One tenant's charge in one partition. Limits are blocks."""

    __slots__ = (
        "active_blocks",
        "borrow",
        "cached_blocks",
        "cap_blocks",
        "guaranteed_blocks",
        "name",
        "partition",
        "queue",
        "residencies",
        "residency_cap",
        "used_blocks",
    )

    def __init__(self, name: str, partition: PoolPartition, queue: EvictionQueue) -> None:
        self.name = name
        self.partition = partition
        self.queue = queue
        self.guaranteed_blocks = 0
        self.cap_blocks = 0
        self.borrow = True
        self.residency_cap = 1 << 30
        self.residencies = HoldList()
        self.used_blocks = 0
        self.active_blocks = 0
        self.cached_blocks = 0

    @property
    def limit_blocks(self) -> int:
        """The most blocks this account may be charged for."""
        return self.cap_blocks

    def limit(self, *, guaranteed: int, cap: int | None, borrow: bool, residencies: int) -> None:
        """Set the limits, and keep the partition's sums over guarantees. `cap` None: the whole partition."""
        partition = self.partition
        partition.over_blocks -= self.over_blocks()
        partition.charged_over -= self.charged_over_blocks()
        partition.common_blocks += self.guaranteed_blocks - guaranteed
        self.guaranteed_blocks = guaranteed
        self.cap_blocks = partition.size if cap is None else min(cap, partition.size)
        self.borrow = borrow
        self.residency_cap = residencies
        partition.over_blocks += self.over_blocks()
        partition.charged_over += self.charged_over_blocks()

    def charge(self, count: int) -> None:
        """Add `count` (negative: give back) to the charged blocks, and keep the partition's sum over guarantees."""
        before = self.used_blocks - self.guaranteed_blocks
        after = before + count
        self.used_blocks += count
        if after > 0 or before > 0:
            self.partition.charged_over += (after if after > 0 else 0) - (before if before > 0 else 0)

    def charged_over_blocks(self) -> int:
        """Charged blocks beyond the guarantee (Q2)."""
        over = self.used_blocks - self.guaranteed_blocks
        return over if over > 0 else 0

    def charge_active(self, count: int) -> None:
        """Add `count` (negative: give back) to the ACTIVE blocks, and keep the partition's sum over guarantees."""
        before = self.active_blocks - self.guaranteed_blocks
        after = before + count
        self.active_blocks += count
        if after > 0 or before > 0:
            self.partition.over_blocks += (after if after > 0 else 0) - (before if before > 0 else 0)

    def over_blocks(self) -> int:
        """ACTIVE blocks beyond the guarantee (Q3)."""
        over = self.active_blocks - self.guaranteed_blocks
        return over if over > 0 else 0
