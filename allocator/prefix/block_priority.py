"""Retention priorities of a request's blocks: which blocks have which priority, and for how long.

    plan = disjoint([(0, 4, 90, HOUR_US), (4, END, 20, 0)], base=35)      # what a policy's ranges say, in blocks
    sequence.priorities = list(plan)

1. Ranges are sorted and share no block; the earlier of two that do has had it.
2. Whatever no range names has the base priority. A plan that says nothing but the default is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

DEFAULT_PRIORITY = 35  # as TensorRT-LLM's KvCacheRetentionConfig
END = 1 << 40  # the block after the last one of any prompt


class BlockPriority(NamedTuple):
    """Blocks [first, last) of a prompt. The priority lapses `duration_us` after their release; 0 means never."""

    first: int
    last: int
    priority: int
    duration_us: int


def disjoint(ranges: Iterable[tuple[int, int, int, int]], base: int = DEFAULT_PRIORITY) -> tuple[BlockPriority, ...]:
    """Return ranges that may overlap as disjoint ranges, with the gaps at `base` (rules 1 and 2)."""
    plan: list[BlockPriority] = []
    taken = 0
    for first, last, priority, duration_us in sorted(ranges):
        if last <= taken:
            continue
        if first > taken and base != DEFAULT_PRIORITY:
            plan.append(BlockPriority(taken, first, base, 0))
        plan.append(BlockPriority(max(first, taken), last, priority, duration_us))
        taken = last
    if taken < END and base != DEFAULT_PRIORITY:
        plan.append(BlockPriority(taken, END, base, 0))
    return tuple(plan)
