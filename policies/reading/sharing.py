"""Building `segments`, `grants`, `rules` and `placement`: everything that may open, or close, a domain or a worker.

1. A grant names one owner and one reader; there is no grant for everybody, and every grant ends.
2. A permit rule stays inside a tenant and gives only reuse, export or administration; the rest follows from sections.
3. In an isolating profile no grant and no segment crosses a tenant boundary.
"""

from __future__ import annotations

from collections import Counter

from kvcustody.policies.document.model import (
    EVERY_TENANT,
    Grant,
    PlacementRule,
    Profile,
    Relation,
    Rule,
    RuleEffect,
    SegmentRule,
    Via,
)
from kvcustody.policies.document.problems import quote
from kvcustody.policies.document.yaml_nodes import Scalar
from kvcustody.policies.reading.fields import sound
from kvcustody.policies.reading.names import DeclaredNames
from kvcustody.policies.reading.sections import (
    PERMITTED,
    GrantEntry,
    LevelRange,
    PolicyDocument,
    RuleEntry,
    SegmentEntry,
    WhenTerms,
)

SEGMENTS_MAX_PER_TENANT = 16


def build_segments(names: DeclaredNames, document: PolicyDocument) -> tuple[SegmentRule, ...]:
    """The declared segments; a tenant matches at most sixteen."""
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
    """The named grants."""
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
    """The permit and forbid rules."""
    return tuple(_rule(names, entry) for entry in document.rules)


def build_placement(names: DeclaredNames, document: PolicyDocument) -> tuple[PlacementRule, ...]:
    """Which groups of workers alone may serve whose requests."""
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
    told = f"rule {quote(rule.id)} permits"
    for action in rule.actions:
        if action not in PERMITTED:
            message = f"{told} `{action.name.lower()}`, which follows from other sections"
            names.problems.add(entry.at("action"), "KVP408", message)
    if rule.via is not None and rule.via != (Via.OWN,):
        names.problems.add(entry.at("when", "via"), "KVP409", f"{told} by `grant` or `segment`")
    if rule.relation is Relation.SAME_GROUP:
        names.problems.add(entry.at("when", "reader"), "KVP409", f"{told} a whole group")
    elif rule.readers and rule.owners and not set(rule.readers) & set(rule.owners):
        message = f"{told} `{rule.readers[0]}` to reach `{rule.owners[0]}`"
        names.problems.add(entry.at("when", "owner"), "KVP409", message)


def _tenants(names: DeclaredNames, listed: tuple[Scalar, ...], what: str) -> tuple[str, ...]:
    return tuple(names.tenant(tenant, what) for tenant in listed)


def _levels(names: DeclaredNames, said: LevelRange | tuple[Scalar, ...]) -> tuple[int, ...]:
    """Exact, list, `at_most` or `at_least`, lowered to the set of levels."""
    if isinstance(said, tuple):
        return tuple(sorted({names.level(level, "classification") for level in said}))
    low = names.level(said.at_least, "`at_least`")
    high = names.level(said.at_most, "`at_most`") if said.at_most else len(names.levels) - 1
    if low > high >= 0 and sound(said.node):
        message = "`classification` is empty: `at_least` is above `at_most`"
        names.problems.add(said.mark, "KVP305", message)
    return tuple(range(low, high + 1))
