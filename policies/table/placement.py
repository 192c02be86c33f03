"""A policy's instructions to doors for a request: which groups of workers may serve it, and whether it gets a receipt.

    table = PlacementTable.of(policy)
    demand = table.demand("acme", "/v1/completions", claim=None, hint="internal")
    demand.allows("eu-1")

1. A request goes to a group that every matching rule lists. No rule matches: to any group.
2. A group that a rule dedicates serves the tenants of that rule alone, whatever other rules say.
3. Classification and labels are the request's own (`classify`): an untrusted route, an unknown claim or an unknown hint
   counts as the highest classification, and has every label.
4. Demands of several policies hold together.
5. Of several shares of requests with a route receipt (`table.receipts`) the largest holds.
6. `data` and `from_data` carry what decides, and no more: a door acts by it without the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Self

from kvcustody.errors import ServiceError
from kvcustody.policies.document.model import (
    NO_MARK,
    UNSAID_RECEIPTS,
    ClassifyRule,
    Labels,
    OnWorkerDeath,
    PlacementRule,
    Policy,
)
from kvcustody.policies.table.classify import Classifier
from kvcustody.policies.table.receipts import ReceiptShares
from kvcustody.tenants import issuers_of


class Demand(NamedTuple):
    """Where a request may go: only to the groups in `only` (None: to any), and to none in `barred`.

    `by`: the placement rules that say so. `is_retried`: whether it may be presented again when its worker died.
    `receipt_share`: of which share of such requests the door writes a route receipt.
    """

    only: frozenset[str] | None = None
    barred: frozenset[str] = frozenset()
    by: tuple[str, ...] = ()
    is_retried: bool = True
    receipt_share: Fraction = UNSAID_RECEIPTS

    def allows(self, group: str) -> bool:
        """Return whether workers of this group may serve the request."""
        return (self.only is None or group in self.only) and group not in self.barred

    def among(self, groups: Iterable[str]) -> list[str]:
        """Return those of `groups` that may serve the request, in their order."""
        return [group for group in groups if self.allows(group)]

    def together(self, other: Demand) -> Demand:
        """Return the demand that combines both (rules 4 and 5)."""
        either = [each.only for each in (self, other) if each.only is not None]
        return Demand(
            frozenset.intersection(*either) if either else None,
            self.barred | other.barred,
            tuple(dict.fromkeys((*self.by, *other.by))),
            self.is_retried and other.is_retried,
            max(self.receipt_share, other.receipt_share),
        )


ANYWHERE = Demand()


class PlacedTenant(NamedTuple):
    """A tenant whose classification or labels may differ from those of other tenants."""

    id: str
    labels: Labels = ()


class PlacedPolicy(NamedTuple):
    """The parts of a policy that decide where requests go."""

    issuers: tuple[str, ...]
    classifications: tuple[str, ...]
    tenants: tuple[PlacedTenant, ...]
    default_labels: Labels
    classify: tuple[ClassifyRule, ...]
    placement: tuple[PlacementRule, ...]
    on_worker_death: tuple[OnWorkerDeath, ...]
    receipts: ReceiptShares

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return these parts of a policy."""
        ruled = {rule.tenant for rule in policy.classify}
        default = () if policy.default is None else policy.default.labels
        placed = (tenant for tenant in policy.tenants if tenant.labels != default or tenant.id in ruled)
        return cls(
            policy.issuers,
            policy.classifications,
            tuple(PlacedTenant(tenant.id, tenant.labels) for tenant in placed),
            default,
            policy.classify,
            policy.placement,
            policy.on_worker_death,
            ReceiptShares.of(policy),
        )


