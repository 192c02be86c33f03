"""The states of a block and the only moves between them (docs/concepts/block-lifecycle.md).

    CLEAN -> ACTIVE -> CACHED -> FENCED -> DIRTY -> CLEAN        handed out, released, ended, device idle, zeroed
                      CACHED -> ACTIVE                           attached again
             ACTIVE ----------> FENCED                           ended without being cached
                                FENCED, DIRTY -> QUARANTINED     a stuck fence; a scrub that did not verify

- A move that is not in `TRANSITIONS` never happens; `Pool.move` is the one method that moves.
- What `Pool.take_back` undoes has not happened: nobody was told of it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int64]
"""Block indices, one dimension, int64."""

EMPTY: Blocks = np.empty(0, dtype=np.int64)

NEVER_US = 1 << 62
"""A time that does not come."""


class BlockState(IntEnum):
    """The state of a block. The integer is what the state array stores."""

    CLEAN = 0
    ACTIVE = 1
    CACHED = 2
    FENCED = 3
    DIRTY = 4
    QUARANTINED = 5


# Plain integers for the hot path: reaching an enum's member costs more than the move itself.
CLEAN = int(BlockState.CLEAN)
ACTIVE = int(BlockState.ACTIVE)
CACHED = int(BlockState.CACHED)
FENCED = int(BlockState.FENCED)
DIRTY = int(BlockState.DIRTY)
QUARANTINED = int(BlockState.QUARANTINED)

TRANSITIONS: frozenset[tuple[BlockState, BlockState]] = frozenset(
    {
        (BlockState.CLEAN, BlockState.ACTIVE),
        (BlockState.ACTIVE, BlockState.CACHED),
        (BlockState.ACTIVE, BlockState.FENCED),
        (BlockState.CACHED, BlockState.ACTIVE),
        (BlockState.CACHED, BlockState.FENCED),
        (BlockState.FENCED, BlockState.DIRTY),
        (BlockState.FENCED, BlockState.QUARANTINED),  # the fence outlived its bound
        (BlockState.DIRTY, BlockState.CLEAN),
        (BlockState.DIRTY, BlockState.QUARANTINED),  # it did not verify
        (BlockState.QUARANTINED, BlockState.DIRTY),  # a late fence retired; never after a failed verification
    }
)


class Handle(NamedTuple):
    """The name of a block within one custody; a bare index is never a handle."""

    block: int
    generation: int
