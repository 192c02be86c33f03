"""Obligations, classifications and labels that change between two tables, and whether they loosen.

1. A tenant that only one of the two lists is compared with what the other says of unlisted ones; where one of them
   refuses it, its cells tell the change.
2. Routes are asked by one example of each set of patterns that a route can match; claims and hints raise alike in
   both.
3. A tenant whose requests routers place together has a placement channel inside it: where a prompt goes may tell that
   somebody else of the tenant sent it. A tenant that is not admitted has none.
4. Another group of workers that may serve a request is wider, one that may not any more is narrower; `(any other)`
   stands for every group that neither names.
5. Fewer requests with a route receipt is looser: less of where requests went is on record. Receipts that come or go
   with a grant or a segment are no change of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

from kvcustody.policies.document.model import Affinity, Labels, OnRunning, Policy, Profile, Tier
from kvcustody.policies.document.offload_defaults import default_within_us
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.obligations import Obligations
from kvcustody.policies.table.receipts import share_text, shares_of
from kvcustody.policies.workbench.diff.model import DutyChange
from kvcustody.policies.workbench.prove.obligation_checks import looser_fields
from kvcustody.policies.workbench.prove.route_examples import RouteExamples
from kvcustody.times import span

PLACEMENT_CHANNEL = "placement channel inside the tenant"
_OTHERS = "(any other)"
_IMPLIED = ("tier_absolute_us", "tier_within_us", "tier_running_us")
_APART = (Profile.SHARED, Profile.STRICT, Profile.DEDICATED)


def duty_changes(old: DecisionTable, new: DecisionTable, tenants: tuple[str, ...]) -> Iterator[DutyChange]:
    """Every change: the profile first, then by tenant."""
    if old.policy.profile is not new.policy.profile:
        one, two = old.policy.profile, new.policy.profile
        yield DutyChange("every tenant", "policy", "profile", one, two, _APART.index(two) < _APART.index(one))
    yield from _erasure(old.policy, new.policy)
    yield from _deaths(old.policy, new.policy)
    for tenant in tenants:
        if old.tenant(tenant) is not None and new.tenant(tenant) is not None:
            yield from _obligations(old, new, tenant)
        yield from _affinity(old, new, tenant)
    examples = RouteExamples((old.policy, new.policy))
    for tenant in _distinct_tenants(old.policy, new.policy, tenants):
        for route in examples.of(tenant):
            yield from _levels(old, new, tenant, route)
            yield from _labels(old, new, tenant, route)
    yield from _placement(old, new, tenants, examples)
    yield from _receipts(old, new, tenants)


def _deaths(old: Policy, new: Policy) -> Iterator[DutyChange]:
    for level, name in enumerate(new.classifications):
        if name in old.classifications:
            one, two = old.after_death(old.classifications.index(name)), new.after_death(level)
            if one is not two:
                said = one.name.lower(), two.name.lower()
                yield DutyChange("every tenant", name, "on_worker_death", *said, two < one)


def _placement(
    old: DecisionTable, new: DecisionTable, tenants: tuple[str, ...], examples: RouteExamples
) -> Iterator[DutyChange]:
    """Rule 4. Classifications are asked by hints: those that both have."""
    if old.policy.placement == new.policy.placement == ():
        return
    groups = (*sorted({*old.placement.groups(), *new.placement.groups()}), _OTHERS)
    names = [None, *(name for name in new.policy.classifications if name in old.policy.classifications)]
    for tenant in tenants:
        asked = [*product(examples.of(tenant), names)]
        changes: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for route, hint in asked:
            change = tuple(
                tuple(table.placement.demand(tenant, route, None, hint).among(groups)) for table in (old, new)
            )
            if change[0] != change[1]:
                said = ", ".join(filter(None, (route or "any route", hint)))
                changes.setdefault(change, []).append(said)
        for (one, two), requests in changes.items():
            loosens = None if set(one) - set(two) and set(two) - set(one) else set(two) > set(one)
            about = "every request" if len(requests) == len(asked) else "; ".join(requests)
            yield DutyChange(tenant, about, "placement", ", ".join(one) or "none", ", ".join(two) or "none", loosens)


def _receipts(old: DecisionTable, new: DecisionTable, tenants: tuple[str, ...]) -> Iterator[DutyChange]:
    """Rule 5; what changes for every tenant alike is one change."""
    changes: dict[tuple[str, Fraction, Fraction], list[str]] = {}
    for tenant in tenants:
        before, after = (shares_of(table.policy, table.tenant(tenant)) for table in (old, new))
        for level, name in enumerate(new.policy.classifications):
            if name in old.policy.classifications:
                change = name, before[old.level(name)], after[level]
                changes.setdefault(change, []).append(tenant)
    for (name, one, two), changed in changes.items():
        for who in ["every tenant"] if len(changed) == len(tenants) else changed:
            if one != two:
                yield DutyChange(who, name, "route_receipts", share_text(one), share_text(two), two < one)


def _erasure(old: Policy, new: Policy) -> Iterator[DutyChange]:
    one, two = old.erasure, new.erasure
    if one.within_us != two.within_us:
        said = span(one.within_us), span(two.within_us)
        yield DutyChange("every tenant", "erasure", "within", *said, two.within_us > one.within_us)
    if one.running is not two.running:
        yield DutyChange(
            "every tenant", "erasure", "running", one.running, two.running, two.running is OnRunning.FINISH
        )


def _obligations(old: DecisionTable, new: DecisionTable, tenant: str) -> Iterator[DutyChange]:
    both = (name for name in new.policy.classifications if name in old.policy.classifications)
    for name in both:
        one, two = old.obligations(tenant, old.level(name)), new.obligations(tenant, new.level(name))
        for field in Obligations._fields if one != two else ():
            before, after = getattr(one, field), getattr(two, field)
            if before != after and not (field in _IMPLIED and _is_by_default(one) and _is_by_default(two)):
                loosens: bool | None = field in looser_fields(two, one)
                if loosens and field in looser_fields(one, two):
                    loosens = None
                yield DutyChange(tenant, name, field, _said(field, before), _said(field, after), loosens)


def _affinity(old: DecisionTable, new: DecisionTable, tenant: str) -> Iterator[DutyChange]:
    """Rule 3."""
    one, two = (
        Affinity.PRIVATE if entry is None else entry.affinity for entry in (old.tenant(tenant), new.tenant(tenant))
    )
    if one is not two:
        yield DutyChange(tenant, PLACEMENT_CHANNEL, "affinity", one, two, two is Affinity.SEGMENT)


def _is_by_default(owed: Obligations) -> bool:
    """Whether the limits of tiers say nothing that tiers and retention do not."""
    running_us = min(owed.active_max_us, owed.absolute_us or owed.active_max_us)
    own = (owed.absolute_us, default_within_us(owed.absolute_us), running_us)
    limits = zip(owed.tier_absolute_us, owed.tier_within_us, owed.tier_running_us, strict=True)
    return all(limit == (own if tier in owed.tiers else (0, 0, 0)) for tier, limit in zip(Tier, limits, strict=True))


def _said(field: str, value: object) -> str:
    if field in _IMPLIED and isinstance(value, tuple):
        named = [f"{tier} {span(each)}" for tier, each in zip(Tier, value, strict=True) if each]
        return ", ".join(named) or "never"
    if isinstance(value, tuple):
        return ", ".join(value) or ("none" if field == "match" else "never")
    return span(value) if field.endswith("_us") and isinstance(value, int) else str(value)


def _distinct_tenants(one: Policy, other: Policy, tenants: tuple[str, ...]) -> list[str]:
    """The tenants whose classification or labels may differ from others', and one that stands for the rest."""
    named = {rule.tenant for policy in (one, other) for rule in policy.classify}
    named |= {tenant.id for policy in (one, other) for tenant in policy.tenants if tenant.labels}
    rest = [tenant for tenant in tenants if tenant not in named]
    return [*(tenant for tenant in tenants if tenant in named), *rest[:1]]


def _levels(old: DecisionTable, new: DecisionTable, tenant: str, route: str | None) -> Iterator[DutyChange]:
    before = old.policy.classifications[old.classify(tenant, route, None, None)]
    after = new.policy.classifications[new.classify(tenant, route, None, None)]
    if before == after:
        return
    common = [name for name in old.policy.classifications if name in new.policy.classifications]
    same_order = common == [name for name in new.policy.classifications if name in common]
    loosens = None
    if same_order and before in common and after in common:
        loosens = common.index(after) < common.index(before)
    yield DutyChange(tenant, route or "any route", "classification", before, after, loosens)


def _labels(old: DecisionTable, new: DecisionTable, tenant: str, route: str | None) -> Iterator[DutyChange]:
    before, after = old.labels(tenant, route), new.labels(tenant, route)
    if before != after:
        fewer, more = set(after) < set(before), set(after) > set(before)
        loosens = True if fewer else False if more else None
        yield DutyChange(tenant, route or "any route", "labels", _pairs(before), _pairs(after), loosens)


def _pairs(labels: Labels) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels) or "none"
