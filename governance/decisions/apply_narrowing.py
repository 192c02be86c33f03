"""A new revision binds what is cached already.

- From activation on, every live domain has the limits of the active revision, whoever asks for it next, or nobody.
- A domain that no request can reach any more is closed: it serves no attach, and what it holds lapses.
- What became of holds goes on record by itself: the ledger's due times come from leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from kvcustody.allocator.pool.accounting import Account, Domain, DomainLimits
from kvcustody.allocator.pool.residency import Residency
from kvcustody.audit.kinds import HoldsNarrowed
from kvcustody.errors import PolicyError
from kvcustody.governance.decisions.access_plan import owed_by
from kvcustody.governance.decisions.reachable_domains import is_reachable
from kvcustody.governance.identity.domain_spec import DomainSpec, KeyOwner
from kvcustody.policies.table.decision_table import DecisionTable

_LATEST_US = (1 << 53) - 1  # the latest instant that a leaf writes as a number


class LimitedPool(Protocol):
    """A pool whose domains can be given new limits. Domains are interned by its identity."""

    def set_limits(self, changed: Mapping[Domain, DomainLimits], now_us: int) -> Mapping[Account, Iterable[Residency]]:
        """Give these domains their limits; nothing moves later. Returns the holds of whom it narrows."""


def apply_limits(
    pools: Iterable[LimitedPool],
    domains: Iterable[tuple[tuple[DomainSpec, int], Domain]],
    table: DecisionTable,
    now_us: int,
    *,
    only_narrow: bool = False,
    revoked: Collection[str] = (),
    epoch_of: Callable[[KeyOwner], int | None] | None = None,
) -> list[HoldsNarrowed]:
    """Give every domain, interned by spec and pool, its limits under `table`; returns what holds became of it.

    With `only_narrow` the stricter of old and new applies, field by field, and nothing is closed: for a revision that
    is not on record yet. `epoch_of` gives the key epoch in which an owner's blocks are found now.
    """
    changed: dict[int, dict[Domain, DomainLimits]] = {}
    for (spec, pool), domain in domains:
        is_current = epoch_of is None or epoch_of(spec.owner) == spec.key_epoch
        limits = _limits(spec, table) if is_current and is_reachable(spec, table, revoked) else None
        if limits is None:
            domain.is_open = domain.is_open and only_narrow
            limits = domain.limits._replace(idle_us=0, absolute_us=0)
        elif only_narrow:
            limits = _stricter(domain.limits, limits)
        if limits != domain.limits:
            changed.setdefault(pool, {})[domain] = limits
    return [
        remaining_holds(account, holds, table.revision, now_us)
        for bound in pools
        if id(bound) in changed
        for account, holds in bound.set_limits(changed[id(bound)], now_us).items()
    ]


def remaining_holds(account: Account, holds: Iterable[Residency], revision: int, now_us: int) -> HoldsNarrowed:
    """Every hold that a tenant has now, for the ledger: what is not among them is over."""
    held = sorted((hold.id, min(hold.deadline_us, _LATEST_US)) for hold in holds)
    return HoldsNarrowed(
        now_us, account.name, revision, tuple(id_ for id_, _ in held), tuple(until for _, until in held)
    )


def _stricter(first: DomainLimits, second: DomainLimits) -> DomainLimits:
    return DomainLimits(
        min(first.idle_us, second.idle_us),
        min(first.absolute_us, second.absolute_us),
        min(first.scrub_within_us, second.scrub_within_us),
        max(first.verify_share, second.verify_share),
        max(first.integrity_share, second.integrity_share),
    )


def _limits(spec: DomainSpec, table: DecisionTable) -> DomainLimits | None:
    if spec.tenant_name is None or table.tenant(spec.tenant_name) is None:
        return None
    try:
        level = table.level(spec.classification)
    except PolicyError:
        return None
    owed = owed_by(table, spec.tenant_name, level)
    return DomainLimits(owed.idle_us, owed.absolute_us, owed.scrub_within_us, owed.verify_share, owed.integrity_share)
