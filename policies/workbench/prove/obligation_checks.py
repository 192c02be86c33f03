"""The parts of a proof besides decisions. No classification is lowered, no obligation loosened and no copy misplaced.
No label is crossed that its grant or segment does not name.

1. Each set of patterns that a route can match is checked with one example, in both cases of letters. A route that
   matches none, and one that cannot be trusted, are checked too. Claims and hints are checked with every known word and
   one unknown word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from kvcustody.policies.document.model import Action, Grant, Policy, Scope, Tier, Via
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.obligations import Obligations, ObligationsOf, TierDuty, combine, ended
from kvcustody.policies.workbench.prove.counterexamples import Findings
from kvcustody.policies.workbench.prove.route_examples import RouteExamples
from kvcustody.policies.workbench.prove.specification import Declared
from kvcustody.policies.workbench.request import FRESH, Request
from kvcustody.times import span

_UNTRUSTED = "/v1/../v1"
_UNKNOWN = "~unknown"
_NO_TIER = "~no-such-tier"
_OTHER_GROUP = "~other-group"


def check_levels(table: DecisionTable, declared: Declared, tenants: Sequence[str], findings: Findings) -> None:
    """ISO-8: the effective level is never below the declared one."""
    words = (None, *declared.policy.classifications, _UNKNOWN)
    if table.policy.classifications != declared.policy.classifications:
        findings.says("ISO-8", "the table's classifications are not the declared ones", {"policy": table.digest})
        return
    examples = RouteExamples((table.policy, declared.policy))
    for tenant in _distinct_tenants(table.policy, declared.policy, tenants):
        for route, claim, hint in product(_asked(examples.of(tenant)), words, words):
            findings.levels_checked += 1
            got = table.classify(tenant, route, claim, hint)
            least = _least(declared, tenant, route, claim, hint)
            if got < least:
                names = declared.policy.classifications
                why = f"classified `{names[got]}`, declared at least `{names[least]}`"
                findings.says("ISO-8", why, {"tenant": tenant, "route": route, "claim": claim, "hint": hint})


def _distinct_tenants(one: Policy, other: Policy, tenants: Sequence[str]) -> list[str]:
    """Return the tenants that a classify rule names, and one tenant to represent all others."""
    named = {rule.tenant for policy in (one, other) for rule in policy.classify}
    rest = [tenant for tenant in tenants if tenant not in named]
    return [*(tenant for tenant in tenants if tenant in named), *rest[:1], FRESH[0]]


def _asked(plain: list[str | None]) -> list[str | None]:
    return [_UNTRUSTED, *plain, *(route.upper() for route in plain if route is not None)]


def _least(declared: Declared, tenant: str, route: str | None, claim: str | None, hint: str | None) -> int:
    if route != _UNTRUSTED:
        return declared.level(tenant, route, claim, hint)
    if any(rule.route is not None for rule in declared.classify_rules(tenant)):
        return len(declared.policy.classifications) - 1
    return declared.level(tenant, None, claim, hint)


def check_duties(table: DecisionTable, declared: Declared, tenants: Sequence[str], findings: Findings) -> None:
    """ISO-9: every tenant owes at least its declared obligations, and blocks that must end are not kept."""
    policy = declared.policy
    if table.policy.classifications != policy.classifications:
        return  # ISO-8 has said so
    owed_by = ObligationsOf(policy)
    strictest = ended(owed_by(None))
    for tenant in tenants:
        entry = declared.admitted(tenant)
        owed = (strictest,) * len(policy.classifications) if entry is None else owed_by(entry)
        for level, least in enumerate(owed):
            findings.duties_checked += 1
            got = table.obligations(tenant, level)
            said = {"tenant": tenant, "classification": policy.classifications[level]}
            for field in looser_fields(got, least):
                why = f"{field} is `{getattr(got, field)}`, declared `{getattr(least, field)}`"
                findings.says("ISO-9", why, said)
            _check_kept(table, tenant, level, least, findings)


def _check_kept(table: DecisionTable, tenant: str, level: int, owed: Obligations, findings: Findings) -> None:
    refused = (() if owed.cacheable else (Action.PUBLISH, Action.RETAIN)) + (() if owed.tiers else (Action.OFFLOAD,))
    for action, scope in product(refused, Scope):
        request = Request(action, tenant, tenant, level, scope, Via.OWN, 0)
        decision = request.decide(table)
        findings.duties_checked += 1
        if decision.permitted:
            findings.breaks("ISO-9", request, "the obligations rule it out", decision)


def check_tiers(table: DecisionTable, declared: Declared, tenants: Sequence[str], findings: Findings) -> None:
    """ISO-12: a worker's limit for every tenant, classification and tier is no more than every source allows."""
    names = declared.policy.classifications
    if table.policy.classifications != names:
        return  # ISO-8 has said so
    for tenant, level, tier in product(tenants, range(len(names)), (*Tier, _NO_TIER)):
        got = table.tier_duty(tenant, level, tier)
        findings.tiers_checked += 1
        findings.tiers_open += got.absolute_us > 0
        said = {"tenant": tenant, "classification": names[level], "tier": str(tier)}
        for why in _looser_copies(got, declared, tenant, level, tier):
            findings.says("ISO-12", f"{why}, by {', '.join(got.reasons)}", said)


