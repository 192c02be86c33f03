"""The allocator's own counters, in the shape in which conservation compares them with the ledger.

- Nothing here comes from an event: states, generations, block tables and device counters only.
- A block is live until its custody end is on its way to the ledger, so FENCED blocks are live, and so are those
  quarantined because their fence never retired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.governance.governor.sequence_events import unlisted


def pool_counts(
    managers: Sequence[BlockManager], running: Iterable[tuple[BlockManager, RunningSequence]]
) -> PoolCounts:
    """Counts over all pools of a process, at a moment when every event has been handed over."""
    pools = [manager.pool for manager in managers]
    stuck = sum(
        len(custody.blocks) for pool in pools for partition in pool.partitions for custody in partition.stuck
    )
    open_now = list(running)

    def in_state(*states: BlockState) -> int:
        return sum(pool.counts[state] for pool in pools for state in states)

    shards = max((pool.memory.shards for pool in pools), default=0)
    return PoolCounts(
        allocated_total=sum(pool.next_generation - 1 for pool in pools),
        unreported=sum(len(unlisted(sequence, manager)[0]) for manager, sequence in open_now),
        live_blocks=in_state(BlockState.ACTIVE, BlockState.CACHED, BlockState.FENCED) + stuck,
        fenced=0,
        # Memory that was never in custody waits for its first scrub at generation 0 and counts nowhere.
        dirty=sum(
            int(np.count_nonzero((pool.state == BlockState.DIRTY) & (pool.generation > 0))) for pool in pools
        ),
        quarantined=in_state(BlockState.QUARANTINED) - stuck,
        scrubbed=tuple(sum(pool.memory.scrubbed(shard) for pool in pools) for shard in range(shards)),
        open_residencies=len(open_now),
    )
