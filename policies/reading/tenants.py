"""Reading `tenants`, `groups` and `classify`: who is admitted, with what share, and at which classification.

1. Unlisted tenants are admitted only by `tenants.default`, which belongs to no group.
2. Guarantees, counted with the most unlisted tenants there may be, never exceed the pool.
3. In an isolating profile a tenant's guarantee is its cap, and nothing is borrowed.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from kvcustody.policies.document.model import (
    DEFAULT_TENANT,
    EVERY_TENANT,
    ClassifyRule,
    Offload,
    Profile,
    Retention,
    Scope,
    ScrubPolicy,
    TenantGroup,
    TenantPolicy,
)
from kvcustody.policies.document.problems import SourceMark, quote
from kvcustody.policies.document.yaml_nodes import Broken, MappingNode, Node, Scalar
from kvcustody.policies.reading.names import DeclaredNames
from kvcustody.policies.reading.obligations import (
    read_tenant_offload,
    read_tenant_retention,
    read_tenant_scrub,
)

PRIVATE_SCOPES = {scope.name.lower(): scope for scope in (Scope.SUBJECT, Scope.SESSION, Scope.TENANT)}
TENANTS_MAX = 10_000
CLASSIFY_MAX = 10_000


class TenantObligations(NamedTuple):
    """The policy-wide values that a tenant's entry is held against."""

    profile: Profile
    scope: Scope
    retention: tuple[Retention, ...]
    scrub: tuple[ScrubPolicy, ...]
    offload: tuple[Offload, ...]


def read_tenants(
    names: DeclaredNames, node: Node, owed: TenantObligations
) -> tuple[tuple[TenantPolicy, ...], TenantPolicy | None]:
    """The listed tenants in document order, and the entry for unlisted ones."""
    entries = names.fields.entries(node, "`tenants`")
    if isinstance(node, MappingNode) and not entries:
        names.fields.problems.add(node.mark, "KVP305", "`tenants` is empty")
    if len(entries) > TENANTS_MAX:
        names.fields.problems.add(
            node.mark, "KVP307", f"`tenants` has `{len(entries)}` entries, over {TENANTS_MAX}"
        )
    tenants = [_tenant(names, key, value, owed) for key, value in entries]
    once = Counter(tenant.id for tenant in tenants if tenant.id)
    for (key, _), tenant in zip(entries, tenants, strict=True):
        if once[tenant.id] > 1:
            names.fields.problems.add(key.mark, "KVP305", f"`tenants` lists {quote(key.text)} twice")
    default = next((tenant for tenant in tenants if tenant.id == DEFAULT_TENANT), None)
    _check_sum(names, node.mark, tenants)
    return tuple(tenant for tenant in tenants if tenant is not default), default


def _tenant(names: DeclaredNames, key: Scalar, node: Node, owed: TenantObligations) -> TenantPolicy:
    fields = names.fields
    unlisted = key.text == DEFAULT_TENANT
    name = DEFAULT_TENANT if unlisted else fields.tenant(key, "tenant")
    what = f"tenant {quote(key.text)}"
    optional = (
        "quota",
        "group",
        "scope",
        "labels",
        "residencies",
        "tenants_max",
        "retention",
        "scrub",
        "offload",
    )
    found = fields.mapping(node, what, (), optional)
    if unlisted and "group" in found:
        fields.problems.add(found["group"].mark, "KVP410", "`tenants.default` is in a group")
    if not unlisted and "tenants_max" in found:
        fields.problems.add(found["tenants_max"].mark, "KVP306", f"`tenants_max` does not apply to {what}")
    guaranteed, cap, borrow = _quota(names, found.get("quota"), what, node.mark, owed.profile)
    tenants_max = (
        fields.integer(found["tenants_max"], "`tenants_max`", 1, 100_000) if "tenants_max" in found else None
    )
    if unlisted and guaranteed and tenants_max is None:
        fields.problems.add(
            key.mark, "KVP608", "`tenants.default` guarantees a share to any number of tenants"
        )
    return TenantPolicy(
        id=name,
        group=fields.identifier(found["group"], "group") if "group" in found else None,
        guaranteed=guaranteed,
        cap=cap,
        borrow=borrow,
        scope=fields.choice(found["scope"], "`scope`", PRIVATE_SCOPES) if "scope" in found else owed.scope,
        labels=names.label_pairs(found["labels"]) if "labels" in found else (),
        residencies=_residencies(names, found.get("residencies")),
        tenants_max=tenants_max,
        retention=read_tenant_retention(names, found["retention"], owed.retention)
        if "retention" in found
        else (),
        scrub=read_tenant_scrub(names, found["scrub"], owed.scrub) if "scrub" in found else (),
        offload=read_tenant_offload(names, found["offload"], owed.offload) if "offload" in found else (),
        mark=key.mark,
    )


def _residencies(names: DeclaredNames, node: Node | None) -> int | None:
    return None if node is None else names.fields.integer(node, "`residencies`", 1, 10_000_000)


