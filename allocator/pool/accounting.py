"""Who pays for a block, who may reuse it, and in which partition: accounts, domains, partitions, ended runs.

A caller gets its objects from the block manager and passes them back:

    acme = manager.account("acme", guaranteed=100, cap=500)
    domain = manager.domain(acme, idle_us=60_000_000)

The four refer to one another, so they stand together. They hold numbers, never a policy.

1. Blocks are charged to the owner of their domain, once, from hand-out until they are CLEAN again.
2. `used <= cap`. Without borrowing a tenant uses its guarantee and what no guarantee has claimed, as far as others have
   left it; with borrowing also, for its cache, what others' guarantees leave idle.
3. Only CACHED blocks are lent. The ACTIVE blocks that tenants hold beyond their guarantees fit in what no guarantee has
   claimed. So a tenant within its guarantee always gets its blocks by evicting somebody's cache.
- A block is in one domain from ACTIVE until it is CLEAN again (L5).
- A closed domain serves no attach; it never opens again.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.block_state import NEVER_US, Blocks


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
        "residency_cap",
        "used_blocks",
    )

    def __init__(self, name: str, partition: PoolPartition) -> None:
        self.name = name
        self.partition = partition
        self.guaranteed_blocks = 0
        self.cap_blocks = 0
        self.borrow = True
        self.residency_cap = 1 << 30
        self.used_blocks = 0
        self.active_blocks = 0
        self.cached_blocks = 0

    @property
    def limit_blocks(self) -> int:
        """The maximum number of blocks this account may be charged for."""
        return self.cap_blocks

    @property
    def request_blocks(self) -> int:
        """The maximum number of blocks that one request of this account could ever get, without others' guarantees
        (rule 3).
        """
        return min(self.cap_blocks, self.guaranteed_blocks + self.partition.common_blocks)

    def limit(self, *, guaranteed: int, cap: int | None, borrow: bool, residencies: int) -> None:
        """Set the limits, and update the partition's sums over guarantees. `cap` None: the whole partition."""
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
        """Add `count` (negative: give back) to the charged blocks, and update the partition's sum over guarantees."""
        before = self.used_blocks - self.guaranteed_blocks
        after = before + count
        self.used_blocks += count
        if after > 0 or before > 0:
            self.partition.charged_over += (after if after > 0 else 0) - (before if before > 0 else 0)

    def charged_over_blocks(self) -> int:
        """Return the charged blocks beyond the guarantee (rule 2)."""
        over = self.used_blocks - self.guaranteed_blocks
        return over if over > 0 else 0

    def charge_active(self, count: int) -> None:
        """Add `count` (negative: give back) to the ACTIVE blocks, and update the partition's sum over guarantees."""
        before = self.active_blocks - self.guaranteed_blocks
        after = before + count
        self.active_blocks += count
        if after > 0 or before > 0:
            self.partition.over_blocks += (after if after > 0 else 0) - (before if before > 0 else 0)

    def over_blocks(self) -> int:
        """Return the ACTIVE blocks beyond the guarantee (rule 3)."""
        over = self.active_blocks - self.guaranteed_blocks
        return over if over > 0 else 0


class OwnerData:
    """Base of the data that a pool's owner attaches to a domain or a residency; the pool never reads it."""

    __slots__ = ()


class DomainLimits(NamedTuple):
    """The numeric limits of a domain; times are microseconds."""

    idle_us: int
    absolute_us: int
    scrub_within_us: int
    verify_share: float
    integrity_share: float = 0.0


class DomainFacts(TypedDict, total=False):
    """The facts about a new domain that its pool receives; each is an argument of `Domain`."""

    label: OwnerData | None
    idle_us: int
    absolute_us: int
    scrub_within_us: int
    verify_share: float
    integrity_share: float
    is_segment: bool
    reach: int
    realm: int | None


