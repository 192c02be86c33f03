"""What a block manager is made of: pool, tree, accounts, domains and partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from kvcustody.allocator.manager.make_room import Space
from kvcustody.allocator.pool.accounting import Account, Domain, DomainFacts, PoolPartition
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, Blocks
from kvcustody.allocator.pool.memory_protocol import Memory
from kvcustody.allocator.pool.options import DEFAULT_OPTIONS, PoolOptions, cut, reserve_of
from kvcustody.allocator.pool.pool import Pool
from kvcustody.allocator.prefix.copy_on_write import Forks
from kvcustody.allocator.prefix.decode_table import DecodeTable
from kvcustody.allocator.prefix.eviction_policy import EvictionPolicy, Lru
from kvcustody.allocator.prefix.node import PathResidency
from kvcustody.allocator.prefix.publish import Publication
from kvcustody.allocator.prefix.tree import PrefixTree
from kvcustody.errors import CapacityError

RESIDENCY_BITS = 40  # of a residency's number; above it stands its pool's, and both are below 2^53
POOLS_MAX = 1 << 53 - RESIDENCY_BITS


class ManagerParts:
    """One pool, its tree and its accounts."""

    def __init__(
        self,
        memory: Memory,
        blocks: int,
        options: PoolOptions = DEFAULT_OPTIONS,
        *,
        policy: Callable[[], EvictionPolicy] = Lru,
        partitions: dict[str, int] | None = None,
        number: int = 0,
    ) -> None:
        if blocks < 1:
            raise CapacityError(f"a pool needs at least one block, not `{blocks}`", blocks=blocks)
        self.options = options
        self.number = number  # which pool of its process this is
        self.block_bytes = 4 * options.block_tokens
        self._partitions = cut(blocks, options, partitions)
        self.pool = Pool(memory, blocks, list(self._partitions.values()))
        self.tree = PrefixTree(self.pool, policy)
        self.hold_table = self.tree.hold_table
        self.space = Space(
            self.pool,
            self.tree,
            options.evict_ahead,
            options.refill_batch,
            options.scrub_batch,
            options.fence_bound_us,
        )
        self.decode = DecodeTable(options.block_tokens)
        self.publication = Publication(self.pool, self.tree)
        self.forks = Forks(self.pool, self.tree, self.decode)
        self.accounts: dict[str, Account] = {}
        self._next_domain = 1
        self.expired_residencies = 0
        self._next_residency = (number << RESIDENCY_BITS) + 1  # no two pools of a process number one alike
        self._forked = 0  # sequences on a shared tail

    def boot(self) -> int:
        """Zero every block; nothing is handed out before. Returns the number of blocks that became CLEAN."""
        cleaned = sum(self.pool.scrub(partition, partition.size) for partition in self.pool.partitions)
        return cleaned + self.pool.settle()

    def account(
        self,
        name: str,
        *,
        guaranteed: int = 0,
        cap: int | None = None,
        borrow: bool = True,
        residencies: int = 1 << 30,
    ) -> Account:
        """The account of `name`, made on first use in its own partition or the common one, with these limits."""
        account = self.accounts.get(name)
        if account is None:
            partition = self._partitions.get(name, self._partitions.get(""))
            if partition is None:
                raise CapacityError(f"tenant `{name}` has no partition in this pool", tenant=name)
            account = self.accounts[name] = Account(name, partition)
            self.tree.add_account(account)
            partition.accounts.append(account)
        account.limit(guaranteed=guaranteed, cap=cap, borrow=borrow, residencies=residencies)
        return account

    def domain(self, owner: Account, **facts: Unpack[DomainFacts]) -> Domain:
        """A new domain charged to `owner`. It lives as long as something keeps it: a reader's plan, or its blocks."""
        domain = Domain(self._next_domain, owner, windows=self.options.windows, **facts)
        self._next_domain += 1
        return domain

    def residency(
        self, account: Account, domain: Domain, principal: object, facts: object, now_us: int
    ) -> PathResidency:
        """A new residency, not yet holding anything."""
        id_ = self._next_residency
        self._next_residency = id_ + 1
        return PathResidency(id_, account, domain, principal, facts, now_us)

    def _take(self, account: Account, count: int) -> Blocks:
        blocks = self.pool.hand_out(account.partition, count, account)
        account.charge_active(count)
        return blocks

    def has_partition(self, name: str) -> bool:
        """Whether `name` has a partition of its own."""
        return name in self._partitions

    def add_partition(self, name: str, size: int) -> PoolPartition:
        """A partition for `name` from blocks that no partition has yet; zeroed before it is used."""
        first = sum(partition.size for partition in self.pool.partitions)
        if first + size > self.pool.blocks:
            raise CapacityError(
                f"tenant `{name}`: a partition of {size} blocks does not fit, {self.pool.blocks - first} are left",
                tenant=name,
                blocks=size,
            )
        partition = self._partitions[name] = PoolPartition(
            first, size, *reserve_of(size, self.pool.blocks, self.options)
        )
        self.pool.enter(partition)
        self.pool.scrub(partition, size)
        self.pool.settle()
        return partition

    def live_blocks(self) -> int:
        """Blocks in ACTIVE or CACHED custody."""
        return self.pool.counts[ACTIVE] + self.pool.counts[CACHED]
