"""The work list of a scrub: one 64-bit entry for each run of adjacent blocks, so that one small list is enough.

    bits 0-31 first block | 32-42 blocks in the run | 43-60 position | 61 plant a fault (tests) | 62 read back

- The position is the place of the run's first block in the list of blocks. The flag of the run's n-th block is flag
  `position + n`, so each block that is read back has its own flag.
- The entries of a list are in ascending order, and no block is outside the pool.
- A run is never longer than `group`: what one program of the kernel writes at once.
- `IDLE` names a block that no pool has: the kernel skips it, so a list may be padded to a fixed length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_BITS = 32
COUNT_BITS = 11
POSITION_BITS = 18
GROUP_MAX = (1 << COUNT_BITS) - 1
BLOCKS_MAX = 1 << POSITION_BITS  # of one list
FAULT = 1 << 61
READ_BACK = 1 << 62
IDLE = (1 << BLOCK_BITS) - 1  # count 0
POSITION_SHIFT = BLOCK_BITS + COUNT_BITS
_POSITIONS = np.arange(BLOCKS_MAX, dtype=np.int64) << POSITION_SHIFT


def entries_of(
    ordered: NDArray[np.int64], group: int, *, read_back: NDArray[np.bool_] | bool = False
) -> NDArray[np.int64]:
    """Return int64 [entries] for `ordered`, ascending or a concatenation of ascending lists; at most `group` blocks an
    entry.

    read_back: for all, or bool [blocks] for each; blocks of one entry are all read back, or none is. A list that is
    read back has at most `BLOCKS_MAX` blocks; without it entries have no position.
    """
    count = len(ordered)
    starts: NDArray[np.int64] | slice = slice(None)
    if group == 1 or count < 2:
        entries = ordered | (1 << BLOCK_BITS)
    else:
        starts, lengths = _runs(ordered, read_back, group)
        entries = ordered[starts]
        lengths <<= BLOCK_BITS
        entries |= lengths
    if read_back is False or not count:
        return entries
    entries |= _POSITIONS[:count][starts]
    if read_back is True:
        return entries | READ_BACK
    return np.where(np.asarray(read_back)[starts], entries | READ_BACK, entries)


def _runs(
    ordered: NDArray[np.int64], read_back: NDArray[np.bool_] | bool, group: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each entry begins, and its blocks: at a gap, where the mark changes, and after `group` blocks of a run."""
    gap = ordered[1:] - ordered[:-1] != 1
    if not isinstance(read_back, bool):
        gap |= read_back[1:] != read_back[:-1]
    breaks = gap.nonzero()[0]
    bounds = np.empty(len(breaks) + 2, dtype=np.int64)
    bounds[0], bounds[-1] = 0, len(ordered)
    np.add(breaks, 1, out=bounds[1:-1])
    starts = bounds[:-1]
    lengths = bounds[1:] - starts
    if len(ordered) <= group or len(breaks) == len(gap) or int(lengths.max()) <= group:
        return starts, lengths
    pieces = -(-lengths // group)
    behind = pieces.cumsum()
    place = np.arange(int(behind[-1])) - (behind - pieces).repeat(pieces)
    place *= group
    return starts.repeat(pieces) + place, np.minimum(lengths.repeat(pieces) - place, group)


def blocks_of(entry: int) -> NDArray[np.int64]:
    """Return the blocks that one entry names."""
    first = entry & ((1 << BLOCK_BITS) - 1)
    return np.arange(first, first + ((entry >> BLOCK_BITS) & GROUP_MAX), dtype=np.int64)


def position_of(entry: int) -> int:
    """Return the position of the entry's first block in the list of blocks."""
    return (entry >> POSITION_SHIFT) & (BLOCKS_MAX - 1)
