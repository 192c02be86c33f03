"""Explain a decision: which rules, grants and segments decided it, and for a deny the nearest permit.

1. The table makes the decision; the explanation comes from the declarations, term by term.
2. The nearest permit is the request with the fewest terms changed that the table permits. Ties go to the term that a
   caller changes most easily (scope, classification, way, time, action).
3. `explain_tiers` asks the table as workers do (`DecisionTable.tier_duty`) how long copies may stay in each tier, and
   how soon they are gone. Each answer lists the sources and what each one allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple

from kvcustody.policies.document.model import (
    Action,
    Grant,
    Offload,
    Retention,
    RuleEffect,
    Scope,
    SegmentRule,
    Tier,
    Via,
)
from kvcustody.policies.document.problems import SourceMark, quote
from kvcustody.policies.table.crossing import Barriers
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import Decision
from kvcustody.policies.table.obligations import TierDuty
from kvcustody.policies.workbench.prove.specification import Declared
from kvcustody.policies.workbench.request import DOMAIN_ACTIONS, FRESH, Request, instant
from kvcustody.times import span

NEAR_MAX = 5
_TERMS = ("scope", "level", "via", "now_us", "action")


class Considered(NamedTuple):
    """A rule, grant or segment that matches the request or nearly does, with the terms that do not fit."""

    kind: str
    id: str
    effect: str
    failing: tuple[str, ...]
    mark: SourceMark

    @property
    def fits(self) -> bool:
        """Whether every term fits."""
        return not self.failing


class Nearest(NamedTuple):
    """The nearest permit: the request, what was changed (term, from, to), and what permits it."""

    request: Request
    changed: tuple[tuple[str, str, str], ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision, explained."""

    request: Request
    decision: Decision
    considered: tuple[Considered, ...]
    nearest: Nearest | None
    summary: str
    classifications: tuple[str, ...]
    tiers: tuple[TierAnswer, ...] = ()  # of an `offload`

    def data(self) -> dict[str, Any]:
        """Return the explanation as JSON data."""
        near = self.nearest
        return {
            "request": self.request.data(self.classifications),
            "effect": self.decision.effect.value,
            "reasons": list(self.decision.reasons),
            "errors": list(self.decision.errors),
            "summary": self.summary,
            "considered": [
                {"kind": c.kind, "id": c.id, "effect": c.effect, "fits": c.fits, "failing": list(c.failing),
                 "line": c.mark.line}
                for c in self.considered
            ],
            "nearest": None if near is None else {
                "request": near.request.data(self.classifications),
                "changed": [dict(zip(("term", "from", "to"), change, strict=True)) for change in near.changed],
                "reasons": list(near.reasons),
            },
            **({"tiers": [answer.data() for answer in self.tiers]} if self.tiers else {}),
        }  # fmt: skip


def explain(table: DecisionTable, request: Request) -> Explanation:
    """Explain why the table answers as it does."""
    decision = request.decide(table)
    declared = Declared(table.policy, table.revoked)
    considered = (*_rules(declared, request), *_sources(declared, request))
    nearest = None if decision.permitted else _nearest(table, declared, request)
    summary = _summary(table, declared, request, decision, nearest, _closed(table, request, considered))
    offloaded = request.action is Action.OFFLOAD and 0 <= request.level < len(table.policy.classifications)
    tiers = explain_tiers(table, request.owner, request.level) if offloaded else ()
    return Explanation(request, decision, considered, nearest, summary, table.policy.classifications, tiers)


def _rules(declared: Declared, request: Request) -> Iterator[Considered]:
    """Matching rules, and those that only one term keeps from matching."""
    for rule in declared.policy.rules:
        failing = declared.failing(rule, request)
        if len(failing) <= 1:
            yield Considered("rule", rule.id, rule.effect.value, tuple(failing), rule.mark)


def _sources(declared: Declared, request: Request) -> list[Considered]:
    """Return the grants and segments that fit best, at most `NEAR_MAX` of them."""
    if request.via is Via.OWN:
        return []
    policy, barriers = declared.policy, Barriers(declared.policy)
    sources = [
        Considered("grant", grant.id, "permit", _grant_failing(grant, request, barriers), grant.mark)
        for grant in (*policy.grants, *policy.group_grants())
    ]
    sources += [
        Considered("segment", segment.id, "permit", _segment_failing(segment, request, barriers), segment.mark)
        for segment in policy.segments
    ]
    near = [entry for entry in sources if len(entry.failing) <= 2]
    return sorted(near, key=lambda entry: (len(entry.failing), entry.id))[:NEAR_MAX]