def _quota(
    names: DeclaredNames, node: Node | None, what: str, mark: SourceMark, profile: Profile
) -> tuple[Fraction, Fraction, bool]:
    """(guaranteed, cap, borrow); without a quota: nothing guaranteed, no cap, no borrowing."""
    fields = names.fields
    before = fields.problems.count
    found = (
        {} if node is None else fields.mapping(node, f"`quota` of {what}", ("guaranteed", "cap"), ("borrow",))
    )
    guaranteed = (
        fields.percentage(found["guaranteed"], "`guaranteed`") if "guaranteed" in found else Fraction(0)
    )
    cap = fields.percentage(found["cap"], "`cap`") if "cap" in found else Fraction(1)
    borrow = fields.boolean(found["borrow"], "`borrow`") if "borrow" in found else False
    if fields.problems.count > before:
        return Fraction(0), Fraction(1), False
    mark = mark if node is None else node.mark
    if guaranteed > cap:
        message = f"{what}: guaranteed `{percent(guaranteed)}` is over its cap `{percent(cap)}`"
        fields.problems.add(mark, "KVP602", message)
    elif profile.isolating and guaranteed != cap:
        shares = f"guaranteed `{percent(guaranteed)}` is not its cap `{percent(cap)}`"
        message = f"{what}: {shares} in profile `{profile}`"
        fields.problems.add(mark, "KVP603", message)
    if profile.isolating and borrow:
        fields.problems.add(found["borrow"].mark, "KVP606", f"{what} borrows in profile `{profile}`")
    return guaranteed, cap, borrow


def _check_sum(names: DeclaredNames, mark: SourceMark, tenants: list[TenantPolicy]) -> None:
    total = sum((tenant.guaranteed * (tenant.tenants_max or 1) for tenant in tenants), Fraction(0))
    if total > 1:
        names.fields.problems.add(mark, "KVP601", f"guaranteed shares add up to `{percent(total)}`")


def percent(share: Fraction) -> str:
    """A share as an exact percentage."""
    value = share * 100
    return f"{value.numerator}%" if value.denominator == 1 else f"{float(value):g}%"


def read_groups(
    names: DeclaredNames, node: Node, tenants: tuple[TenantPolicy, ...], profile: Profile
) -> tuple[TenantGroup, ...]:
    """The declared groups; each has a member, and no tenant is in an undeclared one."""
    fields = names.fields
    members = {tenant.group for tenant in tenants if tenant.group}
    groups = []
    for key, value in fields.entries(node, "`groups`"):
        name = names.claim(key, "group")
        what = f"group {quote(key.text)}"
        if name and name not in members:
            fields.problems.add(
                key.mark, "KVP407", f"{what} has no member", fields.problems.near(name, members)
            )
        found = fields.mapping(value, what, ("share",), ("at_most", "from", "until", "reason"))
        before = fields.problems.count
        share = fields.boolean(found["share"], "`share`") if "share" in found else False
        alone = not share and fields.problems.count == before and not isinstance(found.get("share"), Broken)
        if share and profile.isolating:
            fields.problems.add(found["share"].mark, "KVP607", f"{what} shares in profile `{profile}`")
        if share and "at_most" not in found:
            fields.problems.add(key.mark, "KVP302", f"{what} has no field `at_most`")
        for name_unused in ("at_most", "from", "until") if alone and "share" in found else ():
            if name_unused in found:
                message = f"`{name_unused}` does not apply to {what}, which does not share"
                fields.problems.add(found[name_unused].mark, "KVP306", message)
        at_most = names.level(found["at_most"], "`at_most`") if "at_most" in found else None
        start, end = read_period(names, found, what)
        reason = fields.text(found["reason"], "`reason`") if "reason" in found else ""
        groups.append(TenantGroup(name, at_most if share else None, start, end, reason, key.mark))
    declared = {group.id for group in groups}
    for tenant in tenants:
        if tenant.group and tenant.group not in declared:
            message = f"tenant {quote(tenant.id)} is in group {quote(tenant.group)}, which is not in `groups`"
            fields.problems.add(tenant.mark, "KVP407", message, fields.problems.near(tenant.group, declared))
    return tuple(groups)


def read_period(names: DeclaredNames, found: dict[str, Node], what: str) -> tuple[int | None, int | None]:
    """`from` and `until` as instants; the end is exclusive and must come later."""
    before = names.fields.problems.count
    start = names.fields.date_us(found["from"], "`from`") if "from" in found else None
    end = names.fields.date_us(found["until"], "`until`") if "until" in found else None
    if names.fields.problems.count == before and start is not None and end is not None and end <= start:
        names.fields.problems.add(found["until"].mark, "KVP406", f"{what} ends before it starts")
    return start, end


def read_classify(names: DeclaredNames, node: Node) -> tuple[ClassifyRule, ...]:
    """Default levels of tenants, levels that routes raise to, and labels."""
    fields = names.fields
    rules = []
    defaults: dict[str, SourceMark] = {}
    for item in fields.items(node, "`classify`", CLASSIFY_MAX):
        found = fields.mapping(item, "classify rule", ("tenant",), ("route", "as", "labels"))
        tenant = ""
        if "tenant" in found:
            value = found["tenant"]
            everyone = isinstance(value, Scalar) and value.text == EVERY_TENANT
            tenant = EVERY_TENANT if everyone else names.tenant(value, "tenant")
        if found and "as" not in found and "labels" not in found:
            fields.problems.add(item.mark, "KVP302", "classify rule has neither `as` nor `labels`")
        rule = ClassifyRule(
            tenant=tenant,
            route=fields.route(found["route"], "`route`") if "route" in found else None,
            level=names.level(found["as"], "`as`") if "as" in found else None,
            labels=names.label_pairs(found["labels"]) if "labels" in found else (),
            mark=item.mark,
        )
        if rule.route is None and rule.level is not None and tenant:
            if tenant in defaults:
                line = defaults[tenant].line
                message = f"tenant {quote(tenant)} already has a default classification on line {line}"
                fields.problems.add(item.mark, "KVP305", message)
            defaults.setdefault(tenant, item.mark)
        rules.append(rule)
    return tuple(rules)
