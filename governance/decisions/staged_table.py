"""A revision that is in effect for some tenants, beside the one for all others.

1. A tenant's own requests are decided by the revision that it is in; what it owes is that revision's.
2. Whatever crosses between tenants needs both revisions: no stage opens what either of them keeps closed.
3. Both revisions name the same issuers and order the same classifications, under the same profile.
4. Which tenants a share covers depends on the revision's digest and their names alone; a larger share covers more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from kvcustody.errors import ConfigError
from kvcustody.policies.document.model import (
    Grant,
    Labels,
    OnWorkerDeath,
    Policy,
    Profile,
    SegmentRule,
    TenantPolicy,
)
from kvcustody.policies.table.batch_decide import BatchTable
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessColumns, AccessRequest, Decision
from kvcustody.policies.table.obligations import Obligations, TierDuty
from kvcustody.policies.table.placement import Demand


@dataclass(frozen=True, slots=True)
class Stage:
    """The scope of a staged revision: the named tenants, and a share of all others, from 0 to 1."""

    tenants: frozenset[str] = frozenset()
    share: Fraction = Fraction(0)

    def covers(self, tenant: str, digest: str) -> bool:
        """Whether a tenant is in the stage of the revision with this policy digest."""
        if tenant in self.tenants:
            return True
        place = int.from_bytes(hashlib.sha256(f"{digest}\n{tenant}".encode()).digest()[:8], "big")
        return Fraction(place, 1 << 64) < self.share

    def __str__(self) -> str:
        parts = [*sorted(self.tenants)]
        if self.share:
            parts.append(f"{float(self.share * 100):g}%")
        return ",".join(parts)


class StagedTable(DecisionTable):
    """`candidate` for the tenants of a stage, and `base` for the others. Immutable, like both of them."""

    __slots__ = ("_covers", "base", "candidate", "members")

    def __init__(self, base: DecisionTable, candidate: DecisionTable, stage: Stage) -> None:
        """Raises `ConfigError` where the two cannot be in effect side by side."""
        ours, theirs = base.policy, candidate.policy
        if _frame(ours) != _frame(theirs):
            raise ConfigError(
                f"revision `{candidate.revision}` has other issuers, classifications or another profile than the "
                f"active `{base.revision}`, so it cannot be staged beside it; activate it in full"
            )
        super().__init__(
            theirs,
            candidate._tables,
            revision=candidate.revision,
            digest=candidate.digest,
            revoked=base.revoked | candidate.revoked,
        )
        self.base = base
        self.candidate = candidate
        self.members = stage
        self._covers: dict[str, bool] = {}

    @property
    def stage(self) -> str:
        """The stage in words, for the ledger."""
        return str(self.members)

    def of(self, tenant: str) -> DecisionTable:
        """The revision that applies to a tenant."""
        covered = self._covers.get(tenant)
        if covered is None:
            covered = self.members.covers(tenant, self.digest)
            if len(self._covers) < 100_000:
                self._covers[tenant] = covered
        return self.candidate if covered else self.base

    def decide(self, request: AccessRequest, now_utc_us: int) -> Decision:
        """As `DecisionTable.decide`; across tenants, the denial of either revision stands."""
        if request.reader == request.owner:
            return self._of_any(request.reader).decide(request, now_utc_us)
        first = self.base.decide(request, now_utc_us)
        return self.candidate.decide(request, now_utc_us) if first.permitted else first

    def decide_many(self, requests: AccessColumns[Sequence[str]], now_utc_us: int) -> NDArray[np.bool_]:
        """As `DecisionTable.decide_many`."""
        readers, owners = requests.readers, requests.owners
        base = self.base.decide_many(requests, now_utc_us)
        candidate = self.candidate.decide_many(requests, now_utc_us)
        own = np.array([a == b for a, b in zip(readers, owners, strict=True)])
        staged = np.array([self._of_any(reader) is self.candidate for reader in readers])
        return np.where(own, np.where(staged, candidate, base), base & candidate)

    def batch(self) -> BatchTable:
        """Refuse: two revisions have no dense form."""
        raise ConfigError("a staged revision has no dense table; ask `decide_many`")

    def demand(self, tenant: str, route: str | None, claim: str | None, hint: str | None) -> Demand:
        """Return what both revisions permit, because doors hold both too."""
        base = self.base.demand(tenant, route, claim, hint)
        return base.together(self.candidate.demand(tenant, route, claim, hint))

    def may_serve(self, group: str, tenant: str, route: str | None, claim: str | None, hint: str | None) -> bool:
        """Return what both revisions permit."""
        asked = group, tenant, route, claim, hint
        return self.base.may_serve(*asked) and self.candidate.may_serve(*asked)

    def after_death(self, tenant: str, level: int) -> OnWorkerDeath:
        """Return the answer of the tenant's revision."""
        return self.of(tenant).after_death(tenant, level)

    def classify(self, tenant: str, route: str | None, claim: str | None, hint: str | None) -> int:
        """Return the answer of the tenant's revision."""
        return self.of(tenant).classify(tenant, route, claim, hint)

    def labels(self, tenant: str, route: str | None) -> Labels:
        """Return the answer of the tenant's revision."""
        return self.of(tenant).labels(tenant, route)

    def obligations(self, tenant: str, classification: int) -> Obligations:
        """Return the answer of the tenant's revision."""
        return self.of(tenant).obligations(tenant, classification)

    def tier_duty(self, tenant: str, classification: int, tier: str) -> TierDuty:
        """Return the answer of the tenant's revision."""
        return self.of(tenant).tier_duty(tenant, classification, tier)

    def tenant(self, tenant: str) -> TenantPolicy | None:
        """The tenant's entry in its revision; None where its revision or the other one does not admit it."""
        entry = self._of_any(tenant).tenant(tenant)
        return entry if entry is not None and self.base.tenant(tenant) is not None else None

    def grants_for(self, reader: str, classification: int, now_utc_us: int) -> tuple[Grant, ...]:
        """Return the grants that both revisions hold open."""
        pair = (table.grants_for(reader, classification, now_utc_us) for table in (self.base, self.candidate))
        return _in_both(*pair)

    def segments_for(self, reader: str, now_utc_us: int) -> tuple[SegmentRule, ...]:
        """Return the reader's own segments in its revision, and others' that both revisions hold open, ordered
        by id.
        """
        mine = [rule for rule in self.of(reader).segments_for(reader, now_utc_us) if rule.owner == reader]
        base, candidate = (
            {rule.id: rule for rule in table.segments_for(reader, now_utc_us) if rule.owner != reader}
            for table in (self.base, self.candidate)
        )
        shared = [
            replace(rule, crosses=_crossed_by_both(base[id_], rule))
            for id_, rule in candidate.items()
            if _same_segment(base.get(id_), rule)
        ]
        return tuple(sorted([*mine, *shared], key=lambda rule: rule.id))

    def next_change_us(self, now_utc_us: int) -> int | None:
        """The next time at which either revision changes."""
        edges = [table.next_change_us(now_utc_us) for table in (self.base, self.candidate)]
        return min((edge for edge in edges if edge is not None), default=None)

    def _of_any(self, tenant: object) -> DecisionTable:
        return self.of(tenant) if type(tenant) is str else self.base


def quotas_of(table: DecisionTable) -> DecisionTable:
    """Return the revision whose quotas apply: while one is staged, the base revision, whose guarantees add up."""
    return table.base if isinstance(table, StagedTable) else table


def _frame(policy: Policy) -> tuple[tuple[str, ...], tuple[str, ...], Profile]:
    """What both revisions of a stage have to agree on."""
    return policy.issuers, policy.classifications, policy.profile


def _in_both(first: Iterable[Grant], second: Iterable[Grant]) -> tuple[Grant, ...]:
    known = {grant.id: grant for grant in first}
    return tuple(
        replace(grant, crosses=_crossed_by_both(known[grant.id], grant))
        for grant in second
        if grant.id in known and known[grant.id].owner == grant.owner
    )


def _crossed_by_both(first: Grant | SegmentRule, second: Grant | SegmentRule) -> tuple[str, ...]:
    """The labels that both revisions let a rule cross."""
    return tuple(name for name in second.crosses if name in first.crosses)


def _same_segment(first: SegmentRule | None, second: SegmentRule) -> bool:
    return first is not None and (first.owner, first.level, first.digest, first.tokens) == (
        second.owner,
        second.level,
        second.digest,
        second.tokens,
    )