class PlacementTable:
    """The placement demands of one policy; immutable."""

    def __init__(self, policy: PlacedPolicy) -> None:
        self.policy = policy
        self._classifier = Classifier(policy)
        self._labels = {tenant.id: tenant.labels for tenant in policy.tenants}
        self._names = issuers_of(policy.issuers)

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return the table of a whole policy."""
        return cls(PlacedPolicy.of(policy))

    @property
    def says_anything(self) -> bool:
        """Whether any request has a demand that an empty policy would not make."""
        placed = bool(self.policy.placement) or OnWorkerDeath.FAIL in self.policy.on_worker_death
        return placed or self.policy.receipts.says_anything

    def groups(self) -> tuple[str, ...]:
        """Return every group that a rule names, sorted."""
        return tuple(sorted({group for rule in self.policy.placement for group in rule.groups}))

    def name(self, issuer: str, tenant: str) -> str:
        """Return the policy's name for a tenant."""
        return self._names.name(issuer, tenant) if self.policy.issuers else tenant

    def demand(self, tenant: str, route: str | None, claim: str | None, hint: str | None) -> Demand:
        """Return where a request may go. `tenant`: the policy's name for it; `claim` and `hint`: classification
        names.
        """
        level = self._classifier.classify(tenant, route, claim, hint)
        labels = set(self._classifier.labels(tenant, route, self._labels.get(tenant, self.policy.default_labels)))
        return self.demand_of(tenant, level, labels)

    def demand_of(self, tenant: str, level: int, labels: Iterable[tuple[str, str]]) -> Demand:
        """Return the demand for a request whose level and labels are known."""
        deaths = self.policy.on_worker_death
        is_retried = not deaths or deaths[level] is not OnWorkerDeath.FAIL
        share = self.policy.receipts.share(tenant, level)
        if not self.policy.placement:
            return Demand(is_retried=is_retried, receipt_share=share)
        has, barred, by = set(labels), set[str](), list[str]()
        only: frozenset[str] | None = None
        for rule in self.policy.placement:
            listed = rule.tenants is None or tenant in rule.tenants
            if rule.dedicated and not listed:
                barred.update(rule.groups)
            if listed and has.issuperset(rule.labels) and (rule.levels is None or level in rule.levels):
                only = frozenset(rule.groups) if only is None else only.intersection(rule.groups)
                by.append(rule.id)
        return Demand(only, frozenset(barred), tuple(by), is_retried, share)

    def data(self) -> dict[str, Any]:
        """Return the table as JSON data."""
        policy = self.policy
        return {
            "issuers": list(policy.issuers),
            "classifications": list(policy.classifications),
            "tenants": {tenant.id: dict(tenant.labels) for tenant in policy.tenants},
            "default_labels": dict(policy.default_labels),
            "classify": [
                {"tenant": rule.tenant, "route": rule.route, "level": rule.level, "labels": dict(rule.labels)}
                for rule in policy.classify
            ],
            "rules": [
                {
                    "id": rule.id,
                    "groups": list(rule.groups),
                    "tenants": None if rule.tenants is None else list(rule.tenants),
                    "labels": dict(rule.labels),
                    "levels": None if rule.levels is None else list(rule.levels),
                    "dedicated": rule.dedicated,
                }
                for rule in policy.placement
            ],
            "on_worker_death": [each.name.lower() for each in policy.on_worker_death],
            "route_receipts": policy.receipts.data(),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Return the table from JSON data; raises `ServiceError` if the data has another form."""
        try:
            policy = PlacedPolicy(
                tuple(map(str, data["issuers"])),
                tuple(map(str, data["classifications"])),
                tuple(PlacedTenant(str(name), _pairs(own)) for name, own in data["tenants"].items()),
                _pairs(data["default_labels"]),
                tuple(
                    ClassifyRule(str(rule["tenant"]), rule["route"], rule["level"], _pairs(rule["labels"]))
                    for rule in data["classify"]
                ),
                tuple(
                    PlacementRule(
                        str(rule["id"]),
                        tuple(map(str, rule["groups"])),
                        None if rule["tenants"] is None else tuple(map(str, rule["tenants"])),
                        _pairs(rule["labels"]),
                        None if rule["levels"] is None else tuple(map(int, rule["levels"])),
                        bool(rule["dedicated"]),
                        mark=NO_MARK,
                    )
                    for rule in data["rules"]
                ),
                tuple(OnWorkerDeath[name.upper()] for name in data["on_worker_death"]),
                ReceiptShares.from_data(data["route_receipts"], len(data["classifications"])),
            )
            below = len(policy.classifications)
            levels = [rule.level for rule in policy.classify if rule.level is not None]
            levels += [level for rule in policy.placement for level in rule.levels or ()]
            if len(policy.on_worker_death) not in (0, below):
                raise ValueError("one entry a classification")
            if any(type(level) is not int or not 0 <= level < below for level in levels):
                raise ValueError("a level that is none")
            return cls(policy)
        except (KeyError, AttributeError, TypeError, ValueError, ZeroDivisionError):
            raise ServiceError("the placement rules of a policy are malformed") from None


def _pairs(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted((str(name), str(value)) for name, value in labels.items()))
