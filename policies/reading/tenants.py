"""Building `tenants`, `groups` and `classify`: who is admitted, with what share, and at which classification.

1. Unlisted tenants are admitted only by `tenants.default`, which belongs to no group. No tenant's name reads like
   `default`: as an entry of its own it would admit nobody.
2. Guarantees, counted with the most unlisted tenants there may be, never exceed the pool.
3. In an isolating profile a tenant's guarantee is its cap, and nothing is borrowed.
"""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from fractions import Fraction
from typing import NamedTuple

from kvcustody.policies.document.model import (
    DEFAULT_TENANT,
    EVERY_TENANT,
    Affinity,
    ClassifyRule,
    IntegrityPolicy,
    Offload,
    Retention,
    Scope,
    ScrubPolicy,
    TenantGroup,
    TenantPolicy,
)
from kvcustody.policies.document.problems import SourceMark, quote
from kvcustody.policies.document.yaml_nodes import MappingNode, Scalar
from kvcustody.policies.reading.fields import sound
from kvcustody.policies.reading.names import DeclaredNames
from kvcustody.policies.reading.obligations import (
    INTEGRITY,
    OFFLOAD,
    RETENTION,
    SCRUB,
    tenants_own,
    tenants_receipt_shares,
    tenants_retention,
)
from kvcustody.policies.reading.sections import PolicyDocument, TenantEntry, percent

_LIKE_DEFAULT, _LIKE_LETTERS = 0.8, 3  # `defualt`, `defaults`, `defalt`


class TenantObligations(NamedTuple):
    """The policy-wide values that a tenant's entry is held against."""

    retention: tuple[Retention, ...]
    scrub: tuple[ScrubPolicy, ...]
    offload: tuple[Offload, ...]
    integrity: tuple[IntegrityPolicy, ...]
    route_receipts: tuple[Fraction, ...]


def build_tenants(
    names: DeclaredNames, document: PolicyDocument, owed: TenantObligations
) -> tuple[tuple[TenantPolicy, ...], TenantPolicy | None]:
    """The listed tenants in document order, and the entry for unlisted ones."""
    keys = document.keys_of("tenants")
    tenants = [_tenant(names, document, key, document.tenants[key.text], owed) for key in keys]
    once = Counter(tenant.id for tenant in tenants if tenant.id)
    for key, tenant in zip(keys, tenants, strict=True):
        if once[tenant.id] > 1:
            names.problems.add(key.mark, "KVP305", f"`tenants` lists {quote(key.text)} twice")
        if key.text != DEFAULT_TENANT and _reads_like_default(key.text):
            message = f"tenant {quote(key.text)} reads like `{DEFAULT_TENANT}`, which is every unlisted tenant"
            names.problems.add(key.mark, "KVP207", message, f"write `{DEFAULT_TENANT}`, or choose another name")
    total = sum((tenant.guaranteed * (tenant.tenants_max or 1) for tenant in tenants), Fraction(0))
    if total > 1:
        message = f"guaranteed shares add up to `{percent(total)}`"
        names.problems.add(document.at("tenants"), "KVP601", message)
    default = next((tenant for tenant in tenants if tenant.id == DEFAULT_TENANT), None)
    return tuple(tenant for tenant in tenants if tenant is not default), default


def _reads_like_default(name: str) -> bool:
    """Whether somebody who wrote this meant the entry of unlisted tenants: as one, it would admit nobody."""
    near = abs(len(name) - len(DEFAULT_TENANT)) <= _LIKE_LETTERS
    return near and bool(get_close_matches(DEFAULT_TENANT, [name.lower()], cutoff=_LIKE_DEFAULT))


