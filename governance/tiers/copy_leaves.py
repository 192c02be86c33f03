"""Ledger events from a tier's events: copies of one tenant, classification and cause share a leaf.

    emit(copy_leaves(tier.name, tier.take_events(), tier.within_us))

A copy's steps stay in their order: what it was stored by is a leaf before the one that ends it. What an earlier process
left (number 0) stands in leaves of its own: it is no copy of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcustody.audit.kinds import (
    CopiesDestroyed,
    CopiesEnded,
    CopiesLocked,
    CopiesStored,
    Event,
    TierInherited,
)
from kvcustody.governance.tiers.copy_event import CopyEvent

COPIES_A_LEAF = 40  # the longest lists of so many fit a leaf beside the longest names
WITHIN_US = 1_000_000
_STEPS = ("inherited", "stored", "ended", "destroyed", "locked")


def copy_leaves(
    tier: str, events: Sequence[CopyEvent], within_us: Callable[[str, str], int] = lambda *_: WITHIN_US
) -> list[Event]:
    """Return the events of these steps of one tier's copies.

    `within_us(tenant, classification)`: how long after it was due a copy may be proved destroyed, by the tier's policy.
    """
    assert all(event.step in _STEPS for event in events), "a copy is inherited, stored, ended, destroyed or locked"
    groups: dict[tuple[str | bool, ...], list[CopyEvent]] = {}
    for step in _STEPS:
        for event in events:
            if event.step == step:
                whose = (event.tenant, event.classification, event.number > 0)
                key = (step, *whose, event.cause, event.erasure, *event.heir_of)
                groups.setdefault(key, []).append(event)
    return [
        _leaf(tier, group[start : start + COPIES_A_LEAF], within_us)
        for group in groups.values()
        for start in range(0, len(group), COPIES_A_LEAF)
    ]


def _leaf(tier: str, group: list[CopyEvent], within_us: Callable[[str, str], int]) -> Event:
    first = group[0]
    at_us, due_us = tuple(one.at_us for one in group), tuple(one.due_us for one in group)
    names, numbers = tuple(one.name.hex() for one in group), tuple(one.number for one in group)
    blocks, sizes = tuple(one.blocks for one in group), tuple(one.size for one in group)
    now_us, tenant, classification = max(at_us), first.tenant, first.classification
    if first.step == "inherited":
        before = first.heir_of
        return TierInherited(
            now_us,
            tier,
            tenant,
            classification,
            first.cause,
            before.worker,
            before.incarnation,
            names,
            blocks,
            sizes,
        )
    if first.step == "locked":
        return CopiesLocked(now_us, tier, tenant, classification, names, numbers, blocks, sizes, due_us, first.erasure)
    if first.step == "stored":
        within = within_us(tenant, classification)
        return CopiesStored(now_us, tier, tenant, classification, names, numbers, blocks, sizes, due_us, at_us, within)
    if first.step == "ended":
        return CopiesEnded(
            now_us,
            tier,
            tenant,
            classification,
            first.cause,
            names,
            numbers,
            blocks,
            sizes,
            due_us,
            at_us,
            within_us(tenant, classification),
            first.erasure,
        )
    whose = tenant or None
    return CopiesDestroyed(now_us, tier, whose, classification, first.cause, names, numbers, blocks, sizes, at_us)
