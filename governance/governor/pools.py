"""The pools of one engine process, sized as the policy's profile demands.

- shared: one pool, one partition, quotas and borrowing as the policy says.
- strict: one pool, one partition per tenant of exactly its guarantee: its own clean reserve, scrub queue and
  eviction order, so that no tenant's occupancy or eviction is visible to another.
- dedicated: one pool per tenant, with memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcustody.allocator.manager.block_manager import POOLS_MAX, BlockManager
from kvcustody.allocator.pool.accounting import Account
from kvcustody.allocator.pool.memory_protocol import Memory
from kvcustody.allocator.pool.options import DEFAULT_OPTIONS, PoolOptions
from kvcustody.allocator.prefix.eviction_policy import EvictionPolicy
from kvcustody.allocator.prefix.hash_index import IndexChange
from kvcustody.errors import CapacityError, HandleError
from kvcustody.governance.decisions.eviction_order import eviction_orders
from kvcustody.governance.decisions.unlisted_tenants import UnlistedTenants, account_limits
from kvcustody.policies.document.model import Policy, Profile, TenantPolicy
from kvcustody.policies.table.decision_table import DecisionTable

RESIDENCIES_MAX = 100_000  # of one tenant, where neither policy nor settings say less


class OpenedFence(NamedTuple):
    """A fence over several pools: its number, and the pool's own fence by pool number."""

    number: int
    by_pool: dict[int, int]


