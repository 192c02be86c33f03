"""Repair the state of an external pool where a scan found it wrong; the counterpart of `manager.repair`.

Nothing here guesses in favour of reuse: what cannot be explained ends, and goes the way of all ended custody.

- After a repair the pool's arrays and the residencies agree about what was repaired.
- Every function returns the blocks that the engine must forget.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, Blocks


def set_refs(pool: ExternalPool, blocks: Blocks, refs: NDArray[np.int64], now_us: int) -> list[int]:
    """Set the references of these blocks in custody; a block without references that nobody holds ends."""
    pool.refs[blocks] = refs
    pool.state[blocks[refs > 0]] = ACTIVE
    unused = blocks[(refs == 0) & (pool.state[blocks] == ACTIVE)]
    if not len(unused):
        return []
    pool.refs[unused] = 1
    return pool.decref(unused, "orphan", now_us)


def set_holds(pool: ExternalPool, blocks: Blocks, holds: NDArray[np.int64], now_us: int) -> list[int]:
    """Set the holds of these blocks in custody; CACHED blocks without any end."""
    pool.holds[blocks] = holds
    pool.recount_holds()
    return pool.end_cached(blocks[(holds == 0) & (pool.state[blocks] == CACHED)], "orphan", now_us)


def drop_ended(pool: ExternalPool, residency: ExternalResidency) -> int:
    """Remove blocks that ended from the running residency that refers to them; return how many there were."""
    stale = stale_generations(pool, residency)
    if len(stale):
        residency.drop(stale)
    return len(stale)


def stale_generations(pool: ExternalPool, residency: ExternalResidency) -> NDArray[np.int64]:
    """Return the generations that a residency refers to although their custody has ended."""
    generations, blocks = residency.generations(), residency.blocks()
    in_custody = (pool.state[blocks] == ACTIVE) | (pool.state[blocks] == CACHED)
    stale: NDArray[np.int64] = generations[(pool.generation[blocks] != generations) | ~in_custody]
    return stale
