"""Who pays in a pool that an engine allocates by itself, and whether a request's whole length fits.

- A request is admitted with its prompt and all it may generate reserved; what it does not use returns at its release.
- Reservations beyond guarantees fit in what no guarantee has claimed, so no tenant within its guarantee is stalled or
  preempted by another. Where no tenant has a guarantee or a cap, the engine's own admission stands.
- `used <= cap` for a tenant with a cap: its own cache makes room, nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.errors import CapacityError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.decisions.unlisted_tenants import UnlistedTenants, account_limits
from kvcustody.policies.document.model import Profile, TenantPolicy
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.tenants import ANONYMOUS


class PortAccounts:
    """Accounts of one external pool under the active revision."""

    def __init__(self, pool: ExternalPool, residencies_max: int) -> None:
        self._pool = pool
        self._residencies_max = residencies_max
        self._names: set[str] = set()
        self._unlisted = UnlistedTenants()
        self._leaving: set[str] = set()  # gone, but charged for what is not CLEAN yet
        self._anonymous_domain: tuple[int, Domain] | None = None
        self.is_unlimited: Callable[[str], bool] = lambda _: False  # whom no quota binds now

    def account(self, name: str, table: DecisionTable, leaves: Callable[[str], bool]) -> Account:
        """The account of an admitted tenant. Raises `CapacityError` where the policy admits no more unlisted ones.

        `leaves` is asked of unlisted tenants that are here to make room for another: see `UnlistedTenants`.
        """
        if name in self._names:
            return self._pool.accounts[name]
        tenant = table.tenant(name)
        if tenant is None:
            raise CapacityError(f"tenant `{name}` is not in the policy", tenant=name)
        if tenant is table.policy.default:
            self._unlisted.admit(name, tenant, leaves)
        self._leaving.discard(name)
        self._names.add(name)
        return self._limited(name, tenant, table)

    def seat(self, name: str) -> Account | None:
        """The account of a tenant that is here."""
        return self._pool.accounts[name] if name in self._names else None

    def leave(self, name: str, *, charged: bool) -> bool:
        """An unlisted tenant that runs and holds nothing goes; `charged`: whatever is on its way to CLEAN yet."""
        account = self._pool.accounts[name]
        if len(self._pool.hold_table.of(account)) or (account.used_blocks and not charged):
            return False
        account.limit(guaranteed=0, cap=None, borrow=True, residencies=account.residency_cap)
        self._names.discard(name)
        self._leaving.add(name)
        for gone in [gone for gone in self._leaving if not self._pool.accounts[gone].used_blocks]:
            self._pool.forget_account(gone)
            self._leaving.discard(gone)
        return True

    def _limited(self, name: str, tenant: TenantPolicy, table: DecisionTable) -> Account:
        most, size = self._residencies_max, self._pool.partition.size
        if self.is_unlimited(name):
            return self._pool.account(name, residencies=most)
        strict = table.policy.profile is Profile.STRICT
        return self._pool.account(name, **account_limits(tenant, size, most, isolating=strict))

    def limit(self, table: DecisionTable) -> None:
        """Apply a revision's quotas to its named tenants and to every account that exists."""
        for name in dict.fromkeys([*(tenant.id for tenant in table.policy.tenants), *sorted(self._names)]):
            tenant = table.tenant(name)
            if tenant is not None:
                self._names.add(name)
                self._limited(name, tenant, table)

    def room_of(self) -> dict[str, int]:
        """The most blocks that each tenant that is here may have."""
        return {name: self._pool.accounts[name].request_blocks for name in self._names}

    def fits(self, account: Account, need: int) -> bool:
        """Whether `need` more blocks may be reserved for the account now."""
        partition = self._pool.partition
        size = partition.size
        if partition.common_blocks == size and account.cap_blocks >= size:
            return True
        if account.active_blocks + need > account.cap_blocks:
            return False
        after = max(0, account.active_blocks + need - account.guaranteed_blocks)
        return partition.over_blocks - account.over_blocks() + after <= partition.common_blocks

    def anonymous(self) -> Account:
        """The account of requests without a valid identity: what no guarantee has claimed, and no cache."""
        if ANONYMOUS not in self._pool.accounts:
            self._pool.account(ANONYMOUS)
        return self._pool.accounts[ANONYMOUS]

    def anonymous_domain(self, table: DecisionTable) -> Domain:
        """Their domain: never CACHED, at the highest classification, with the strictest scrub that any has."""
        known = self._anonymous_domain
        if known is not None and known[0] == table.revision:
            return known[1]
        names = table.policy.classifications
        default = table.policy.default or table.policy.tenants[0]
        owed = [table.obligations(default.id or ANONYMOUS, level) for level in range(len(names))]
        label = DomainLabel(ANONYMOUS, names[-1], len(names) - 1, "request", None, None, None)
        domain = self._pool.domain(
            self.anonymous(),
            label=label,
            idle_us=0,
            absolute_us=0,
            scrub_within_us=min(entry.scrub_within_us for entry in owed),
            verify_share=max(entry.verify_share for entry in owed),
        )
        self._anonymous_domain = (table.revision, domain)
        return domain
