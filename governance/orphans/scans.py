"""The orphan scans of one process: full scans with recovery, slices beside its steps, and their records.

- `scan` changes nothing and writes nothing.
- `scan_and_recover` repairs findings one by one, each at most once, and records them with action and outcome.
- A step does one slice of one pool, whatever the number of pools.
- A tier's objects are compared with its index, and this process's books with its ledger. Nothing in the process moves
  meanwhile: the join with the ledger has what was held when the scan began.
- Of a tier whose stores are in other processes these compare, when a full scan asks them; what they find and end is a
  scan of its own on record. A store that is away is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.audit.kinds import Event, OrphanFound, OrphanScanned
from kvcustody.audit.kinds.block_runs import FlatRuns
from kvcustody.clock import Clock
from kvcustody.errors import StoreError
from kvcustody.governance.erasure.tier_protocol import ComparedElsewhere, CopyCustody, CopyStore, HeldCopy
from kvcustody.governance.orphans.finding import DRIFT, Finding, RepairableFinding, repair_all
from kvcustody.governance.orphans.scan_protocol import Census, Held, LedgerJoin, PoolFindings, TierCopies
from kvcustody.governance.orphans.slices import Slices
from kvcustody.logger import get_logger

_log = get_logger(__name__)
PAST_US = 1_000_000  # a copy that is due is ended by the next step, which may be as late
PAST_CEILING = "copy past its ceiling"


class Scanned(NamedTuple):
    """The result of a scan. Times are boot-time microseconds."""

    findings: tuple[Finding, ...]
    residencies: int
    blocks: int
    started_us: int
    ended_us: int
    number: int = 0  # by which this process's record names it; 0: it is not on record

    @property
    def drift_blocks(self) -> int:
        """Memory drift: blocks in the pool's custody that no request, chain or leaf accounts for."""
        return sum(len(finding.blocks) for finding in self.findings if finding.orphan in DRIFT)


