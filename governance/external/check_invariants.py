"""The invariants of an engine port's books, recomputed from its residencies."""

from __future__ import annotations

import numpy as np

from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, BlockState
from kvcustody.governance.external.port_view import PortView


def check(port: PortView) -> list[str]:
    """Recompute references, holds and charges from the residencies; every difference is a problem."""
    pool = port.pool
    problems: list[str] = []
    refs = np.zeros(pool.blocks, dtype=np.int64)
    for residency in port.running.values():
        np.add.at(refs, residency.blocks(), 1)
    if (refs != pool.refs).any():
        at = np.flatnonzero(refs != pool.refs)
        problems.append(
            f"references of blocks {at[:8].tolist()}: counted {refs[at[:8]].tolist()}, "
            f"kept {pool.refs[at[:8]].tolist()}"
        )
    holds = np.zeros(pool.blocks, dtype=np.int64)
    for account in pool.accounts.values():
        for hold in pool.hold_table.of(account):
            valid = hold.held[pool.generation[hold.held] == hold.held_generations]
            np.add.at(holds, valid, 1)
    live = (pool.state == ACTIVE) | (pool.state == CACHED)
    if (holds[live] != pool.holds[live]).any():
        problems.append("holds kept per block differ from those of the residencies")
    if ((pool.state == ACTIVE) != (pool.refs > 0)).any():
        problems.append("a block is ACTIVE without a reference, or referenced and not ACTIVE (L1)")
    if ((pool.state == CACHED) & ~pool.indexed).any():
        problems.append("a CACHED block is not indexed")
    if (pool.indexed & ~live).any():
        problems.append("an indexed block is in nobody's custody")
    for account in pool.accounts.values():
        tags = [tag for tag, domain in pool.domains.items() if domain.owner is account]
        used = int(np.count_nonzero(live & np.isin(pool.tag, tags)))
        if used != account.used_blocks:
            problems.append(f"tenant `{account.name}` is charged {account.used_blocks} blocks and has {used}")
    if pool.ranking is not None:
        above = pool.ranking.out_of_order(np.flatnonzero(pool.state == CACHED))
        if len(above):
            problems.append(f"blocks {above[:8].tolist()} would leave after what they continue (L7)")
    total = sum(pool.counts().values())
    if total != pool.partition.size:
        problems.append(f"{total} blocks in all states, {pool.partition.size} in the pool (L1)")
    if int(np.count_nonzero(pool.state == BlockState.CACHED)) and not len(pool.hold_table):
        problems.append("blocks are CACHED and no hold will lapse")
    return problems