def _grant_failing(grant: Grant, request: Request, barriers: Barriers) -> tuple[str, ...]:
    fits = {
        "via": request.via is Via.GRANT,
        "reader": grant.reader == request.reader,
        "owner": grant.owner == request.owner,
        "action": request.action is Action.REUSE,
        "scope": request.scope >= Scope.TENANT,
        "classification": request.level <= grant.at_most,
        "from": grant.from_us is None or grant.from_us <= request.now_us,
        "until": grant.until_us is None or request.now_us < grant.until_us,
        "id": request.source in (None, grant.id),
    }
    return (*(term for term, fit in fits.items() if not fit), *barriers.of(grant, grant.reader))


def _segment_failing(segment: SegmentRule, request: Request, barriers: Barriers) -> tuple[str, ...]:
    fits = {
        "via": request.via is Via.SEGMENT,
        "tenants": segment.tenants is None or request.reader in segment.tenants,
        "owner": segment.owner == request.owner,
        "action": request.action in DOMAIN_ACTIONS,
        "scope": Scope.TENANT <= request.scope <= segment.scope,
        "classification": request.level == segment.level,
        "expires": segment.expires_us is None or request.now_us < segment.expires_us,
        "id": request.source in (None, segment.id),
    }
    return (*(term for term, fit in fits.items() if not fit), *barriers.of(segment, request.reader))


def _nearest(table: DecisionTable, declared: Declared, request: Request) -> Nearest | None:
    """Return the permitted request between the same two tenants with the fewest terms changed."""
    edges = set(chain(*declared.edges(request.reader, request.owner).values()))
    instants = sorted({request.now_us, *edges, *(edge - 1 for edge in edges)})
    levels = range(len(table.policy.classifications))
    best: tuple[int, tuple[int, ...], Request, Decision] | None = None
    for action, level, scope, via, now_us in product(Action, levels, Scope, Via, instants):
        variant = request._replace(action=action, level=level, scope=scope, via=via, now_us=now_us, source=None)
        changed = _changed(request, variant)
        rank = (len(changed), tuple(_TERMS.index(term) for term in changed))
        if best is not None and (*rank, _distance(request, variant)) >= (
            *best[:2],
            _distance(request, best[2]),
        ):
            continue
        decision = variant.decide(table)
        if decision.permitted:
            best = (*rank, variant, decision)
    if best is None:
        return None
    _, _, variant, decision = best
    said = tuple(
        (_word(term), _say(table, request, term), _say(table, variant, term)) for term in _changed(request, variant)
    )
    return Nearest(variant, said, decision.reasons)


def _changed(request: Request, asked: Request) -> tuple[str, ...]:
    return tuple(term for term in _TERMS if getattr(request, term) != getattr(asked, term))


def _distance(request: Request, asked: Request) -> int:
    return abs(request.level - asked.level) + abs(request.scope - asked.scope) + abs(request.now_us - asked.now_us)


def _word(term: str) -> str:
    return {"level": "classification", "now_us": "at"}.get(term, term)


def _say(table: DecisionTable, request: Request, term: str) -> str:
    return str(request.data(table.policy.classifications)[_word(term)])


def _without_effect(table: DecisionTable, request: Request, decision: Decision) -> str:
    """What keeps all that permits it from opening anything to a request, where that is so."""
    if request.via is Via.OWN:
        return ""
    policy, barriers = table.policy, Barriers(table.policy)
    rules = {rule.id: rule for rule in policy.openings()}
    named = [rules[reason] for reason in decision.reasons if reason in rules]
    closed = [why for rule in named if (why := barriers.of(rule, request.reader))]
    if closed and len(closed) == len(named):
        return f", and opens nothing: {'; '.join(dict.fromkeys(chain(*closed)))}"
    labels = {name for rule in named for name in table.uncrossed(rule, request.reader, None)}
    return f", on routes where its labels `{'`, `'.join(sorted(labels))}` are its owner's" if labels else ""


def _closed(table: DecisionTable, request: Request, considered: Iterable[Considered]) -> str:
    """What keeps grants and segments that fit otherwise from opening anything to the reader."""
    rules, barriers = {rule.id: rule for rule in table.policy.openings()}, Barriers(table.policy)
    return ", ".join(
        f"{entry.id} opens nothing: {'; '.join(entry.failing)}"
        for entry in considered
        if entry.failing and entry.id in rules and entry.failing == barriers.of(rules[entry.id], request.reader)
    )


