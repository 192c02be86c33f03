"""Decide recorded requests again under another policy and report the changes by tenant: hits, blocks, kept copies.

1. Only what was recorded is decided again: a request that a wider policy would have served, and that was never made
   or never hit, is not in the record. Such figures come from replaying a trace (`kvcustody policy simulate --trace`).
2. What was attached through a grant or segment is decided again through that source, at its own instant.
3. The record does not say how long a block had been idle before a hit. Hits under a retention that gets shorter are
   counted apart: up to all of them would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvcustody.policies.document.model import Action, Grant, Scope, SegmentRule, Tier, Via
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessRequest


class Recorded(NamedTuple):
    """One recorded request: tenant, classification, time (UTC), reasons, and the number of blocks attached."""

    tenant: str
    classification: str
    at_us: int
    reasons: tuple[str, ...]
    attached_blocks: int
    written_blocks: int


class RecordedDenials(NamedTuple):
    """Denied reuses, counted by the rule that denied them."""

    tenant: str
    owner: str
    rule: str
    requests: int


@dataclass(slots=True)
class TierChange:
    """The number of requests whose blocks may have copies in a tier, and the sum of the copies' longest times there."""

    requests_before: int = 0
    requests_after: int = 0
    absolute_before_us: int = 0
    absolute_after_us: int = 0

    def data(self) -> dict[str, int]:
        """Return the change as JSON data: the requests, and the mean time that their copies may stay."""
        return {
            "requests_before": self.requests_before,
            "requests_after": self.requests_after,
            "mean_absolute_before_us": self.absolute_before_us // max(self.requests_before, 1),
            "mean_absolute_after_us": self.absolute_after_us // max(self.requests_after, 1),
        }


@dataclass(slots=True)
class TenantChange:
    """The changes for one tenant. Blocks are attached blocks (hits); retention is in microseconds.

    `shortened_blocks` stay permitted, and their retention gets shorter (rule 3).
    `kept_before_us` and `kept_after_us` add up, over its requests, how long idle blocks would be kept at most.
    """

    tenant: str
    requests: int = 0
    refused: int = 0
    hit_blocks: int = 0
    lost_blocks: int = 0
    lost_requests: int = 0
    shortened_blocks: int = 0
    denied_requests: int = 0
    kept_before_us: int = 0
    kept_after_us: int = 0
    lost_by: dict[str, int] = field(default_factory=dict)
    tiers: dict[Tier, TierChange] = field(default_factory=lambda: {tier: TierChange() for tier in Tier})

    def data(self, block_tokens: int) -> dict[str, Any]:
        """Return the change as JSON data, with hits in tokens too."""
        return {
            "tenant": self.tenant,
            "requests": self.requests,
            "refused": self.refused,
            "denied_requests": self.denied_requests,
            "hit_blocks": self.hit_blocks,
            "hit_tokens": self.hit_blocks * block_tokens,
            "lost_requests": self.lost_requests,
            "lost_blocks": self.lost_blocks,
            "lost_tokens": self.lost_blocks * block_tokens,
            "lost_by": self.lost_by,
            "shortened_blocks": self.shortened_blocks,
            "shortened_tokens": self.shortened_blocks * block_tokens,
            "mean_idle_before_us": self.kept_before_us // max(self.requests, 1),
            "mean_idle_after_us": self.kept_after_us // max(self.requests, 1),
            "tiers": {tier.value: change.data() for tier, change in self.tiers.items()},
        }


@dataclass(frozen=True, slots=True)
class Simulation:
    """The changes for every recorded tenant, most lost blocks first."""

    tenants: tuple[TenantChange, ...]
    unknown_levels: int

    @property
    def lost_blocks(self) -> int:
        """Hits that the new policy would not have allowed."""
        return sum(change.lost_blocks for change in self.tenants)


