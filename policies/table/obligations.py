"""Obligations for a block: how long it may exist, how it ends, where it may go, and its evidence.

1. `combine` is commutative, associative and idempotent. Where several sources apply, it takes:
   - the shortest time;
   - the strictest scrub, verification and integrity check;
   - the intersection of tiers, and of the places of a remote store;
   - required encryption;
   - the highest audit class.
2. No copy of a block is kept in a tier for longer than the block may exist on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvcustody.policies.document.model import (
    IntegrityPolicy,
    Labels,
    Offload,
    OnOutage,
    OutagePolicy,
    Policy,
    Retention,
    ScrubPolicy,
    TenantPolicy,
    Tier,
    TierLimit,
)
from kvcustody.policies.document.offload_defaults import BUCKETS, default_within_us

NOWHERE = (0,) * len(Tier)


class TierDuty(NamedTuple):
    """The obligations for copies of a tenant's blocks in one tier, and the sources that decided them.

    `absolute_us`: how long a copy of published blocks may be there, 0: not at all. `within_us`: how long its bytes may
    still be there after it is due. `running_us`: how long blocks of a request that goes on may be there, 0: not at
    all. `match`: the labels in which a remote store has to agree with a domain that has them.
    """

    absolute_us: int
    within_us: int
    running_us: int
    encrypt: bool
    match: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    @property
    def bucket_us(self) -> int:
        """The maximum width of a time bucket such that destroying its key ends the bytes in time."""
        return max(1, min(self.absolute_us // BUCKETS, self.within_us))

    def allows(self, labels: Labels, place: Mapping[str, Collection[str]]) -> bool:
        """Return whether copies of a domain with these labels may be in a store with these label values."""
        return all(value in place.get(name, ()) for name, value in labels if name in self.match)


class Obligations(NamedTuple):
    """The obligations of one tenant at one classification. `idle_us` or `absolute_us` 0: never CACHED.

    `tier_absolute_us`, `tier_within_us` and `tier_running_us` have an entry for each `Tier`, in order: 0 where blocks
    may not go there.
    """

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
    tier_absolute_us: tuple[int, ...] = NOWHERE
    tier_within_us: tuple[int, ...] = NOWHERE
    tier_running_us: tuple[int, ...] = NOWHERE
    match: tuple[str, ...] = ()

    @property
    def cacheable(self) -> bool:
        """True when a block may outlive its last reference."""
        return self.idle_us > 0 and self.absolute_us > 0

    def in_tier(self, tier: Tier) -> TierDuty:
        """Return the obligations for copies in a tier according to the sections; rules may still forbid them."""
        at = _TIERS.index(tier)
        absolute_us = min(self.tier_absolute_us[at], self.absolute_us)
        return TierDuty(
            absolute_us if self.cacheable else 0,
            self.tier_within_us[at],
            self.tier_running_us[at],
            self.encrypt or tier.must_encrypt,
            self.match if tier is Tier.REMOTE else (),
        )


_TIERS = tuple(Tier)


def combine(first: Obligations, *others: Obligations) -> Obligations:
    """Return the strictest of several obligations, field by field."""
    result = first
    for other in others:
        tiers = tuple(tier for tier in Tier if tier in result.tiers and tier in other.tiers)
        result = Obligations(
            idle_us=min(result.idle_us, other.idle_us),
            absolute_us=min(result.absolute_us, other.absolute_us),
            active_max_us=min(result.active_max_us, other.active_max_us),
            scrub_within_us=min(result.scrub_within_us, other.scrub_within_us),
            verify_share=max(result.verify_share, other.verify_share),
            tiers=tiers,
            encrypt=result.encrypt or other.encrypt,
            on_outage_decisions=max(result.on_outage_decisions, other.on_outage_decisions),
            on_outage_lifecycle=max(result.on_outage_lifecycle, other.on_outage_lifecycle),
            on_outage_own_hits=max(result.on_outage_own_hits, other.on_outage_own_hits),
            integrity_share=max(result.integrity_share, other.integrity_share),
            tier_absolute_us=_shortest(result.tier_absolute_us, other.tier_absolute_us),
            tier_within_us=_shortest(result.tier_within_us, other.tier_within_us),
            tier_running_us=_shortest(result.tier_running_us, other.tier_running_us),
            match=tuple(sorted({*result.match, *other.match})) if Tier.REMOTE in tiers else (),
        )
    return result


def _shortest(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(min, one, other))


def obligations_of(policy: Policy, tenant: TenantPolicy | None) -> tuple[Obligations, ...]:
    """Return one `Obligations` for each level: the policy's, combined with the tenant's own."""
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


class ObligationsOf:
    """`obligations_of` one policy, computed once for all tenants with equal entries: most have none of their own."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[object, tuple[Obligations, ...]] = {}

    def __call__(self, tenant: TenantPolicy | None) -> tuple[Obligations, ...]:
        """One `Obligations` a level; the same object for equal ones."""
        own = None if tenant is None else (tenant.retention, tenant.scrub, tenant.offload, tenant.integrity)
        if own not in self._known:
            self._known[own] = obligations_of(self._policy, tenant)
        return self._known[own]


def ended(policy_wide: tuple[Obligations, ...]) -> Obligations:
    """Return the obligations to a tenant that the policy does not admit: the strictest end of its custody."""
    strictest = combine(*policy_wide)
    return strictest._replace(
        idle_us=0,
        absolute_us=0,
        verify_share=1.0,
        tiers=(),
        encrypt=True,
        tier_absolute_us=NOWHERE,
        tier_within_us=NOWHERE,
        tier_running_us=NOWHERE,
        match=(),
    )


def _from_parts(
    retention: Retention,
    scrub: ScrubPolicy,
    offload: Offload,
    outage: OutagePolicy,
    integrity: IntegrityPolicy,
) -> Obligations:
    limits = [limit and _shortened(limit, retention.absolute_us) for limit in map(offload.limit, Tier)]
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
        tier_absolute_us=tuple(each.absolute_us if each else 0 for each in limits),
        tier_within_us=tuple(each.within_us if each else 0 for each in limits),
        tier_running_us=tuple(_running_us(limit, retention) for limit in map(offload.limit, Tier)),
        match=offload.match,
    )


def _running_us(limit: TierLimit | None, retention: Retention) -> int:
    """For how long blocks of a request that goes on may be in a tier, also where nothing outlives its request."""
    if limit is None:
        return 0
    return min(filter(None, (limit.absolute_us, retention.absolute_us, retention.active_max_us)))


def _shortened(limit: TierLimit, absolute_us: int) -> TierLimit:
    """Return a limit, cut to blocks that exist for `absolute_us`. Values derived from a tier's `absolute` follow it."""
    shorter = min(limit.absolute_us, absolute_us)
    follows = limit.within_us == default_within_us(limit.absolute_us)
    return TierLimit(limit.tier, shorter, default_within_us(shorter) if follows else limit.within_us)