class Domain:
    """The unit of reuse. Times are microseconds; a share is 0 (none) to 1 (every block).

    `verify_share` of its blocks is read back after a scrub, `integrity_share` compared with checksums before an attach.
    """

    __slots__ = (
        "__weakref__",
        "absolute_us",
        "cacheable",
        "idle_us",
        "integrity_share",
        "is_open",
        "is_segment",
        "is_withheld",
        "label",
        "owner",
        "reach",
        "realm",
        "scrub_within_us",
        "tag",
        "verify_share",
        "windows",
    )

    def __init__(
        self,
        tag: int,
        owner: Account,
        *,
        label: OwnerData | None = None,
        idle_us: int = NEVER_US,
        absolute_us: int = NEVER_US,
        scrub_within_us: int = NEVER_US,
        verify_share: float = 0.0,
        integrity_share: float = 0.0,
        is_segment: bool = False,
        reach: int = 1,
        windows: tuple[int, ...] = (),
        realm: int | None = None,
    ) -> None:
        self.tag = tag
        self.realm = tag if realm is None else realm  # domains of one realm have keys in common, and serve each other
        self.owner = owner
        self.label = label  # what the governor calls this domain; opaque here
        self.set_limits(DomainLimits(idle_us, absolute_us, scrub_within_us, verify_share, integrity_share))
        self.is_segment = is_segment
        self.reach = reach  # who may reuse it: 0 a session, 1 a subject, 2 a tenant, 3 whoever a declaration names
        self.windows = windows  # blocks a sliding-window group needs, per group
        self.is_open = True
        self.is_withheld = False  # what it holds stays, and nothing attaches or copies it until that is over

    @property
    def may_be_copied(self) -> bool:
        """Whether its blocks may go to a tier or come back from one."""
        return self.cacheable and self.is_open and not self.is_withheld

    @property
    def limits(self) -> DomainLimits:
        """The present limits."""
        return DomainLimits(
            self.idle_us, self.absolute_us, self.scrub_within_us, self.verify_share, self.integrity_share
        )

    def set_limits(self, limits: DomainLimits) -> None:
        """Set new limits. The pool applies them to what the domain already holds."""
        self.idle_us, self.absolute_us, self.scrub_within_us, self.verify_share, self.integrity_share = limits
        # False where the policy says `0s`: such blocks are never CACHED and never published.
        self.cacheable = self.idle_us > 0 and self.absolute_us > 0


class PoolPartition:
    """Blocks with a clean reserve and scrub queues of their own: one for all tenants, or one for each in `strict`."""

    __slots__ = (
        "accounts",
        "charged_over",
        "clean_count",
        "clean_head",
        "clean_ring",
        "common_blocks",
        "dirty",
        "dirty_blocks",
        "fenced",
        "first",
        "over_blocks",
        "pressing_us",
        "reserve_high",
        "reserve_low",
        "size",
        "stuck",
        "urgent_us",
    )

    def __init__(self, first: int, size: int, reserve_low: int, reserve_high: int) -> None:
        self.first = first
        self.size = size
        self.reserve_low = reserve_low
        self.reserve_high = reserve_high
        self.clean_ring: Blocks = np.empty(size, dtype=np.int64)
        self.clean_head = 0
        self.clean_count = 0
        self.fenced: deque[EndedRun] = deque()
        self.dirty: deque[EndedRun] = deque()
        self.dirty_blocks = 0
        self.stuck: list[EndedRun] = []
        self.urgent_us = NEVER_US  # when waiting for a fuller launch would risk a scrub deadline
        self.pressing_us = NEVER_US  # when one launch a step would: everything DIRTY is scrubbed then
        self.accounts: list[Account] = []
        self.common_blocks = size  # what no guarantee has claimed
        self.over_blocks = 0  # ACTIVE blocks beyond guarantees
        self.charged_over = 0  # charged blocks beyond guarantees


class EndedRun:
    """One ended run on its way to CLEAN: its blocks, cause, due time, and the fence it waits for."""

    __slots__ = (
        "account",
        "blocks",
        "cause",
        "ceiling_us",
        "domain",
        "due_us",
        "ended_us",
        "fence",
        "generations",
        "retired_us",
    )

    def __init__(
        self,
        blocks: Blocks,
        generations: NDArray[np.int64],
        account: Account | None,
        domain: Domain | None,
        cause: str,
        due_us: int,
        ended_us: int,
        fence: int,
        ceiling_us: int = NEVER_US,
    ) -> None:
        self.blocks = blocks
        self.generations = generations
        self.account = account
        self.domain = domain
        self.cause = cause
        self.due_us = due_us
        self.ended_us = ended_us
        self.fence = fence
        self.retired_us = ended_us
        self.ceiling_us = ceiling_us