def _looser_copies(got: TierDuty, declared: Declared, tenant: str, level: int, tier: str) -> Iterator[str]:
    """What is allowed beyond the declarations, in words."""
    if tier not in tuple(Tier):
        if got.absolute_us or got.running_us:
            yield "copies are allowed in a tier that does not exist"
        return
    least = declared.copies(tenant, level, Tier(tier))
    for field in ("absolute_us", "running_us", "within_us"):
        one, two = getattr(got, field), getattr(least, field)
        if one > two and (field != "within_us" or got.absolute_us):
            yield f"{field.removesuffix('_us')} is `{span(one)}`, declared `{span(two)}`"
    if not (got.absolute_us or got.running_us):
        return
    if least.encrypt and not got.encrypt:
        yield "copies are in clear, declared encrypted"
    for name, values in declared.policy.labels if tier == Tier.REMOTE else ():
        for value in values if name in least.match else ():
            if got.allows(((name, value),), {name: [other for other in values if other != value]}):
                yield f"copies of {name} {value} go to a store that is not there, declared to match `{name}`"


def check_labels(table: DecisionTable, declared: Declared, tenants: Sequence[str], findings: Findings) -> None:
    """ISO-13: on each route, a grant or segment opens blocks with the reader's labels, except for labels that it
    names.
    """
    named = {rule.id: rule for rule in declared.rules()}
    examples = RouteExamples((table.policy, declared.policy))
    for rule in table.policy.openings():
        if rule.id in table.revoked:
            continue
        readers = (rule.reader,) if isinstance(rule, Grant) else rule.tenants or tenants
        for reader in readers:
            for route in examples.of(reader):
                findings.labels_checked += 1
                if table.uncrossed(rule, reader, route):
                    continue
                findings.labels_open += 1
                least = declared.differing(named.get(rule.id, rule), reader, route)
                if least:
                    said = {"id": rule.id, "reader": reader, "owner": rule.owner, "route": route}
                    findings.says("ISO-13", f"crosses `{', '.join(sorted(least))}`, which it does not name", said)


def check_places(table: DecisionTable, declared: Declared, tenants: Sequence[str], findings: Findings) -> None:
    """ISO-14: doors and workers only learn groups for a request that every rule allows to serve it."""
    policy = declared.policy
    rules = (*policy.placement, *table.policy.placement)
    if not rules or table.policy.classifications != policy.classifications:
        return
    groups = (*sorted({group for rule in rules for group in rule.groups}), _OTHER_GROUP)
    words = (None, *policy.classifications, _UNKNOWN)
    examples = RouteExamples((table.policy, policy))
    for tenant in tenants:
        for route, hint in product((_UNTRUSTED, *examples.of(tenant)), words):
            demand = table.placement.demand(tenant, route, None, hint)
            level = _least(declared, tenant, route, None, hint)
            labels = declared.every_label(tenant) if route == _UNTRUSTED else declared.labels(tenant, route)
            for group in groups:
                findings.places_checked += 1
                if demand.allows(group):
                    findings.places_open += 1
                    if not declared.serves(group, tenant, level, labels):
                        said = {"tenant": tenant, "route": route, "hint": hint, "group": group}
                        findings.says("ISO-14", "goes to a group that its placement rules exclude", said)


@lru_cache(4096)
def looser_fields(got: Obligations, than: Obligations) -> tuple[str, ...]:
    """Return the fields in which `got` demands less than `than`."""
    strict = combine(got, than)
    return tuple(name for name in Obligations._fields if getattr(strict, name) != getattr(got, name))
