"""Whether any request could still be led to a domain under a policy revision.

1. False only where no request can: a domain that might be reached keeps what it holds until its own deadline.
2. It asks what a domain is, never who asked for it, so that nobody need come for a domain to be found unreachable.
"""

from __future__ import annotations

from collections.abc import Collection

from kvcustody.errors import PolicyError
from kvcustody.governance.decisions.access_plan import LEVELS, is_revoked
from kvcustody.governance.decisions.staged_table import StagedTable
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind
from kvcustody.policies.document.model import EVERY_TENANT, Action, Scope, Via
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessRequest


def is_reachable(spec: DomainSpec, table: DecisionTable, revoked: Collection[str] = ()) -> bool:
    """Whether a reader of some kind may be led to `spec` by its own plan, a grant or a segment."""
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
