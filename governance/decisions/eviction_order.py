"""Converts a policy document's `eviction` to the allocator's eviction policy and block priorities."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from kvcustody.allocator.prefix.block_priority import DEFAULT_PRIORITY, END, BlockPriority, disjoint
from kvcustody.allocator.prefix.eviction_policy import (
    POLICIES,
    CostAware,
    EvictionPolicy,
    Priority,
    SegmentedLru,
    ValueAware,
)
from kvcustody.allocator.prefix.think_times import ThinkTimes
from kvcustody.policies.document.model import Eviction, EvictionKind, LearnedFrom, SegmentRule
from kvcustody.policies.document.token_priorities import KindRange, token_priorities


def eviction_orders(eviction: Eviction) -> Callable[[], EvictionPolicy]:
    """Return a function that makes the eviction order of each account of one pool.

    What is learned is each account's own, unless the policy says that it is the pool's.
    """
    everybodys = ThinkTimes() if eviction.learned is LearnedFrom.POOL else None
    return lambda: _order(eviction, everybodys)


def _order(eviction: Eviction, everybodys: ThinkTimes | None) -> EvictionPolicy:
    base = DEFAULT_PRIORITY if eviction.priority is None else eviction.priority
    match eviction.kind:
        case EvictionKind.SLRU:
            return SegmentedLru(eviction.hits or 2, eviction.protected)
        case EvictionKind.PRIORITY:
            return Priority(base)
        case EvictionKind.COST:
            return CostAware(base=base)
        case EvictionKind.VALUE:
            signals = frozenset(each.value for each in eviction.signals)
            return ValueAware(signals, base=base, think_times=everybodys)
    return POLICIES[eviction.kind.value]()


@lru_cache(maxsize=1024)
def block_priorities(
    eviction: Eviction,
    block_tokens: int,
    segment: SegmentRule | None = None,
    kinds: tuple[KindRange, ...] = (),
) -> tuple[BlockPriority, ...]:
    """Return the priorities of a prompt's blocks; where two parts share a block, the earlier decides. Empty: all
    default.
    """
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
