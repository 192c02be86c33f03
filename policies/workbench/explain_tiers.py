"""Explain where copies of a tenant's blocks may be: for each tier how long, how soon they are gone, and who says so.

1. The answer is the table's, as workers ask it (`DecisionTable.tier_duty`); beside it stands what each source says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvcustody.policies.document.model import Offload, Retention, Tier
from kvcustody.policies.document.problems import quote
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.obligations import TierDuty
from kvcustody.times import span


class TierSource(NamedTuple):
    """One entry of the policy that bounds a tier: what it is called, its line, and what it says."""

    what: str
    line: int
    says: str


class TierAnswer(NamedTuple):
    """What holds for copies in one tier, and what it comes of."""

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
        """As JSON."""
        return {
            "tier": self.tier.value,
            "permitted": self.permitted,
            **self.duty._asdict(),
            "sources": [source._asdict() for source in self.sources],
        }


def explain_tiers(table: DecisionTable, tenant: str, level: int) -> tuple[TierAnswer, ...]:
    """One answer a tier, in their order. Raises `PolicyError` for a level that does not exist."""
    return tuple(
        TierAnswer(tier, table.tier_duty(tenant, level, tier), tuple(_sources(table, tenant, level, tier)))
        for tier in Tier
    )


def _sources(table: DecisionTable, tenant: str, level: int, tier: Tier) -> Iterator[TierSource]:
    policy, entry = table.policy, table.tenant(tenant)
    if entry is None:
        return
    name = policy.classifications[level]
    offloads = [(f"offload of {quote(name)}", policy.offload[level])]
    kept = [(f"retention of {quote(name)}", policy.retention[level])]
    of = f"tenant {quote(entry.id)}: "
    offloads += [(f"{of}offload of {quote(name)}", own) for at, own in entry.offload if at == level]
    kept += [(f"{of}retention of {quote(name)}", own) for at, own in entry.retention if at == level]
    for what, offload in offloads:
        yield TierSource(what, offload.mark.line, _of_offload(offload, tier))
    for what, retention in kept:
        yield TierSource(what, retention.mark.line, _of_retention(retention))


def _of_offload(offload: Offload, tier: Tier) -> str:
    limit = offload.limit(tier)
    if limit is None:
        return f"not to {tier}"
    how = "encrypted" if offload.encrypt else "plain memory allowed"
    return f"at most {span(limit.absolute_us)}, gone within {span(limit.within_us)}, {how}"


def _of_retention(retention: Retention) -> str:
    return f"idle {span(retention.idle_us)}, at most {span(retention.absolute_us)}"
