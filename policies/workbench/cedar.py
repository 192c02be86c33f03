"""Export a policy to Cedar: the same decisions in another language, for reviewers and as an independent oracle.

1. Every statement carries the id that our decision would name; the effect of any well-formed request is the same.
2. A grant or segment permits nothing across labels that differ on every route. A tenant has the labels of all its
   requests as `labels`, and those of any of them as `labels_any`.
3. Written from the declarations, not from the table. Principal is the reader, resource the owner; level, scope, way,
   instant, source and tier (of `offload`) are context. Tenants are entities, unlisted ones too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.model import (
    EVERY_TENANT,
    Action,
    Grant,
    Policy,
    Relation,
    Rule,
    RuleEffect,
    Scope,
    SegmentRule,
    TenantPolicy,
    Tier,
    Via,
)
from kvcustody.policies.table.obligations import obligations_of
from kvcustody.policies.workbench.request import DOMAIN_ACTIONS, Request

_OWN = 'context.via == "own" && principal == resource && principal.admitted'
_SECTIONS = {Action.PUBLISH: "kept", Action.RETAIN: "kept", Action.OFFLOAD: "offloads"}


class CedarPolicy(NamedTuple):
    """The statements, and the entities of the listed tenants (the same for every request)."""

    text: str
    entities: tuple[dict[str, Any], ...]


def to_cedar(policy: Policy, *, revoked: frozenset[str] = frozenset()) -> CedarPolicy:
    """Return the policy as Cedar statements and entities, without revoked grants and segments."""
    statements = [f"// {policy.name} {digest(policy)}"]
    statements += _own_sections()
    statements += (_rule(rule) for rule in policy.rules)
    entities = {tenant.id: cedar_entity(policy, tenant.id) for tenant in policy.tenants}
    for rule in policy.openings():
        if rule.id in revoked or (isinstance(rule, Grant) and rule.group in revoked):
            continue
        crossing = _crossing(policy, rule, entities[rule.owner]["attrs"]["labels"])
        statements += [_grant(rule, crossing)] if isinstance(rule, Grant) else _segment(rule, crossing)
    return CedarPolicy("\n".join(statements) + "\n", tuple(entities.values()))


def cedar_entity(policy: Policy, tenant: str) -> dict[str, Any]:
    """Return a tenant as an entity; an unlisted tenant as described by `tenants.default`."""
    listed = {entry.id: entry for entry in policy.tenants}
    entry: TenantPolicy | None = listed.get(tenant, policy.default)
    owed = () if entry is None else obligations_of(policy, entry)
    attributes: dict[str, Any] = {
        "admitted": entry is not None,
        "scope": int(Scope.SESSION if entry is None else entry.scope),
        "kept": [level for level, duties in enumerate(owed) if duties.cacheable],
        "offloads": [level for level, duties in enumerate(owed) if duties.tiers],
        "labels": _labels(policy, tenant, entry, any_route=False),
        "labels_any": _labels(policy, tenant, entry, any_route=True),
        **{f"offloads_{tier}": [level for level, duties in enumerate(owed) if tier in duties.tiers] for tier in Tier},
    }
    if tenant in listed and listed[tenant].group is not None:
        attributes["group"] = listed[tenant].group
    return {"uid": {"type": "Tenant", "id": tenant}, "attrs": attributes, "parents": []}


def cedar_request(request: Request, tier: Tier | None = None) -> dict[str, Any]:
    """Return a request in Cedar's form; with `tier`, the question whether anything may be offloaded to it."""
    return {
        "principal": {"type": "Tenant", "id": request.reader},
        "action": {"type": "Action", "id": request.action.name.lower()},
        "resource": {"type": "Tenant", "id": request.owner},
        "context": {
            "level": request.level,
            "scope": int(request.scope),
            "via": request.via.name.lower(),
            "now": request.now_us,
            "source": request.source or "",
            "tier": tier or "",
        },
    }


def _statement(
    effect: str, name: str, actions: Iterable[Action], when: Iterable[str], head: str = "principal|resource"
) -> str:
    principal, resource = head.split("|")
    listed = ", ".join(f'Action::"{action.name.lower()}"' for action in actions)
    body = " && ".join(when) or "true"
    return f'@id("{name}")\n{effect} ({principal}, action in [{listed}], {resource}) when {{ {body} }};'


def _own_sections() -> Iterator[str]:
    """What a tenant may do by its entry and its obligations, without a rule."""
    yield _statement("permit", "tenants", [Action.ADMIT], [_OWN, "context.scope <= 2"])
    for action, attribute in _SECTIONS.items():
        terms = [_OWN, "context.scope <= principal.scope", *_bound(action, "principal")]
        yield _statement("permit", f"{attribute}:{action.name.lower()}", [action], terms)


