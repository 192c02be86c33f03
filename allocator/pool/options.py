"""The configuration of a pool (`PoolOptions`), and its division into partitions: one for all, or one each in
`strict`.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.allocator.pool.accounting import PoolPartition
from kvcustody.errors import CapacityError


class PoolOptions(NamedTuple):
    """The configuration of a pool. Counts are blocks, times microseconds.

    reserve_low, reserve_high: the clean reserve is refilled to `high` when it falls below `low`.
    evict_ahead: under pressure at least this many are evicted at once (one scrub launch).
    refill_batch: at most this many are evicted in one step to refill the reserve.
    scrub_batch: DIRTY blocks worth a launch before their deadline asks for one.
    sweep_batch: residencies lapsed per step at most; a count, so that replays are deterministic.
    """

    block_tokens: int = 16
    reserve_low: int = 0
    reserve_high: int = 0
    evict_ahead: int = 1024
    refill_batch: int = 1024
    scrub_batch: int = 1024
    sweep_batch: int = 128
    fence_bound_us: int = 30_000_000
    keep_last_token: bool = True
    windows: tuple[int, ...] = ()


DEFAULT_OPTIONS = PoolOptions()


def cut(blocks: int, options: PoolOptions, partitions: dict[str, int] | None) -> dict[str, PoolPartition]:
    """Return the pool's partitions by account name; "" is the common one."""
    if not partitions:
        return {"": PoolPartition(0, blocks, options.reserve_low, options.reserve_high)}
    if sum(partitions.values()) > blocks:
        raise CapacityError(
            f"partitions of {sum(partitions.values())} blocks do not fit in a pool of `{blocks}`",
            blocks=blocks,
        )
    cut: dict[str, PoolPartition] = {}
    first = 0
    for name, size in partitions.items():
        cut[name] = PoolPartition(first, size, *reserve_of(size, blocks, options))
        first += size
    return cut


def reserve_of(size: int, blocks: int, options: PoolOptions) -> tuple[int, int]:
    """Return a partition's share of the clean reserve: low and high marks."""
    return min(options.reserve_low * size // blocks, size // 2), min(options.reserve_high * size // blocks, size // 2)
