"""The books of a Governor, as a scan reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.block_state import CLEAN, DIRTY, QUARANTINED
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.governance.erasure.tier_protocol import CopyStore
from kvcustody.governance.governor.governor_view import GovernorView
from kvcustody.governance.orphans.finding import RepairableFinding
from kvcustody.governance.orphans.online_pool_scan import OnlineScan
from kvcustody.governance.orphans.pool_scan import PoolScan
from kvcustody.governance.orphans.scan_protocol import Held
from kvcustody.governance.orphans.slices import Slices


class GovernorScanSource:
    """Its block managers against its requests."""

    def __init__(self, governor: GovernorView) -> None:
        self._governor = governor

    def findings(self, now_us: int) -> tuple[list[RepairableFinding], int]:
        """Findings of every pool, and how many holds and requests were compared."""
        governor = self._governor
        live = {sequence: handle for handle, sequence in governor.running.items()}
        made: list[RepairableFinding] = []
        compared = 0

        def end(sequence: RunningSequence) -> None:
            governor.finish(sequence, "orphan", handle=live.get(sequence))

        for manager in governor.managers:
            mine = {sequence for sequence in live if sequence.account.name in manager.accounts}
            scan = PoolScan(manager, mine, now_us, end)
            made += scan.findings()
            compared += len(scan.sequences) + len(manager.hold_table)
        return made, compared

    def tiers(self) -> Sequence[CopyStore]:
        """Its tiers off the device."""
        return self._governor.erasures.tiers

    def held(self) -> Held:
        """Open residencies, and custody in every pool."""
        live = {}
        for manager in self._governor.managers:
            pool = manager.pool
            waiting = np.isin(pool.state, (CLEAN, DIRTY, QUARANTINED), invert=True)
            for partition in pool.partitions:
                for custody in partition.stuck:
                    waiting[custody.blocks] = True
            live[manager.number] = pool.generation[waiting]
        residencies = frozenset(sequence.residency.id for sequence in self._governor.running.values())
        return Held(residencies, live, self._governor.counts().unreported)

    def generations(self, pool: int) -> NDArray[np.int64]:
        """By block of one pool, its generation now."""
        return self._governor.managers[pool].pool.generation

    def slices(self) -> list[Slices]:
        """An online scan of each pool."""
        running = self._governor.running

        def is_live(sequence: RunningSequence) -> bool:
            return running.get(sequence.id) is sequence

        return [OnlineScan(manager, is_live) for manager in self._governor.managers]
