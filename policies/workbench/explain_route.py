"""Explain which workers may serve a request, by which rules, and the share of such requests with receipts.

    found = explain_route(table, "acme", route="/v1/completions", claim=None, hint=None)
    print(found)

1. The answer comes from the table, by the same call that doors and workers make (`table.placement`).
2. Groups are those of a deployment's document where one is given, else those that the policy names. `OTHERS` stands for
   every group that it does not name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from kvcustody.policies.document.model import Labels, PlacementRule
from kvcustody.policies.document.problems import quote
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.placement import Demand
from kvcustody.policies.table.receipts import share_text

OTHERS = "(any other)"


class RuledGroup(NamedTuple):
    """A placement rule that binds the request, and its effect: `only` these groups, or none of them (`bars`)."""

    id: str
    line: int
    effect: str
    groups: tuple[str, ...]
    reason: str


class RouteExplanation(NamedTuple):
    """Where a request may go. `workers`: by group, if the deployment's document was given.

    `receipt_share`: of such requests have a route receipt; all, where a grant or a segment opens the tenant
    (`is_opened`).
    """

    tenant: str
    classification: str
    labels: Labels
    allowed: tuple[str, ...]
    refused: tuple[str, ...]
    rules: tuple[RuledGroup, ...]
    workers: Mapping[str, tuple[str, ...]]
    is_retried: bool
    receipt_share: Fraction
    is_opened: bool

    @property
    def permitted(self) -> bool:
        """Whether any group may serve the request."""
        return bool(self.allowed)

    def __str__(self) -> str:
        labels = ", ".join(f"{name}={value}" for name, value in self.labels) or "none"
        lines = [f"{self.tenant}, {self.classification}, labels: {labels}"]
        if not self.permitted:
            lines.append("no group may serve it: doors and workers refuse it")
        for group in self.allowed:
            workers = ", ".join(self.workers.get(group, ()))
            lines.append(f"{group}: may serve it" + (f" ({workers})" if workers else ""))
        lines += [f"{group}: may not" for group in self.refused]
        for rule in self.rules:
            said = f"rule {quote(rule.id)}, line {rule.line}: {rule.effect} {', '.join(rule.groups)}"
            lines.append(said + (f" ({rule.reason})" if rule.reason else ""))
        if not self.is_retried:
            lines.append("its door lets a router present it to each worker once (`on_worker_death: fail`)")
        why = ", for a grant or a segment opens the tenant" if self.is_opened else ""
        lines.append(f"requests with a route receipt: {share_text(self.receipt_share)}{why}")
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Return the explanation as JSON data."""
        return {
            "tenant": self.tenant,
            "classification": self.classification,
            "labels": dict(self.labels),
            "permitted": self.permitted,
            "allowed": list(self.allowed),
            "refused": list(self.refused),
            "rules": [rule._asdict() for rule in self.rules],
            "workers": {group: list(names) for group, names in self.workers.items()},
            "is_retried": self.is_retried,
            "receipt_share": share_text(self.receipt_share),
            "is_opened": self.is_opened,
        }


def explain_route(
    table: DecisionTable,
    tenant: str,
    *,
    route: str | None,
    claim: str | None,
    hint: str | None,
    workers: Mapping[str, tuple[str, ...]] | None = None,
) -> RouteExplanation:
    """Explain where a tenant's request may go; `workers`: the workers of each group of a deployment."""
    level, labels = table.classify(tenant, route, claim, hint), table.labels(tenant, route)
    demand = table.demand(tenant, route, claim, hint)
    groups = (*table.placement.groups(), OTHERS) if workers is None else tuple(workers)
    return RouteExplanation(
        tenant,
        table.policy.classifications[level],
        labels,
        tuple(demand.among(groups)),
        tuple(group for group in groups if not demand.allows(group)),
        tuple(_ruled(table.policy.placement, tenant, demand)),
        workers or {},
        demand.is_retried,
        demand.receipt_share,
        table.placement.policy.receipts.is_opened(tenant),
    )


def _ruled(rules: Iterable[PlacementRule], tenant: str, demand: Demand) -> Iterable[RuledGroup]:
    for rule in rules:
        if rule.id in demand.by:
            yield RuledGroup(rule.id, rule.mark.line, "only", rule.groups, rule.reason)
        elif rule.dedicated and rule.tenants is not None and tenant not in rule.tenants:
            yield RuledGroup(rule.id, rule.mark.line, "bars", rule.groups, rule.reason)