def _summary(
    table: DecisionTable,
    declared: Declared,
    request: Request,
    decision: Decision,
    nearest: Nearest | None,
    closed: str,
) -> str:
    """One line: what decided."""
    named = ", ".join(decision.reasons)
    if decision.permitted:
        return f"permitted by {named}{_without_effect(table, request, decision)}"
    for tenant in (request.reader, request.owner):
        if table.tenant(tenant) is None and tenant not in FRESH:
            return f"denied: tenant {tenant} is not in the policy, and there is no `tenants.default`"
    if any(rule.id in decision.reasons for rule in declared.policy.rules if rule.effect is RuleEffect.FORBID):
        return f"denied: forbidden by {named}"
    if decision.reasons and ":" in decision.reasons[0]:
        return f"denied: {named} does not allow it"
    if closed:
        return f"denied: {closed}"
    if nearest is None and request.reader != request.owner:
        return f"denied: nothing opens any of {request.owner}'s domains to {request.reader}"
    if nearest is None:
        return "denied: no change of a single request permits it"
    terms = ", ".join(f"{term} {old} (not {new})" for term, old, new in nearest.changed)
    return f"denied by default; the nearest permit differs in {terms or 'its source ' + instant(request.now_us)}"


# -- tiers -------------------------------------------------------------------------------------------------------------


class TierSource(NamedTuple):
    """One entry of the policy that bounds a tier: its name, its line, and the limit it sets."""

    what: str
    line: int
    says: str


class TierAnswer(NamedTuple):
    """The rules for copies in one tier, and their sources."""

    tier: Tier
    duty: TierDuty
    sources: tuple[TierSource, ...]

    @property
    def permitted(self) -> bool:
        """Whether any copy may be there."""
        return self.duty.absolute_us > 0 or self.duty.running_us > 0

    def __str__(self) -> str:
        duty = self.duty
        if not self.permitted:
            return f"{self.tier}: not at all, by {', '.join(duty.reasons)}"
        kept = f"copies at most {span(duty.absolute_us)}" if duty.absolute_us else "no copy of published blocks"
        parts = [
            kept,
            f"of running requests at most {span(duty.running_us)}",
            f"gone within {span(duty.within_us)}",
        ]
        parts.append("encrypted" if duty.encrypt else "plain memory allowed")
        parts += [f"where the store has the domain's {', '.join(duty.match)}"] if duty.match else []
        return f"{self.tier}: {', '.join(parts)}, by {', '.join(duty.reasons)}"

    def data(self) -> dict[str, Any]:
        """Return the answer as JSON data."""
        return {
            "tier": self.tier.value,
            "permitted": self.permitted,
            **self.duty._asdict(),
            "sources": [source._asdict() for source in self.sources],
        }


def explain_tiers(table: DecisionTable, tenant: str, level: int) -> tuple[TierAnswer, ...]:
    """Return one answer for each tier, in their order. Raises `PolicyError` for an unknown level."""
    return tuple(
        TierAnswer(tier, table.tier_duty(tenant, level, tier), tuple(_tier_sources(table, tenant, level, tier)))
        for tier in Tier
    )


def _tier_sources(table: DecisionTable, tenant: str, level: int, tier: Tier) -> Iterator[TierSource]:
    policy, entry = table.policy, table.tenant(tenant)
    if entry is None:
        return
    name = policy.classifications[level]
    offloads = [(f"offload of {quote(name)}", policy.offload[level])]
    retentions = [(f"retention of {quote(name)}", policy.retention[level])]
    of = f"tenant {quote(entry.id)}: "
    offloads += [(f"{of}offload of {quote(name)}", own) for at, own in entry.offload if at == level]
    retentions += [(f"{of}retention of {quote(name)}", own) for at, own in entry.retention if at == level]
    for what, offload in offloads:
        yield TierSource(what, offload.mark.line, _of_offload(offload, tier))
    for what, retention in retentions:
        yield TierSource(what, retention.mark.line, _of_retention(retention))


def _of_offload(offload: Offload, tier: Tier) -> str:
    limit = offload.limit(tier)
    if limit is None:
        return f"not to {tier}"
    how = "encrypted" if offload.encrypt else "plain memory allowed"
    return f"at most {span(limit.absolute_us)}, gone within {span(limit.within_us)}, {how}"


def _of_retention(retention: Retention) -> str:
    return f"idle {span(retention.idle_us)}, at most {span(retention.absolute_us)}"
