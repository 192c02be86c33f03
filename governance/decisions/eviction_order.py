"""The policy document's `eviction` as what the pools order by: a policy of the allocator, and priorities of blocks."""

from __future__ import annotations

from functools import lru_cache

from kvcustody.allocator.prefix.block_priority import DEFAULT_PRIORITY, END, BlockPriority, disjoint
from kvcustody.allocator.prefix.eviction_policy import (
    POLICIES,
    CostAware,
    EvictionPolicy,
    Priority,
    SegmentedLru,
)
from kvcustody.policies.document.model import Eviction, EvictionKind, SegmentRule
from kvcustody.policies.document.token_priorities import KindRange, token_priorities


def eviction_order(eviction: Eviction) -> EvictionPolicy:
    """What orders one account's victims."""
    base = DEFAULT_PRIORITY if eviction.priority is None else eviction.priority
    match eviction.kind:
        case EvictionKind.SLRU:
            return SegmentedLru(eviction.hits or 2, eviction.protected)
        case EvictionKind.PRIORITY:
            return Priority(base)
        case EvictionKind.COST:
            return CostAware(base=base)
    return POLICIES[eviction.kind.value]()


@lru_cache(maxsize=1024)
def block_priorities(
    eviction: Eviction,
    block_tokens: int,
    segment: SegmentRule | None = None,
    kinds: tuple[KindRange, ...] = (),
) -> tuple[BlockPriority, ...]:
    """The priorities of a prompt's blocks; a block that two share is the earlier one's. Empty: all the default."""
    spans = token_priorities(eviction, segment, kinds)
    if all(each.priority == DEFAULT_PRIORITY and each.for_us is None for each in spans):
        return ()
    return disjoint(
        (
            each.first // block_tokens,
            END if each.until is None else -(-each.until // block_tokens),
            each.priority,
            each.for_us or 0,
        )
        for each in spans
    )