def simulate(
    old: DecisionTable,
    new: DecisionTable,
    recorded: Iterable[Recorded],
    denials: Iterable[RecordedDenials] = (),
) -> Simulation:
    """Decide everything again under `new`; the requests were recorded under `old`."""
    changes: dict[str, TenantChange] = {}
    unknown = 0
    copies_before, copies_after = _Tiers(old), _Tiers(new)
    levels = {name: level for level, name in enumerate(new.policy.classifications)}
    before = {name: level for level, name in enumerate(old.policy.classifications)}
    openings = {rule.id: rule for rule in reversed(old.policy.openings())}  # of two with one id, the first
    for request in recorded:
        change = changes.setdefault(request.tenant, TenantChange(request.tenant))
        change.requests += 1
        change.hit_blocks += request.attached_blocks
        level = levels.get(request.classification)
        unknown += level is None
        if request.classification in before:
            copies_before.count(change, before[request.classification], is_new=False)
            change.kept_before_us += old.obligations(request.tenant, before[request.classification]).idle_us
        if level is not None:
            copies_after.count(change, level, is_new=True)
            change.kept_after_us += new.obligations(request.tenant, level).idle_us
        lost = _lost(old, new, openings, request, level, change)
        if lost is not None and request.attached_blocks:
            change.lost_requests += 1
            change.lost_blocks += request.attached_blocks
            change.lost_by[lost] = change.lost_by.get(lost, 0) + request.attached_blocks
        elif _is_shortened(old, new, openings, request):
            change.shortened_blocks += request.attached_blocks
    for denial in denials:
        changes.setdefault(denial.tenant, TenantChange(denial.tenant)).denied_requests += denial.requests
    ordered = sorted(changes.values(), key=lambda change: (-change.lost_blocks, change.tenant))
    return Simulation(tuple(ordered), unknown)


class _Tiers:
    """For how long one policy lets copies be in each tier; the same is asked again and again."""

    def __init__(self, table: DecisionTable) -> None:
        self._table = table
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}

    def count(self, change: TenantChange, level: int, *, is_new: bool) -> None:
        """One more request of this level."""
        key = (change.tenant, level)
        if key not in self._known:
            self._known[key] = tuple(self._table.tier_duty(*key, tier).absolute_us for tier in Tier)
        for counted, absolute_us in zip(change.tiers.values(), self._known[key], strict=True):
            if absolute_us and is_new:
                counted.requests_after += 1
                counted.absolute_after_us += absolute_us
            elif absolute_us:
                counted.requests_before += 1
                counted.absolute_before_us += absolute_us


def _is_shortened(
    old: DecisionTable,
    new: DecisionTable,
    openings: Mapping[str, Grant | SegmentRule],
    request: Recorded,
) -> bool:
    """Return whether blocks of the request, or of an owner that served it, are kept for less time than before."""
    owners = {openings[source].owner for source in request.reasons if source in openings}
    return any(
        _kept(new, tenant, request.classification)[place] < _kept(old, tenant, request.classification)[place]
        for tenant in {request.tenant, *owners}
        for place in (0, 1)
    )


def _kept(table: DecisionTable, tenant: str, classification: str) -> tuple[int, int]:
    """For how long a tenant's block is kept idle, and at all; zeros where the policy does not know one of both."""
    names = table.policy.classifications
    if classification not in names or table.tenant(tenant) is None:
        return 0, 0
    duty = table.obligations(tenant, names.index(classification))
    return duty.idle_us, duty.absolute_us


def _lost(
    old: DecisionTable,
    new: DecisionTable,
    openings: Mapping[str, Grant | SegmentRule],
    request: Recorded,
    level: int | None,
    change: TenantChange,
) -> str | None:
    """What would have kept this request's blocks from being attached; None where nothing would."""
    tenant, at_us = request.tenant, request.at_us
    entry = new.tenant(tenant)
    if level is None:
        return "classification"
    admitted = new.decide(AccessRequest(Action.ADMIT, tenant, tenant, level, Scope.SESSION, Via.OWN), at_us)
    if entry is None or not admitted.permitted:
        change.refused += 1
        return admitted.reasons[0]
    if not new.obligations(tenant, level).cacheable:
        return f"retention:{request.classification}"
    own = new.decide(AccessRequest(Action.REUSE, tenant, tenant, level, entry.scope, Via.OWN), at_us)
    if not own.permitted:
        return own.reasons[0]
    for source in request.reasons:
        decision = _through(openings.get(source), old, new, request, level)
        if decision is not None:
            return decision
    return None


def _through(
    rule: Grant | SegmentRule | None, old: DecisionTable, new: DecisionTable, request: Recorded, level: int
) -> str | None:
    """Why a grant or segment that served the request would not have; None for another rule, or where it still does."""
    if rule is None:
        return None
    via = Via.GRANT
    if isinstance(rule, SegmentRule):
        named, wanted = new.policy.classifications, old.policy.classifications[rule.level]
        via, level = Via.SEGMENT, named.index(wanted) if wanted in named else -1
    asked = AccessRequest(Action.REUSE, request.tenant, rule.owner, level, Scope.TENANT, via, rule.id)
    return None if new.decide(asked, request.at_us).permitted else f"without {rule.id}"
