"""The parts of a proof that are no decisions: classifications are never lowered, obligations never loosened.

1. Routes are asked by one example of each set of patterns that a route can match, in both cases of letters, by none
   at all, and by one that cannot be trusted; claims and hints by every known word and one unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from kvcustody.policies.document.model import EVERY_TENANT, Action, Policy, Scope, Via
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.obligations import Obligations, combine, ended, obligations_of
from kvcustody.policies.workbench.prove.counterexamples import Findings
from kvcustody.policies.workbench.prove.route_examples import routes
from kvcustody.policies.workbench.prove.specification import Declared
from kvcustody.policies.workbench.request import FRESH, Request

_UNTRUSTED = "/v1/../v1"
_UNKNOWN = "~unknown"


def check_levels(
    table: DecisionTable, declared: Declared, tenants: Sequence[str], findings: Findings
) -> None:
    """ISO-8: the effective level is never below the declared one."""
    words = (None, *declared.policy.classifications, _UNKNOWN)
    if table.policy.classifications != declared.policy.classifications:
        findings.says(
            "ISO-8", "the table's classifications are not the declared ones", {"policy": table.digest}
        )
        return
    for tenant in _distinct_tenants(table.policy, declared.policy, tenants):
        for route, claim, hint in product(_asked(table.policy, declared.policy, tenant), words, words):
            findings.levels_checked += 1
            got = table.classify(tenant, route, claim, hint)
            least = _least(declared, tenant, route, claim, hint)
            if got < least:
                names = declared.policy.classifications
                why = f"classified `{names[got]}`, declared at least `{names[least]}`"
                findings.says("ISO-8", why, {"tenant": tenant, "route": route, "claim": claim, "hint": hint})


def _distinct_tenants(one: Policy, other: Policy, tenants: Sequence[str]) -> list[str]:
    """The tenants that a classify rule names, and one that stands for every other."""
    named = {rule.tenant for policy in (one, other) for rule in policy.classify}
    rest = [tenant for tenant in tenants if tenant not in named]
    return [*(tenant for tenant in tenants if tenant in named), *rest[:1], FRESH[0]]


def _asked(one: Policy, other: Policy, tenant: str) -> list[str | None]:
    plain = routes((one, other), tenant)
    return [_UNTRUSTED, *plain, *(route.upper() for route in plain if route is not None)]


def _least(declared: Declared, tenant: str, route: str | None, claim: str | None, hint: str | None) -> int:
    if route != _UNTRUSTED:
        return declared.level(tenant, route, claim, hint)
    rules = declared.policy.classify
    if any(rule.route is not None and rule.tenant in (tenant, EVERY_TENANT) for rule in rules):
        return len(declared.policy.classifications) - 1
    return declared.level(tenant, None, claim, hint)


def check_duties(
    table: DecisionTable, declared: Declared, tenants: Sequence[str], findings: Findings
) -> None:
    """ISO-9: every tenant owes at least what is declared, and what owes its end is not kept."""
    policy = declared.policy
    if table.policy.classifications != policy.classifications:
        return  # ISO-8 has said so
    strictest = ended(obligations_of(policy, None))
    for tenant in tenants:
        entry = declared.admitted(tenant)
        owed = (strictest,) * len(policy.classifications) if entry is None else obligations_of(policy, entry)
        for level, least in enumerate(owed):
            findings.duties_checked += 1
            got = table.obligations(tenant, level)
            said = {"tenant": tenant, "classification": policy.classifications[level]}
            for field in Obligations._fields:
                if looser(field, got, least):
                    why = f"{field} is `{getattr(got, field)}`, declared `{getattr(least, field)}`"
                    findings.says("ISO-9", why, said)
            _check_kept(table, tenant, level, least, findings)


def _check_kept(table: DecisionTable, tenant: str, level: int, owed: Obligations, findings: Findings) -> None:
    refused = (() if owed.cacheable else (Action.PUBLISH, Action.RETAIN)) + (
        () if owed.tiers else (Action.OFFLOAD,)
    )
    for action, scope in product(refused, Scope):
        request = Request(action, tenant, tenant, level, scope, Via.OWN, 0)
        decision = request.decide(table)
        findings.duties_checked += 1
        if decision.permitted:
            findings.breaks("ISO-9", request, "the obligations rule it out", decision)


def looser(field: str, got: Obligations, than: Obligations) -> bool:
    """Whether one field of `got` demands less than that of `than`."""
    strict = combine(got, than)
    return bool(getattr(strict, field) != getattr(got, field))
