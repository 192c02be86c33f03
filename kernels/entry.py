"""The work list of a scrub: one 64-bit entry a run of adjacent blocks, so that one small copy carries it all.

    bits 0-31 first block | bits 32-55 blocks in the run | bit 61 plant a fault (tests) | bit 62 read back

- The entries of a list name each block once, in ascending order, and no block outside the pool.
- A run is never longer than `group`: what one program of the kernel writes at once.
- `IDLE` names a block that no pool has: the kernel skips it, so a list may be padded to a fixed length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_BITS = 32
COUNT_BITS = 24
FAULT = 1 << 61
READ_BACK = 1 << 62
IDLE = (1 << BLOCK_BITS) - 1  # count 0


def entries_of(
    ordered: NDArray[np.int64], group: int, *, read_back: NDArray[np.bool_] | bool = False
) -> NDArray[np.int64]:
    """int64 [entries] for the ascending list `ordered`, at most `group` adjacent blocks an entry.

    read_back: for all, or bool [blocks] for each; blocks of one entry are all read back, or none is.
    """
    count = len(ordered)
    if group == 1 or not count:
        entries = ordered | (1 << BLOCK_BITS)
        return entries | np.where(read_back, READ_BACK, 0) if count else entries
    marked = np.broadcast_to(read_back, ordered.shape)
    starts = _starts(ordered, marked, group)
    lengths = np.diff(np.append(starts, count))
    entries = ordered[starts] | (lengths << BLOCK_BITS)
    return entries | np.where(marked[starts], READ_BACK, 0)


def _starts(ordered: NDArray[np.int64], marked: NDArray[np.bool_], group: int) -> NDArray[np.int64]:
    """Where each entry begins: at a gap, where the mark changes, and after every `group` blocks of a run."""
    place = np.arange(len(ordered))
    gap = np.ones(len(ordered), dtype=bool)
    np.logical_or(np.diff(ordered) != 1, marked[1:] != marked[:-1], out=gap[1:])
    run_start = np.maximum.accumulate(np.where(gap, place, 0))
    return np.flatnonzero((place - run_start) % group == 0)


def blocks_of(entry: int) -> NDArray[np.int64]:
    """The blocks that one entry names."""
    first = entry & ((1 << BLOCK_BITS) - 1)
    return np.arange(first, first + ((entry >> BLOCK_BITS) & ((1 << COUNT_BITS) - 1)), dtype=np.int64)
