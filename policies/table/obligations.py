"""What is owed for a block: how long it may exist, how it ends, where it may go, and its evidence.

1. Where several sources apply: the shortest time, the strictest scrub, verification and integrity check, the
   intersection of tiers, required encryption, the highest audit class. `combine` is commutative, associative and
   idempotent.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.policies.document.model import (
    IntegrityPolicy,
    Offload,
    OnOutage,
    OutagePolicy,
    Policy,
    Retention,
    ScrubPolicy,
    TenantPolicy,
    Tier,
)


class Obligations(NamedTuple):
    """The obligations of one tenant at one classification. `idle_us` or `absolute_us` 0: never CACHED."""

    idle_us: int
    absolute_us: int
    active_max_us: int
    scrub_within_us: int
    verify_share: float
    tiers: tuple[Tier, ...]
    encrypt: bool
    on_outage_decisions: OnOutage
    on_outage_lifecycle: OnOutage
    on_outage_own_hits: OnOutage
    integrity_share: float = 0.0

    @property
    def cacheable(self) -> bool:
        """True when a block may outlive its last reference."""
        return self.idle_us > 0 and self.absolute_us > 0


def combine(first: Obligations, *others: Obligations) -> Obligations:
    """The strictest of several obligations, field by field."""
    result = first
    for other in others:
        result = Obligations(
            idle_us=min(result.idle_us, other.idle_us),
            absolute_us=min(result.absolute_us, other.absolute_us),
            active_max_us=min(result.active_max_us, other.active_max_us),
            scrub_within_us=min(result.scrub_within_us, other.scrub_within_us),
            verify_share=max(result.verify_share, other.verify_share),
            tiers=tuple(tier for tier in Tier if tier in result.tiers and tier in other.tiers),
            encrypt=result.encrypt or other.encrypt,
            on_outage_decisions=max(result.on_outage_decisions, other.on_outage_decisions),
            on_outage_lifecycle=max(result.on_outage_lifecycle, other.on_outage_lifecycle),
            on_outage_own_hits=max(result.on_outage_own_hits, other.on_outage_own_hits),
            integrity_share=max(result.integrity_share, other.integrity_share),
        )
    return result


def obligations_of(policy: Policy, tenant: TenantPolicy | None) -> tuple[Obligations, ...]:
    """One `Obligations` a level: the policy's, combined with the tenant's own where it has some."""
    result = []
    wide = policy.integrity or (IntegrityPolicy(),) * len(policy.classifications)
    for level in range(len(policy.classifications)):
        parts = (policy.retention[level], policy.scrub[level], policy.offload[level])
        owed = _from_parts(*parts, policy.outage[level], wide[level])
        if tenant is not None:
            own = _from_parts(
                dict(tenant.retention).get(level, policy.retention[level]),
                dict(tenant.scrub).get(level, policy.scrub[level]),
                dict(tenant.offload).get(level, policy.offload[level]),
                policy.outage[level],
                dict(tenant.integrity).get(level, wide[level]),
            )
            owed = combine(owed, own)
        result.append(owed)
    return tuple(result)


def ended(policy_wide: tuple[Obligations, ...]) -> Obligations:
    """What is owed to a tenant that the policy does not admit: the end of its custody, at its strictest."""
    strictest = combine(*policy_wide)
    return strictest._replace(idle_us=0, absolute_us=0, verify_share=1.0, tiers=(), encrypt=True)


def _from_parts(
    retention: Retention,
    scrub: ScrubPolicy,
    offload: Offload,
    outage: OutagePolicy,
    integrity: IntegrityPolicy,
) -> Obligations:
    return Obligations(
        idle_us=retention.idle_us,
        absolute_us=retention.absolute_us,
        active_max_us=retention.active_max_us,
        scrub_within_us=scrub.within_us,
        verify_share=float(scrub.verify),
        tiers=offload.tiers,
        encrypt=offload.encrypt,
        on_outage_decisions=outage.decisions,
        on_outage_lifecycle=outage.lifecycle,
        on_outage_own_hits=outage.own_hits,
        integrity_share=float(integrity.verify),
    )
