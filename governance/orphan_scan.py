"""A full scan of one Governor: its pools, its tiers and its ledger against each other, with recovery and the record.

G1  Without `recover` nothing is changed; without `record` nothing is written.
G2  Findings are repaired one by one, each at most once, and on record with action and outcome.
G3  The ledger is joined only when everything that happened has reached it: the caller flushes its writer first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.block import CLEAN, DIRTY, QUARANTINED
from kvcustody.allocator.sequence import Sequence as Running
from kvcustody.audit.events import Event, OrphanFound, OrphanScanned
from kvcustody.governance.flat_runs import FlatRuns
from kvcustody.governance.scan import Finding, PoolScan, Trouble
from kvcustody.governance.tier import Tier

if TYPE_CHECKING:
    from kvcustody.governance.governor import Governor


class Held(NamedTuple):
    """What one process has, for the join with the ledger: open residencies, and custody as (pool, generation).

    `live` is custody whose end is not on record yet: ACTIVE, CACHED, or waiting for a fence.
    """

    residencies: frozenset[int]
    live: dict[int, NDArray[np.int64]]
    unlisted: int  # of `live`, what no leaf lists before its request ends


class LedgerJoin(Protocol):
    """The ledger's side of a scan."""

    def troubles(self, held: Held, now_us: int) -> list[Trouble]:
        """What the ledger and this process disagree about, each with its repair."""


class Scanned(NamedTuple):
    """What a scan did. Times are boot-time microseconds."""

    findings: tuple[Finding, ...]
    residencies: int
    blocks: int
    started_us: int
    ended_us: int

    @property
    def drift_blocks(self) -> int:
        """Blocks that the pool has in custody and no request, chain or leaf accounts for: how far memory drifted."""
        return sum(len(finding.blocks) for finding in self.findings if finding.orphan in _DRIFT)


_DRIFT = ("reference without sequence", "hold without residency", "lost finish", "ledger gap")


def troubles_of(governor: Governor, live: dict[Running, object], now_us: int) -> tuple[list[Trouble], int]:
    """Findings of every pool, and how many holds and requests were compared."""
    made: list[Trouble] = []
    compared = 0

    def end(sequence: Running) -> None:
        governor.finish(sequence, "orphan", handle=live.get(sequence))

    for manager in governor.managers:
        mine = {sequence for sequence in live if sequence.account.name in manager.accounts}
        scan = PoolScan(manager, mine, now_us, end)
        made += scan.troubles()
        compared += len(scan.sequences) + sum(len(one.residencies) for one in manager.accounts.values())
    return made, compared


def tier_troubles(tiers: Iterable[Tier], now_us: int) -> list[Trouble]:
    """Objects that no index names, and index entries without an object."""
    made: list[Trouble] = []
    for tier in tiers:
        objects, index = tier.objects(), tier.index()
        pairs = (
            ("tier object without index", objects, index, tier.destroy, "destroyed"),
            ("index without tier object", index, objects, tier.forget, "forgotten"),
        )
        for orphan, one, other, repair, action in pairs:
            for key in one.keys() - other.keys():
                finding = Finding(
                    orphan,
                    one[key].tenant,
                    f"in tier `{tier.name}`",
                    (),
                    max(0, now_us - one[key].since_us),
                )
                made.append(Trouble(finding, _TierRepair(repair, key, action)))
    return made


class _TierRepair:
    """Destroys or forgets one key."""

    def __init__(self, repair: Callable[[list[bytes]], int], key: bytes, action: str) -> None:
        self.repair = repair
        self.key = key
        self.action = action

    def __call__(self) -> tuple[str, str]:
        return self.action, "recovered" if self.repair([self.key]) else "gone before"


def held_by(governor: Governor) -> Held:
    """What the process has, from its states and tables alone."""
    live = {}
    for manager in governor.managers:
        pool = manager.pool
        waiting = np.isin(pool.state, (CLEAN, DIRTY, QUARANTINED), invert=True)
        stuck = [custody.blocks for partition in pool.partitions for custody in partition.stuck]
        for blocks in stuck:
            waiting[blocks] = True
        live[manager.number] = np.sort(pool.generation[waiting])
    residencies = frozenset(sequence.residency.id for sequence in governor.running.values())
    return Held(residencies, live, governor.counts().unreported)


def mended(troubles: Sequence[Trouble]) -> tuple[Finding, ...]:
    """Repair them one by one (G2)."""
    return tuple(trouble.mend() for trouble in troubles)


def record(governor: Governor, number: int, mode: str, scanned: Scanned) -> list[Event]:
    """The scan and its findings as events."""
    now_us = scanned.ended_us
    events: list[Event] = [
        OrphanScanned(
            now_us,
            number,
            mode,
            scanned.started_us,
            scanned.ended_us,
            scanned.residencies,
            scanned.blocks,
            len(scanned.findings),
        )
    ]
    for at, finding in enumerate(scanned.findings, 1):
        blocks = np.array(finding.blocks, dtype=np.int64)
        generations = governor.managers[finding.pool].pool.generation[blocks]
        events.append(
            OrphanFound(
                now_us,
                number,
                at,
                finding.orphan,
                finding.cause,
                finding.tenant or None,
                finding.age_us,
                FlatRuns(blocks, generations, finding.pool),
                finding.action,
                finding.outcome,
                finding.residency,
            )
        )
    return events