class OrphanScans:
    """Scans the `census` and `tiers`; events go to `emit`. Called on the owning thread."""

    def __init__(
        self,
        census: Callable[[], Census],
        tiers: Sequence[CopyStore],
        clock: Clock,
        emit: Callable[[Sequence[Event]], None],
    ) -> None:
        self._census = census
        self._tiers = tiers
        self._clock = clock
        self._emit = emit
        self._number = 0
        self._online: list[Slices] = []
        self._turn = 0
        self._drifted: set[tuple[int, int]] = set()  # pool and block

    @property
    def drift_blocks(self) -> int:
        """Memory drift: blocks that scans found unaccounted for, and that nothing has repaired."""
        return len(self._drifted)

    def scan(self) -> list[Finding]:
        """Return every disagreement of allocator, live requests, holds, queues and tiers."""
        return [trouble.finding for trouble in self._findings(self._clock.now_us(), None).findings]

    def scan_and_recover(self, ledger: LedgerJoin | None, mode: str) -> Scanned:
        """Scan, repair every finding, and emit both. With `ledger`, the scan covers the ledger too."""
        started_us = self._clock.now_us()
        findings, compared, blocks = self._findings(started_us, ledger)
        scanned = Scanned(repair_all(findings), compared, blocks, started_us, self._clock.now_us())
        self._drifted.clear()
        self._note_drift(scanned.findings)
        recorded = self._record(mode, scanned)
        for tier in self._tiers:
            if isinstance(tier, ComparedElsewhere):
                tier.order_comparison()
        return recorded

    def record_elsewhere(self, findings: Sequence[Finding], started_us: int) -> None:
        """Record what other processes found and repaired for a full scan."""
        if findings:
            self._record("workers", Scanned(tuple(findings), 0, 0, started_us, self._clock.now_us()))
            _log.warning("orphans found by workers", findings=len(findings), first=findings[0].orphan)

    def _findings(self, now_us: int, ledger: LedgerJoin | None) -> PoolFindings:
        """The ledger answers on a thread of its own meanwhile: its database works without the interpreter."""
        census = self._census()
        with ThreadPoolExecutor(1, "orphan-scan") as beside:
            joined = None if ledger is None else beside.submit(ledger.findings, self._held(census), now_us)
            reading = census.findings(now_us)
            reading.findings.extend(tier_findings(self._tiers, now_us))
            if joined is not None:
                reading.findings.extend(joined.result())
        return reading

    def _held(self, census: Census) -> Held:
        """What the process has, copies in its tiers too; they are counted here, on the owning thread."""
        copies = (
            TierCopies(tier.name, tier.copies(), tier.destroy) for tier in self._tiers if isinstance(tier, CopyCustody)
        )
        return census.held()._replace(tiers=tuple(copies))

    # -- slices -------------------------------------------------------------------------------------------------------

    def scan_online(self, slices: list[Slices]) -> None:
        """Scan a slice of one pool in every `step` from now on; findings are recorded for a full scan to repair."""
        self._online, self._turn = slices, 0

    def step(self) -> None:
        """Scan one slice of the next pool."""
        if not self._online:
            return
        slices = self._online[self._turn]
        self._turn = (self._turn + 1) % len(self._online)
        slices.step()
        if slices.has_found:
            self._record_online(slices.take())

    def _record_online(self, findings: list[Finding]) -> None:
        now_us = self._clock.now_us()
        looked = [online.progress for online in self._online]
        compared = sum(one.holds + one.sequences for one in looked)
        blocks = sum(one.blocks for one in looked)
        self._note_drift(findings)
        self._record("online", Scanned(tuple(findings), compared, blocks, now_us, now_us))
        _log.warning("orphans found", findings=len(findings), first=findings[0].orphan)

    def _note_drift(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if finding.orphan in DRIFT and finding.outcome != "recovered":
                self._drifted.update((finding.pool, block) for block in finding.blocks)

    # -- record -------------------------------------------------------------------------------------------------------

    def _record(self, mode: str, scanned: Scanned) -> Scanned:
        self._number += 1
        number, now_us = self._number, scanned.ended_us
        count = len(scanned.findings)
        head = scanned.residencies, scanned.blocks, count
        events: list[Event] = [OrphanScanned(now_us, number, mode, scanned.started_us, scanned.ended_us, *head)]
        generations = self._census().generations
        events += [
            _orphan_found(number, at, finding, generations(finding.pool), now_us)
            for at, finding in enumerate(scanned.findings, 1)
        ]
        self._emit(events)
        return scanned._replace(number=number)


def _orphan_found(number: int, at: int, finding: Finding, generations: NDArray[np.int64], now_us: int) -> OrphanFound:
    blocks = np.array(finding.blocks, dtype=np.int64)
    return OrphanFound(
        now_us,
        number,
        at,
        finding.orphan,
        finding.cause,
        finding.tenant or None,
        finding.age_us,
        FlatRuns(blocks, generations[blocks], finding.pool),
        finding.action,
        finding.outcome,
        finding.residency,
    )


def tier_findings(tiers: Iterable[CopyStore], now_us: int) -> list[RepairableFinding]:
    """Return findings of objects without an index entry, entries without an object, and copies past their ceiling."""
    findings: list[RepairableFinding] = []
    for tier in tiers:
        try:
            findings += _differences(tier, now_us)
        except StoreError as error:
            _log.warning("tier not compared with its store", tier=tier.name, reason=error.message)
        if isinstance(tier, CopyCustody):
            findings += _past_ceiling(tier, tier.copies(), tier.known_us(now_us), now_us)
    return findings


def _differences(tier: CopyStore, now_us: int) -> list[RepairableFinding]:
    objects, index = tier.objects(), tier.index()
    pairs = (
        ("tier object without index", objects, index, tier.destroy, "destroyed"),
        ("index without tier object", index, objects, tier.forget, "forgotten"),
    )
    findings = []
    for orphan, one, other, repair, action in pairs:
        for key in one.keys() - other.keys():
            age_us = max(0, now_us - one[key].since_us)
            finding = Finding(orphan, one[key].tenant, f"in tier `{tier.name}`", (), age_us)
            findings.append(RepairableFinding(finding, _TierRepair(repair, key, action)))
    return findings


def _past_ceiling(tier: CopyStore, copies: Iterable[HeldCopy], known_us: int, now_us: int) -> list[RepairableFinding]:
    """`known_us`: what had ended by then is known here; later ends may be on their way."""
    findings = []
    for copy in copies:
        if copy.due_us + PAST_US < known_us:
            cause = f"in tier `{tier.name}`, {copy.blocks} blocks"
            finding = Finding(PAST_CEILING, copy.tenant, cause, (), now_us - copy.due_us)
            findings.append(RepairableFinding(finding, _TierRepair(tier.destroy, copy.name, "destroyed")))
    return findings


class _TierRepair:
    """Destroys or forgets one key."""

    def __init__(self, repair: Callable[[list[bytes]], int], key: bytes, action: str) -> None:
        self.repair = repair
        self.key = key
        self.action = action

    def __call__(self) -> tuple[str, str]:
        return self.action, "recovered" if self.repair([self.key]) else "gone before"
