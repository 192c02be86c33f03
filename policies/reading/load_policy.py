"""Load a policy document: text in, a complete typed `Policy` out, or every problem with its place.

1. `load_policy` returns a policy only when its document had no problem at all; otherwise it raises `PolicyRejected`.
2. It reads no clock, file or environment: equal text gives an equal policy with an equal digest.
3. A grant names one owner and one reader. No grant covers everybody, and every grant ends.
4. A permit rule stays inside a tenant and gives only reuse, export or administration; sections decide the rest.
5. In an isolating profile no grant and no segment crosses a tenant boundary.
6. Unlisted tenants are admitted only by `tenants.default`, which belongs to no group. A tenant whose name resembles
   `default` is a problem: such an entry would admit nobody.
7. Guarantees, counted with the maximum number of unlisted tenants, never exceed the pool.
8. In an isolating profile a tenant's guarantee is its cap, and nothing is borrowed.
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
    ContentKind,
    ErasureDuty,
    Eviction,
    EvictionKind,
    EvictionSignal,
    Grant,
    IntegrityPolicy,
    LearnedFrom,
    Offload,
    PlacementRule,
    Policy,
    Profile,
    Relation,
    Retention,
    Rule,
    RuleEffect,
    Scope,
    ScrubPolicy,
    SegmentRule,
    TenantGroup,
    TenantPolicy,
    TokenRange,
    Via,
)
from kvcustody.policies.document.problems import Problems, SourceMark, quote
from kvcustody.policies.document.yaml_nodes import MappingNode, Scalar, parse
from kvcustody.policies.reading.fields import read_section, sound
from kvcustody.policies.reading.names import DeclaredNames
from kvcustody.policies.reading.obligations import (
    INTEGRITY,
    OFFLOAD,
    RETENTION,
    SCRUB,
    after_deaths,
    outages,
    policy_wide,
    receipt_shares,
    tenants_own,
    tenants_receipt_shares,
    tenants_retention,
)
from kvcustody.policies.reading.sections import (
    HITS_DEFAULT,
    PERMITTED,
    PRIORITY_DEFAULT,
    ErasureSection,
    GrantEntry,
    LevelRange,
    PolicyDocument,
    RuleEntry,
    SegmentEntry,
    TenantEntry,
    WhenTerms,
    percent,
)

SEGMENTS_MAX_PER_TENANT = 16


_LIKE_DEFAULT, _LIKE_LETTERS = 0.8, 3  # `defualt`, `defaults`, `defalt`


def load_policy(text: str | bytes, *, name: str) -> Policy:
    """Return the policy in `text`; problems refer to the document as `name`. Raises `PolicyRejected`."""
    problems = Problems(name)
    root = parse(text, problems)
    policy = None
    if root is not None:
        document = read_section(PolicyDocument, root, problems)
        policy = _policy(document, problems, text if isinstance(text, str) else text.decode())
    problems.raise_if_any()
    assert policy is not None, "a document without a root has a problem"
    return policy


def _policy(document: PolicyDocument, problems: Problems, source: str) -> Policy:
    names = DeclaredNames(document, problems)
    retention = policy_wide(names, document, RETENTION)
    owed = TenantObligations(
        retention,
        policy_wide(names, document, SCRUB),
        policy_wide(names, document, OFFLOAD, retention),
        policy_wide(names, document, INTEGRITY),
        receipt_shares(names, document),
    )
    tenants, default = build_tenants(names, document, owed)
    return Policy(
        name=document.name.text,
        description=document.description,
        profile=document.profile,
        classifications=tuple(names.levels),
        scope=default_scope(document),
        labels=tuple(sorted((label, tuple(sorted(values))) for label, values in names.labels.items())),
        classify=build_classify(names, document),
        tenants=tenants,
        default=default,
        groups=build_groups(names, document, tenants),
        segments=build_segments(names, document),
        grants=build_grants(names, document),
        rules=build_rules(names, document),
        retention=owed.retention,
        scrub=owed.scrub,
        offload=owed.offload,
        outage=outages(names, document),
        eviction=_eviction(document, names),
        erasure=_erasure(document.erasure),
        integrity=owed.integrity,
        placement=build_placement(names, document),
        on_worker_death=after_deaths(names, document),
        route_receipts=owed.route_receipts,
        issuers=names.issuers,
        file=problems.file,
        source=source,
        mark=SourceMark(1, 1),
    )


def _eviction(document: PolicyDocument, names: DeclaredNames) -> Eviction:
    section, contents = document.eviction, names.contents
    if section is None:
        return Eviction(EvictionKind.LRU)
    ranges = tuple(TokenRange(r.start, r.until, r.priority, r.for_us, r.mark) for r in section.ranges)
    priority, hits = section.priority, section.hits
    if section.policy is EvictionKind.PRIORITY and priority is None:
        priority = PRIORITY_DEFAULT
    if section.policy is EvictionKind.SLRU and hits is None:
        hits = HITS_DEFAULT
    kinds = tuple(ContentKind(name, section.kinds[name], contents[name]) for name in sorted(section.kinds))
    signals, learned = section.signals, section.learned
    if section.policy is EvictionKind.VALUE:
        signals, learned = signals or tuple(EvictionSignal), learned or LearnedFrom.TENANT
    if learned is LearnedFrom.POOL and document.profile.isolating:
        message = f"eviction learns from every tenant's think times in profile `{document.profile}`"
        names.problems.add(section.at("learned"), "KVP610", message)
    return Eviction(
        section.policy,
        priority,
        ranges,
        section.protected,
        hits,
        kinds,
        tuple(sorted(signals)),
        learned,
        section.mark,
    )


def _erasure(section: ErasureSection | None) -> ErasureDuty:
    duty = ErasureDuty()
    if section is None:
        return duty
    within = duty.within_us if section.within is None else section.within
    return ErasureDuty(within, section.running or duty.running, section.mark)


# -- segments, grants, rules and placement -----------------------------------------------------------------------------


def build_segments(names: DeclaredNames, document: PolicyDocument) -> tuple[SegmentRule, ...]:
    """Return the declared segments; a tenant matches at most sixteen."""
    segments = tuple(_segment(names, entry, document.profile) for entry in document.segments)
    everyone = sum(1 for segment in segments if segment.tenants is None)
    readers = Counter(tenant for segment in segments for tenant in segment.tenants or () if tenant)
    over = {tenant for tenant, count in readers.items() if count + everyone > SEGMENTS_MAX_PER_TENANT}
    if everyone > SEGMENTS_MAX_PER_TENANT:
        over.add(EVERY_TENANT)
    for tenant in sorted(over):
        count = readers[tenant] + everyone
        message = f"tenant {quote(tenant)} matches `{count}` segments, over {SEGMENTS_MAX_PER_TENANT}"
        names.problems.add(document.at("segments"), "KVP411", message)
    return segments


def _segment(names: DeclaredNames, entry: SegmentEntry, profile: Profile) -> SegmentRule:
    owner = names.tenant(entry.owner, "owner")
    tenants = None if entry.tenants is None else _tenants(names, entry.tenants, "tenant")
    if tenants is None or any(tenant and owner and tenant != owner for tenant in tenants):
        reaches = f"segment {quote(entry.id.text)} reaches beyond its owner"
        if profile.isolating:
            names.problems.add(entry.at("tenants"), "KVP605", f"{reaches} in profile `{profile}`")
        elif "expires" not in entry.model_fields_set:
            names.problems.add(entry.mark, "KVP412", f"{reaches} without an end")
    return SegmentRule(
        id=names.claim(entry.id, "segment"),
        owner=owner,
        tenants=tenants,
        digest=entry.digest,
        tokens=entry.tokens,
        level=names.level(entry.classification, "`classification`"),
        model=entry.model,
        expires_us=entry.expires,
        content=names.content(entry.kind, f"segment {quote(entry.id.text)}"),
        crosses=names.label_names(entry.crosses, f"segment {quote(entry.id.text)}"),
        mark=entry.mark,
    )


def build_grants(names: DeclaredNames, document: PolicyDocument) -> tuple[Grant, ...]:
    """Return the named grants."""
    return tuple(_grant(names, entry, document.profile) for entry in document.grants)


def _grant(names: DeclaredNames, entry: GrantEntry, profile: Profile) -> Grant:
    name = names.claim(entry.id, "grant")
    owner, reader = names.tenant(entry.owner, "owner"), names.tenant(entry.reader, "reader")
    if owner and owner == reader:
        message = f"grant {quote(name)} lets {quote(owner)} read itself"
        names.problems.add(entry.at("reader"), "KVP405", message)
    elif profile.isolating:
        names.problems.add(entry.mark, "KVP604", f"grant {quote(name)} crosses tenants in profile `{profile}`")
    return Grant(
        id=name,
        owner=owner,
        reader=reader,
        at_most=names.level(entry.at_most, "`at_most`"),
        from_us=entry.start_us,
        until_us=entry.until_us,
        reason=entry.reason,
        crosses=names.label_names(entry.crosses, f"grant {quote(entry.id.text)}"),
        mark=entry.mark,
    )


def build_rules(names: DeclaredNames, document: PolicyDocument) -> tuple[Rule, ...]:
    """Return the permit and forbid rules."""
    return tuple(_rule(names, entry) for entry in document.rules)


def build_placement(names: DeclaredNames, document: PolicyDocument) -> tuple[PlacementRule, ...]:
    """Return the placement rules: which groups of workers may serve which requests."""
    return tuple(
        PlacementRule(
            id=names.claim(entry.id, "placement rule"),
            groups=tuple(sorted(group.text for group in entry.groups)),
            tenants=None if entry.tenants is None else _tenants(names, entry.tenants, "tenant"),
            labels=names.label_pairs(entry, entry.labels),
            levels=None if entry.classification is None else _levels(names, entry.classification),
            dedicated=bool(entry.dedicated),
            reason=entry.reason,
            mark=entry.mark,
        )
        for entry in document.placement
    )


def _rule(names: DeclaredNames, entry: RuleEntry) -> Rule:
    before = names.problems.count
    name = names.claim(entry.id, "rule")
    when = entry.when or WhenTerms.model_construct()
    relation = when.reader if isinstance(when.reader, Relation) else None
    readers = _tenants(names, when.reader, "reader") if isinstance(when.reader, tuple) else None
    rule = Rule(
        id=name,
        effect=entry.effect,
        actions=entry.action,
        readers=readers,
        relation=relation,
        owners=None if when.owner is None else _tenants(names, when.owner, "owner"),
        levels=None if when.classification is None else _levels(names, when.classification),
        via=when.via,
        reason=entry.reason,
        mark=entry.mark,
    )
    if rule.effect is RuleEffect.PERMIT and names.problems.count == before and sound(entry.node):
        _check_permit(names, rule, entry)
    return rule


def _check_permit(names: DeclaredNames, rule: Rule, entry: RuleEntry) -> None:
    rule_permits = f"rule {quote(rule.id)} permits"
    for action in rule.actions:
        if action not in PERMITTED:
            message = f"{rule_permits} `{action.name.lower()}`, which follows from other sections"
            names.problems.add(entry.at("action"), "KVP408", message)
    if rule.via is not None and rule.via != (Via.OWN,):
        names.problems.add(entry.at("when", "via"), "KVP409", f"{rule_permits} by `grant` or `segment`")
    if rule.relation is Relation.SAME_GROUP:
        names.problems.add(entry.at("when", "reader"), "KVP409", f"{rule_permits} a whole group")
    elif rule.readers and rule.owners and not set(rule.readers) & set(rule.owners):
        message = f"{rule_permits} `{rule.readers[0]}` to reach `{rule.owners[0]}`"
        names.problems.add(entry.at("when", "owner"), "KVP409", message)


def _tenants(names: DeclaredNames, listed: tuple[Scalar, ...], what: str) -> tuple[str, ...]:
    return tuple(names.tenant(tenant, what) for tenant in listed)


def _levels(names: DeclaredNames, levels: LevelRange | tuple[Scalar, ...]) -> tuple[int, ...]:
    """Exact, list, `at_most` or `at_least`, lowered to the set of levels."""
    if isinstance(levels, tuple):
        return tuple(sorted({names.level(level, "classification") for level in levels}))
    low = names.level(levels.at_least, "`at_least`")
    high = names.level(levels.at_most, "`at_most`") if levels.at_most else len(names.levels) - 1
    if low > high >= 0 and sound(levels.node):
        message = "`classification` is empty: `at_least` is above `at_most`"
        names.problems.add(levels.mark, "KVP305", message)
    return tuple(range(low, high + 1))


# -- tenants, groups and classification --------------------------------------------------------------------------------


class TenantObligations(NamedTuple):
    """The policy-wide obligations with which a tenant's entry is compared."""

    retention: tuple[Retention, ...]
    scrub: tuple[ScrubPolicy, ...]
    offload: tuple[Offload, ...]
    integrity: tuple[IntegrityPolicy, ...]
    route_receipts: tuple[Fraction, ...]


def build_tenants(
    names: DeclaredNames, document: PolicyDocument, owed: TenantObligations
) -> tuple[tuple[TenantPolicy, ...], TenantPolicy | None]:
    """Return the listed tenants in document order, and the entry for unlisted ones."""
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
    """Return whether the name looks like a misspelt `default`; as a tenant's own entry it would admit nobody."""
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
    effective_retention = tenants_retention(owed.retention, retention)
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
        offload=tenants_own(names, document, entry, OFFLOAD, owed.offload, effective_retention),
        integrity=tenants_own(names, document, entry, INTEGRITY, owed.integrity),
        route_receipts=tenants_receipt_shares(names, entry, owed.route_receipts),
        mark=key.mark,
    )


def default_scope(document: PolicyDocument) -> Scope:
    """Return the private scope of tenants that do not set one."""
    return Scope.SUBJECT if document.scope is None else document.scope


def build_groups(
    names: DeclaredNames, document: PolicyDocument, tenants: tuple[TenantPolicy, ...]
) -> tuple[TenantGroup, ...]:
    """Return the declared groups. Each has a member, and no tenant is in an undeclared group."""
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
    """Return the tenants' default levels, the levels that routes raise to, and the labels."""
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