class Pools:
    """Makes and owns the block managers. `memory` is called with a number of blocks for each pool."""

    def __init__(
        self,
        memory: Callable[[int], Memory],
        blocks: int,
        options: PoolOptions = DEFAULT_OPTIONS,
        *,
        residencies_max: int = RESIDENCIES_MAX,
        eviction: Callable[[], EvictionPolicy] | None = None,
    ) -> None:
        if blocks < 1:
            raise CapacityError(f"a pool needs at least one block, got `{blocks}`", blocks=blocks)
        self._memory = memory
        self.blocks = blocks
        self.options = options
        self._residencies_max = residencies_max
        self._eviction_order = eviction  # None: the policy document says it
        self.managers: list[BlockManager] = []
        self._profile = Profile.SHARED
        self._by_tenant: dict[str, BlockManager] = {}
        self._fences: dict[int, dict[int, int]] = {}
        self._next_fence = 0
        self._unassigned = blocks
        self._unlisted = UnlistedTenants()
        self._leaving: set[str] = set()  # gone, but charged for what is not CLEAN yet
        self._given_back: dict[str, BlockManager] = {}  # gone, and their partitions or pools are to be had
        self._changes: list[IndexChange] | None = None
        self.watch: Callable[[BlockManager], None] | None = None  # told of each pool when it is made
        self.is_unlimited: Callable[[str], bool] = lambda _: False  # whom no quota binds now

    def like(self, memory: Callable[[int], Memory]) -> Pools:
        """Return pools with as many blocks and the same options over other memory; they must be booted."""
        return Pools(
            memory,
            self.blocks,
            self.options,
            residencies_max=self._residencies_max,
            eviction=self._eviction_order,
        )

    def boot(self, table: DecisionTable) -> None:
        """Make the pools of the policy's profile and zero every block in them."""
        policy = table.policy
        self._profile = policy.profile
        if self._profile is Profile.SHARED:
            self._add(self.blocks, policy, None)
        elif self._profile is Profile.STRICT:
            sizes = {tenant.id: self._share(tenant) for tenant in policy.tenants if self._share(tenant)}
            self._add(self.blocks, policy, sizes or {"": 0})
        else:
            for tenant in policy.tenants:
                self._dedicate(tenant.id, tenant, policy)
        for manager in self.managers:
            manager.boot()
        self.limit(table)

    def _share(self, tenant: TenantPolicy) -> int:
        return int(tenant.guaranteed * self.blocks)

    def _dedicate(self, name: str, tenant: TenantPolicy, policy: Policy) -> BlockManager:
        blocks = self._share(tenant)
        if not 0 < blocks <= self._unassigned:
            raise CapacityError(
                f"tenant `{name}`: a dedicated pool of {blocks} blocks does not fit, {self._unassigned} are left",
                tenant=name,
                blocks=blocks,
            )
        self._unassigned -= blocks
        manager = self._by_tenant[name] = self._add(blocks, policy, None)
        return manager

    def _add(self, blocks: int, policy: Policy, partitions: dict[str, int] | None) -> BlockManager:
        if len(self.managers) == POOLS_MAX:
            raise CapacityError(f"a process has at most {POOLS_MAX} pools")
        manager = BlockManager(
            self._memory(blocks),
            blocks,
            self.options,
            policy=self._eviction_order or eviction_orders(policy.eviction),
            partitions=partitions,
            number=len(self.managers),
        )
        manager.tree.changes = self._changes
        if self.watch is not None:
            self.watch(manager)
        self.managers.append(manager)
        return manager

    def index_changes(self) -> list[IndexChange]:
        """Return changes as `Governor.index_changes` does; pools that are made later report theirs too."""
        taken, self._changes = self._changes or [], []
        for manager in self.managers:
            manager.tree.changes = self._changes
        return taken

    def account(
        self, name: str, table: DecisionTable, leaves: Callable[[str], bool] = lambda name: False
    ) -> tuple[Account, BlockManager]:
        """Return an admitted tenant's account and its pool. Raises `CapacityError` where no room is left.

        `leaves` is asked of unlisted tenants that are here to make room for another: see `UnlistedTenants`.
        """
        manager = self._by_tenant.get(name)
        if manager is not None and name in manager.accounts:
            return manager.accounts[name], manager
        tenant = table.tenant(name)
        if tenant is None:
            raise CapacityError(f"tenant `{name}` is not in the policy", tenant=name)
        if tenant is table.policy.default and tenant.tenants_max is not None:
            self._forget_clean()
            self._unlisted.admit(name, tenant, leaves)
        self._leaving.discard(name)
        if self._profile is Profile.DEDICATED:
            manager = manager or self._pool_given_back(self._share(tenant))
            if manager is None:
                manager = self._dedicate(name, tenant, table.policy)
                manager.boot()
        else:
            manager = self.managers[0]
            if self._profile is Profile.STRICT and self._given_back.pop(name, None) is None:
                self._give_partition(manager, name, self._share(tenant))
        self._by_tenant[name] = manager
        return self._limited(name, tenant, manager), manager

    @property
    def is_shared(self) -> bool:
        """Whether tenants share one pool and its eviction order."""
        return self._profile is Profile.SHARED

    def seat(self, name: str) -> tuple[Account, BlockManager] | None:
        """Return the account and pool of a present tenant."""
        manager = self._by_tenant.get(name)
        return None if manager is None else (manager.accounts[name], manager)

    def room_of(self) -> dict[str, int]:
        """Return the most blocks that each present tenant may have."""
        return {
            name: min(manager.accounts[name].cap_blocks, manager.accounts[name].partition.size)
            for name, manager in self._by_tenant.items()
        }

    def leave(self, name: str) -> bool:
        """Release the blocks of an unlisted tenant that runs nothing; False where it still holds some.

        In `shared` it may be charged for what is on its way to CLEAN: it has no guarantee from here on. Elsewhere all
        that is its own is CLEAN, or quarantined for good: nobody is ever handed that, whoever has the rest.
        """
        manager = self._by_tenant[name]
        account = manager.accounts[name]
        if manager.hold_table.count(account) or account.cached_blocks:
            return False
        if self.is_shared:
            account.limit(guaranteed=0, cap=None, borrow=True, residencies=account.residency_cap)
            self._leaving.add(name)
        elif account.used_blocks or not manager.pool.is_vacant(account.partition):
            return False
        else:
            manager.forget_account(name)
            self._given_back[name] = manager
        del self._by_tenant[name]
        self._forget_clean()
        return True

    def _forget_clean(self) -> None:
        """Whoever left and is charged for nothing any more is forgotten."""
        accounts = self.managers[0].accounts
        for name in [name for name in self._leaving if not accounts[name].used_blocks]:
            self.managers[0].forget_account(name)
            self._leaving.discard(name)

    def _pool_given_back(self, blocks: int) -> BlockManager | None:
        """A dedicated pool of this size whose tenant has left."""
        for name, manager in self._given_back.items():
            if manager.pool.blocks == blocks:
                return self._given_back.pop(name)
        return None

    def _give_partition(self, manager: BlockManager, name: str, blocks: int) -> None:
        """A partition for a tenant: its own, one that another gave back, or a new one."""
        if manager.has_partition(name):
            return
        fitting = [before for before in self._given_back if manager.partition_blocks(before) == blocks]
        if not fitting:
            manager.add_partition(name, blocks)
            return
        before = max(fitting, key=manager.clean_blocks)  # the one with the fewest in quarantine
        del self._given_back[before]
        manager.give_partition(before, name)

    def _limited(self, name: str, tenant: TenantPolicy, manager: BlockManager) -> Account:
        most = self._residencies_max
        if self.is_unlimited(name):
            return manager.account(name, residencies=most)
        isolating = not self.is_shared
        return manager.account(name, **account_limits(tenant, self.blocks, most, isolating=isolating))

    def limit(self, table: DecisionTable) -> None:
        """Apply the revision's quotas to the named tenants and to every account that exists."""
        for name in dict.fromkeys([*(tenant.id for tenant in table.policy.tenants), *self._by_tenant]):
            tenant = table.tenant(name)
            if tenant is None:
                continue
            account, manager = self.account(name, table)
            self._limited(account.name, tenant, manager)

    # -- fences ----------------------------------------------------------------------------------------

    def open_fence(self, pools: set[int], now_us: int) -> OpenedFence:
        """Open one fence in each of these pools."""
        self._next_fence += 1
        by_pool = {pool: self.managers[pool].pool.fences.open(now_us) for pool in pools}
        self._fences[self._next_fence] = by_pool
        return OpenedFence(self._next_fence, by_pool)

    def retire_fence(self, number: int) -> None:
        """Retire a fence in every pool; a second call changes nothing."""
        if not 0 < number <= self._next_fence:
            raise HandleError(f"fence `{number}` was never opened; the last one is `{self._next_fence}`", fence=number)
        for pool, fence in self._fences.pop(number, {}).items():
            self.managers[pool].pool.fences.retire(fence)
