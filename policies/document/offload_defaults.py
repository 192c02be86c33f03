"""Defaults of `offload`: how long a copy may stay in a tier, and which stores may hold it.

1. A tenant's own entry goes on from the policy's; the policy's goes on from the classification's retention.
2. Bytes end with the key of their time bucket at the latest, and a bucket is a sixteenth of `absolute` wide. So,
   without a stated value, bytes may outlast their due time by that much, and by at least a second.
"""

from __future__ import annotations

from kvcustody.policies.document.model import Offload, Tier, TierLimit

WITHIN_MIN_US = 1_000_000
BUCKETS = 16


def default_within_us(absolute_us: int) -> int:
    """Return how long after its due time a copy's bytes may still exist."""
    return max(WITHIN_MIN_US, absolute_us // BUCKETS)


def default_limit(tier: Tier, absolute_us: int, policy: Offload | None = None) -> TierLimit:
    """Return the default limit of a tier where blocks may exist for `absolute_us`; `policy`: the entry that a tenant
    inherits.
    """
    wide = None if policy is None else policy.limit(tier)
    if wide is None:
        return TierLimit(tier, absolute_us, default_within_us(absolute_us))
    absolute_us = min(absolute_us, wide.absolute_us)
    return TierLimit(tier, absolute_us, min(wide.within_us, default_within_us(absolute_us)))


def default_match(tiers: tuple[Tier, ...], labels: tuple[str, ...], policy: Offload | None = None) -> tuple[str, ...]:
    """Return the labels that bind a remote store: the policy's or else all declared labels; empty without such a
    store.
    """
    if Tier.REMOTE not in tiers:
        return ()
    return policy.match if policy is not None and Tier.REMOTE in policy.tiers else labels