def _bound(action: Action, party: str) -> list[str]:
    """What the obligations of an entity leave to an action."""
    if action not in _SECTIONS:
        return []
    bound = [f"{party}.{_SECTIONS[action]}.contains(context.level)"]
    if action is Action.OFFLOAD:
        places = (f'(context.tier == "{tier}" && {party}.offloads_{tier}.contains(context.level))' for tier in Tier)
        bound.append(f'(context.tier == "" || {" || ".join(places)})')
    return bound


def _rule(rule: Rule) -> str:
    terms = []
    if rule.effect is RuleEffect.PERMIT:
        terms.append(_OWN)
        reach = 'if action == Action::"reuse" then context.scope <= principal.scope else context.scope <= 2'
        terms.append(f"({reach})")
    if rule.relation is Relation.OWNER:
        terms.append("principal == resource")
    if rule.relation is Relation.SAME_GROUP:
        family = "principal has group && resource has group && principal.group == resource.group"
        terms.append(f"(principal == resource || ({family}))")
    for side, tenants in (("principal", rule.readers), ("resource", rule.owners)):
        if tenants is not None:
            terms.append(f"[{_tenants(tenants)}].contains({side})")
    if rule.levels is not None:
        terms.append(f"{list(rule.levels)}.contains(context.level)")
    if rule.via is not None:
        ways = ", ".join(f'"{via.name.lower()}"' for via in rule.via)
        terms.append(f"[{ways}].contains(context.via)")
    return _statement(rule.effect.value, rule.id, rule.actions, terms)


def _tenants(names: Iterable[str]) -> str:
    return ", ".join(f'Tenant::"{name}"' for name in names)


def _labels(policy: Policy, tenant: str, entry: TenantPolicy | None, *, any_route: bool) -> list[str]:
    """Return the labels of all requests of a tenant, or with `any_route` those of any request."""
    rules = (rule for rule in policy.classify if rule.tenant in (tenant, EVERY_TENANT))
    found = set(() if entry is None else entry.labels)
    for rule in rules:
        found.update(rule.labels if any_route or rule.route is None else ())
    return sorted(f"{name}={value}" for name, value in found)


def _crossing(policy: Policy, rule: Grant | SegmentRule, of_owner: Collection[str]) -> list[str]:
    """Terms by which some request of the reader has the labels of the owner's blocks, but for those that it crosses."""
    every = {f"{name}={value}" for name, values in policy.labels if name not in rule.crosses for value in values}
    theirs = every.intersection(of_owner)
    terms = [f"principal.labels_any.containsAll({_texts(theirs)})"] if theirs else []
    return terms + ([f"!principal.labels.containsAny({_texts(every - theirs)})"] if every - theirs else [])


def _texts(words: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in sorted(words)) + "]"


def _grant(grant: Grant, crossing: list[str]) -> str:
    terms = [
        f'context.via == "{Via.GRANT.name.lower()}"',
        "context.scope >= 2",
        *crossing,
        f"context.level <= {grant.at_most}",
    ]
    terms += [] if grant.from_us is None else [f"context.now >= {grant.from_us}"]
    terms += [] if grant.until_us is None else [f"context.now < {grant.until_us}"]
    terms.append(f'(context.source == "" || context.source == "{grant.id}")')
    head = f'principal == Tenant::"{grant.reader}"|resource == Tenant::"{grant.owner}"'
    return _statement("permit", grant.id, [Action.REUSE], terms, head)


def _segment(segment: SegmentRule, crossing: list[str]) -> Iterator[str]:
    """One statement for reuse, one for each action that the owner's obligations bound."""
    terms = [f'context.via == "{Via.SEGMENT.name.lower()}"', f"context.level == {segment.level}"]
    terms += ["context.scope >= 2", f"context.scope <= {int(segment.scope)}"]
    readers = "principal.admitted" if segment.tenants is None else f"[{_tenants(segment.tenants)}].contains(principal)"
    terms += [readers, *crossing]
    terms += [] if segment.expires_us is None else [f"context.now < {segment.expires_us}"]
    terms.append(f'(context.source == "" || context.source == "{segment.id}")')
    for action in DOMAIN_ACTIONS:
        bound = _bound(action, "resource")
        head = f'principal|resource == Tenant::"{segment.owner}"'
        yield _statement("permit", segment.id, [action], [*terms, *bound], head)