def _tenant(
    names: DeclaredNames, document: PolicyDocument, key: Scalar, entry: TenantEntry, owed: TenantObligations
) -> TenantPolicy:
    what = f"tenant {quote(key.text)}"
    unlisted = key.text == DEFAULT_TENANT
    if unlisted and entry.group is not None:
        names.problems.add(entry.at("group"), "KVP410", "`tenants.default` is in a group")
    if not unlisted and entry.tenants_max is not None:
        message = f"`tenants_max` does not apply to {what}"
        names.problems.add(entry.at("tenants_max"), "KVP306", message)
    quota = entry.quota
    guaranteed, cap = (quota.guaranteed, quota.cap) if quota else (Fraction(0), Fraction(1))
    if document.profile.isolating:
        if guaranteed != cap and sound(entry.node.get("quota")):
            shares = f"guaranteed `{percent(guaranteed)}` is not its cap `{percent(cap)}`"
            message = f"{what}: {shares} in profile `{document.profile}`"
            names.problems.add(entry.at("quota"), "KVP603", message)
        if quota and quota.borrow:
            message = f"{what} borrows in profile `{document.profile}`"
            names.problems.add(quota.at("borrow"), "KVP606", message)
    if unlisted and guaranteed and "tenants_max" not in entry.model_fields_set:
        message = "`tenants.default` guarantees a share to any number of tenants"
        names.problems.add(key.mark, "KVP608", message)
    retention = tenants_own(names, document, entry, RETENTION, owed.retention)
    kept = tenants_retention(owed.retention, retention)
    return TenantPolicy(
        id=names.tenants[key.text],
        group=entry.group.text if entry.group else None,
        guaranteed=guaranteed,
        cap=cap,
        borrow=bool(quota and quota.borrow),
        scope=default_scope(document) if entry.scope is None else entry.scope,
        affinity=entry.affinity or document.affinity or Affinity.PRIVATE,
        labels=names.label_pairs(entry, entry.labels),
        residencies=entry.residencies,
        tenants_max=entry.tenants_max,
        retention=retention,
        scrub=tenants_own(names, document, entry, SCRUB, owed.scrub),
        offload=tenants_own(names, document, entry, OFFLOAD, owed.offload, kept),
        integrity=tenants_own(names, document, entry, INTEGRITY, owed.integrity),
        route_receipts=tenants_receipt_shares(names, entry, owed.route_receipts),
        mark=key.mark,
    )


def default_scope(document: PolicyDocument) -> Scope:
    """The private scope of tenants that set none."""
    return Scope.SUBJECT if document.scope is None else document.scope


def build_groups(
    names: DeclaredNames, document: PolicyDocument, tenants: tuple[TenantPolicy, ...]
) -> tuple[TenantGroup, ...]:
    """The declared groups; each has a member, and no tenant is in an undeclared one."""
    members = {tenant.group for tenant in tenants if tenant.group}
    groups = []
    for key in document.keys_of("groups"):
        entry = document.groups[key.text]
        name = names.claim_key(key, "group")
        what = f"group {quote(key.text)}"
        if name and name not in members:
            hint = names.problems.near(name, members)
            names.problems.add(key.mark, "KVP407", f"{what} has no member", hint)
        if entry.share and document.profile.isolating:
            message = f"{what} shares in profile `{document.profile}`"
            names.problems.add(entry.at("share"), "KVP607", message)
        level = names.level(entry.at_most, "`at_most`")
        at_most = level if entry.share else None
        crosses = names.label_names(entry.crosses, what)
        ends = (entry.start_us, entry.until_us)
        groups.append(TenantGroup(name, at_most, *ends, entry.reason, crosses, key.mark))
    declared = {group.id for group in groups}
    for tenant in tenants if isinstance(document.node.get("groups"), MappingNode) else ():
        if tenant.group and tenant.group not in declared:
            message = f"tenant {quote(tenant.id)} is in group {quote(tenant.group)}, which is not in `groups`"
            hint = names.problems.near(tenant.group, declared)
            names.problems.add(tenant.mark, "KVP407", message, hint)
    return tuple(groups)


def build_classify(names: DeclaredNames, document: PolicyDocument) -> tuple[ClassifyRule, ...]:
    """Default levels of tenants, levels that routes raise to, and labels."""
    rules = []
    defaults: dict[str, SourceMark] = {}
    for entry in document.classify:
        everyone = entry.tenant.text == EVERY_TENANT
        rule = ClassifyRule(
            tenant=EVERY_TENANT if everyone else names.tenant(entry.tenant, "tenant"),
            route=entry.route,
            level=None if entry.level is None else names.level(entry.level, "`as`"),
            labels=names.label_pairs(entry, entry.labels),
            mark=entry.mark,
        )
        if rule.route is None and rule.level is not None and rule.tenant:
            first = defaults.setdefault(rule.tenant, entry.mark)
            if first is not entry.mark:
                message = f"tenant {quote(rule.tenant)} already has a default classification on line {first.line}"
                names.problems.add(entry.mark, "KVP305", message)
        rules.append(rule)
    return tuple(rules)
