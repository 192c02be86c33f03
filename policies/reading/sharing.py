"""Reading `segments`, `grants` and `rules`: everything that may open, or close, a domain.

1. A grant names one owner and one reader; there is no grant for everybody, and every grant ends.
2. A permit rule stays inside a tenant and gives only reuse, export or administration; the rest follows from sections.
3. In an isolating profile no grant and no segment crosses a tenant boundary.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from kvcustody.policies.document.model import (
    EVERY_TENANT,
    Action,
    Grant,
    Profile,
    Relation,
    Rule,
    RuleEffect,
    SegmentRule,
    Via,
)
from kvcustody.policies.document.problems import quote
from kvcustody.policies.document.yaml_nodes import MappingNode, Node, Scalar, SequenceNode
from kvcustody.policies.reading.names import DeclaredNames
from kvcustody.policies.reading.tenants import read_period

T = TypeVar("T")

ENTRIES_MAX = 10_000
SEGMENTS_MAX_PER_TENANT = 16
TOKENS_MAX = 10_000_000
PERMITTED = (Action.REUSE, Action.EXPORT, Action.ADMINISTER)
_ACTIONS = {action.name.lower(): action for action in Action}
_VIAS = {via.name.lower(): via for via in Via}
_EFFECTS = {effect.value: effect for effect in RuleEffect}
_RELATIONS = {relation.value: relation for relation in Relation}


def read_segments(names: DeclaredNames, node: Node, profile: Profile) -> tuple[SegmentRule, ...]:
    """The declared segments; a tenant matches at most sixteen."""
    items = names.fields.items(node, "`segments`", ENTRIES_MAX)
    segments = [(item, _segment(names, item, profile)) for item in items]
    everyone = sum(1 for _, segment in segments if segment.tenants is None)
    readers = Counter(tenant for _, segment in segments for tenant in segment.tenants or ())
    over = {tenant for tenant, count in readers.items() if count + everyone > SEGMENTS_MAX_PER_TENANT}
    if everyone > SEGMENTS_MAX_PER_TENANT:
        over.add(EVERY_TENANT)
    for tenant in sorted(over):
        count = readers[tenant] + everyone
        message = f"tenant {quote(tenant)} matches `{count}` segments, over {SEGMENTS_MAX_PER_TENANT}"
        names.fields.problems.add(node.mark, "KVP411", message)
    return tuple(segment for _, segment in segments)


def _segment(names: DeclaredNames, node: Node, profile: Profile) -> SegmentRule:
    fields = names.fields
    required = ("id", "owner", "tenants", "digest", "tokens", "classification")
    found = fields.mapping(node, "segment", required, ("model", "expires"))
    owner = names.tenant(found["owner"], "owner") if "owner" in found else ""
    tenants = _segment_tenants(names, found["tenants"]) if "tenants" in found else ()
    segment = SegmentRule(
        id=names.claim(found["id"], "segment") if "id" in found else "",
        owner=owner,
        tenants=tenants,
        digest=fields.digest(found["digest"], "`digest`", "hmac:") if "digest" in found else "",
        tokens=fields.integer(found["tokens"], "`tokens`", 1, TOKENS_MAX) if "tokens" in found else 1,
        level=names.level(found["classification"], "`classification`") if "classification" in found else 0,
        model=fields.digest(found["model"], "`model`", "sha256:") if "model" in found else None,
        expires_us=fields.date_us(found["expires"], "`expires`") if "expires" in found else None,
        mark=node.mark,
    )
    crosses = "tenants" in found and (
        tenants is None or any(tenant and tenant != owner for tenant in tenants)
    )
    if crosses and profile.isolating:
        message = f"segment {quote(segment.id)} reaches beyond its owner in profile `{profile}`"
        fields.problems.add(found["tenants"].mark, "KVP605", message)
    elif crosses and "expires" not in found:
        fields.problems.add(
            node.mark, "KVP412", f"segment {quote(segment.id)} reaches beyond its owner without an end"
        )
    return segment


def _segment_tenants(names: DeclaredNames, node: Node) -> tuple[str, ...] | None:
    if isinstance(node, Scalar) and node.text == EVERY_TENANT:
        return None
    if not isinstance(node, SequenceNode):
        names.fields.items(node, '`tenants` (a list, or `"*"` for all)', ENTRIES_MAX)
        return ()
    return names.fields.words(node, "`tenants`", lambda item: names.tenant(item, "tenant"))


def read_grants(names: DeclaredNames, node: Node, profile: Profile) -> tuple[Grant, ...]:
    """The named grants."""
    return tuple(_grant(names, item, profile) for item in names.fields.items(node, "`grants`", ENTRIES_MAX))


def _grant(names: DeclaredNames, node: Node, profile: Profile) -> Grant:
    fields = names.fields
    found = fields.mapping(node, "grant", ("id", "owner", "reader", "at_most", "until", "reason"), ("from",))
    name = names.claim(found["id"], "grant") if "id" in found else ""
    parties = {}
    for role in ("owner", "reader"):
        value = found.get(role)
        if isinstance(value, Scalar) and value.text in (EVERY_TENANT, "default", "all", "any"):
            fields.problems.add(
                value.mark, "KVP404", f"{role} {quote(value.text)} of grant {quote(name)} is a wildcard"
            )
        elif value is not None:
            parties[role] = names.tenant(value, role)
    owner, reader = parties.get("owner", ""), parties.get("reader", "")
    if owner and owner == reader:
        fields.problems.add(
            found["reader"].mark, "KVP405", f"grant {quote(name)} lets {quote(owner)} read itself"
        )
    elif profile.isolating:
        fields.problems.add(
            node.mark, "KVP604", f"grant {quote(name)} crosses tenants in profile `{profile}`"
        )
    start, end = read_period(names, found, f"grant {quote(name)}")
    return Grant(
        id=name,
        owner=owner,
        reader=reader,
        at_most=names.level(found["at_most"], "`at_most`") if "at_most" in found else 0,
        from_us=start,
        until_us=end,
        reason=fields.text(found["reason"], "`reason`") if "reason" in found else "",
        mark=node.mark,
    )


def read_rules(names: DeclaredNames, node: Node) -> tuple[Rule, ...]:
    """The permit and forbid rules."""
    return tuple(_rule(names, item) for item in names.fields.items(node, "`rules`", ENTRIES_MAX))


def _rule(names: DeclaredNames, node: Node) -> Rule:
    fields = names.fields
    before = fields.problems.count
    found = fields.mapping(node, "rule", ("id", "effect", "action"), ("when", "reason"))
    name = names.claim(found["id"], "rule") if "id" in found else ""
    what = f"`when` of rule {quote(name)}"
    when = (
        fields.mapping(found["when"], what, (), ("reader", "owner", "classification", "via"))
        if "when" in found
        else {}
    )
    relation, readers = _readers(names, when["reader"]) if "reader" in when else (None, None)
    rule = Rule(
        id=name,
        effect=fields.choice(found["effect"], "`effect`", _EFFECTS)
        if "effect" in found
        else RuleEffect.FORBID,
        actions=_choices(names, found.get("action"), "`action`", _ACTIONS) or (),
        readers=readers,
        relation=relation,
        owners=fields.words(when["owner"], "`owner`", lambda n: names.tenant(n, "owner"))
        if "owner" in when
        else None,
        levels=_levels(names, when["classification"]) if "classification" in when else None,
        via=_choices(names, when.get("via"), "`via`", _VIAS),
        reason=fields.text(found["reason"], "`reason`") if "reason" in found else "",
        mark=node.mark,
    )
    if rule.effect is RuleEffect.PERMIT and fields.problems.count == before:
        _check_permit(names, rule, found, when)
    return rule


def _check_permit(names: DeclaredNames, rule: Rule, found: dict[str, Node], when: dict[str, Node]) -> None:
    for action in rule.actions:
        if action not in PERMITTED:
            message = (
                f"rule {quote(rule.id)} permits `{action.name.lower()}`, which follows from other sections"
            )
            names.fields.problems.add(found["action"].mark, "KVP408", message)
    if rule.via is not None and rule.via != (Via.OWN,):
        names.fields.problems.add(
            when["via"].mark, "KVP409", f"rule {quote(rule.id)} permits by `grant` or `segment`"
        )
    if rule.relation is Relation.SAME_GROUP:
        names.fields.problems.add(
            when["reader"].mark, "KVP409", f"rule {quote(rule.id)} permits a whole group"
        )
    elif rule.readers and rule.owners and not set(rule.readers) & set(rule.owners):
        message = f"rule {quote(rule.id)} permits `{rule.readers[0]}` to reach `{rule.owners[0]}`"
        names.fields.problems.add(when["owner"].mark, "KVP409", message)


def _readers(names: DeclaredNames, node: Node) -> tuple[Relation | None, tuple[str, ...] | None]:
    if isinstance(node, Scalar) and node.text in _RELATIONS:
        return _RELATIONS[node.text], None
    return None, names.fields.words(node, "`reader`", lambda item: names.tenant(item, "reader"))


def _levels(names: DeclaredNames, node: Node) -> tuple[int, ...]:
    """Exact, list, `at_most` or `at_least`, lowered to the set of levels."""
    if not isinstance(node, MappingNode):
        words = names.fields.words(node, "`classification`", lambda item: names.level(item, "classification"))
        return tuple(sorted(set(words)))
    found = names.fields.mapping(node, "`classification`", (), ("at_most", "at_least"))
    if isinstance(node, MappingNode) and not node.entries:
        names.fields.problems.add(node.mark, "KVP305", "`classification` is empty")
    low = names.level(found["at_least"], "`at_least`") if "at_least" in found else 0
    high = names.level(found["at_most"], "`at_most`") if "at_most" in found else len(names.levels) - 1
    if low > high >= 0:
        names.fields.problems.add(
            node.mark, "KVP305", "`classification` is empty: `at_least` is above `at_most`"
        )
    return tuple(range(low, high + 1))


def _choices(
    names: DeclaredNames, node: Node | None, what: str, choices: dict[str, T]
) -> tuple[T, ...] | None:
    if node is None:
        return None
    return names.fields.words(node, what, lambda item: names.fields.choice(item, what, choices))
