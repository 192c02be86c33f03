"""Applies a new revision's limits to blocks that are cached already.

- From activation on, every live domain has the limits of the active revision, whoever asks for it next, or nobody.
- A domain that no request can reach any more is closed: it serves no attach, and what it holds lapses. `is_reachable`
  asks what the domain is, not who asked for it. A domain that might be reached keeps its blocks until their deadline.
- What became of holds goes on record by itself: the ledger's due times come from leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from kvcustody.allocator.pool.accounting import Account, Domain, DomainLimits
from kvcustody.allocator.pool.residency import Residency
from kvcustody.audit.kinds import HoldsNarrowed
from kvcustody.errors import PolicyError
from kvcustody.governance.decisions.access_plan import LEVELS, is_revoked, owed_by
from kvcustody.governance.decisions.staged_table import StagedTable
from kvcustody.governance.identity.domain_spec import DomainSpec, KeyOwner, ScopeKind
from kvcustody.policies.document.model import EVERY_TENANT, Action, Scope, Via
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessRequest

_LATEST_US = (1 << 53) - 1  # the latest instant that a leaf writes as a number


class LimitedPool(Protocol):
    """A pool whose domains can get new limits. Domains are interned by its identity."""

    def set_limits(self, changed: Mapping[Domain, DomainLimits], now_us: int) -> Mapping[Account, Iterable[Residency]]:
        """Set the limits of these domains; no deadline moves later. Returns the holds that were narrowed."""


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
    """Set the limits of every domain under `table`; returns the changed holds.

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
    """Return every hold that a tenant has now, for the ledger; every other one has ended."""
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


def is_reachable(spec: DomainSpec, table: DecisionTable, revoked: Collection[str] = ()) -> bool:
    """Whether any reader may be led to `spec` by its own plan, a grant or a segment."""
    if isinstance(table, StagedTable):
        return any(is_reachable(spec, either, revoked) for either in (table.base, table.candidate))
    if spec.tenant_name is None or table.tenant(spec.tenant_name) is None:
        return False
    try:
        level = table.level(spec.classification)
    except PolicyError:
        return False
    if spec.scope is ScopeKind.SEGMENT:
        return _is_declared(spec, level, table, revoked)
    if not _may_be_labelled(spec, table):
        return False
    scope = LEVELS[spec.scope]
    if scope is Scope.TENANT and _is_granted(spec.tenant_name, level, table, revoked):
        return True
    return _reaches_itself(spec.tenant_name, level, scope, table)


def _reaches_itself(tenant: str, level: int, scope: Scope, table: DecisionTable) -> bool:
    lowest = table.classify(tenant, None, table.policy.classifications[0], None)
    own = table.decide(AccessRequest(Action.REUSE, tenant, tenant, level, scope, Via.OWN), 0)
    return level >= lowest and own.permitted


def _is_granted(owner: str, level: int, table: DecisionTable, revoked: Collection[str]) -> bool:
    policy = table.policy
    return any(
        grant.owner == owner
        and level <= grant.at_most
        and not is_revoked(grant.id, revoked)
        and not is_revoked(grant.id, table.revoked)
        for grant in (*policy.grants, *policy.group_grants())
    )


def _is_declared(spec: DomainSpec, level: int, table: DecisionTable, revoked: Collection[str]) -> bool:
    return any(
        (rule.id, rule.owner, rule.level) == (spec.segment, spec.tenant_name, level)
        and not is_revoked(rule.id, revoked)
        and rule.id not in table.revoked
        for rule in table.policy.segments
    )


def _may_be_labelled(spec: DomainSpec, table: DecisionTable) -> bool:
    """Labels add up: a request has at least those without a route, and at most those of every rule for its tenant."""
    assert spec.tenant_name is not None
    least = set(table.labels(spec.tenant_name, None))
    most = least.union(
        *(rule.labels for rule in table.policy.classify if rule.tenant in (spec.tenant_name, EVERY_TENANT))
    )
    return least <= set(spec.labels) <= most
