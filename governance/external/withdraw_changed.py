"""What an engine's workers found changed leaves reach, with everything that was computed from it.

- Requests that run on it go on, for nobody can take back what they have read; they publish nothing more and leave no
  hold, so the blocks end with the last of them.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvcustody.allocator.external.block_sums import ExternalSums
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.integrity import MismatchedBlocks
from kvcustody.governance.external.engine_books import EngineBooks

CAUSE = "integrity"


def withdraw_changed(
    books: EngineBooks, sums: ExternalSums, changed: Blocks, now_us: int
) -> tuple[list[int], list[Hashable]]:
    """Take `changed` out. Returns what the engine must forget, and the running requests that read any of it."""
    pool = books.pool
    running = [(request_id, residency, residency.blocks()) for request_id, residency in books.running.items()]
    for tag in np.unique(pool.tag[changed]).tolist():
        blocks = changed[pool.tag[changed] == tag]
        requests = sum(bool(np.isin(held, blocks).any()) for _, _, held in running)
        sums.found.append(
            MismatchedBlocks(pool.domains[tag], blocks, pool.generation[blocks], requests, now_us)
        )
    sums.strike(changed)
    reach = pool.continuations(changed)
    readers: list[Hashable] = []
    for request_id, residency, held in running:
        if np.isin(held, reach).any():
            residency.publishes = False
            readers.append(request_id)
    return pool.withdraw(reach, CAUSE, now_us), readers
