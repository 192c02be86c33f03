"""The ledger's side of a full scan: its records against what the process holds, and the records of repairs.

- The writer is flushed first, so that nothing on its way counts as missing.
- What is missing is recorded as found by a scan; nothing that is recorded is ever changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlalchemy import Connection

from kvcustody.audit.evidence.copies.copy_rows import HeldCopies, differing_copies, was_stored
from kvcustody.audit.evidence.query.orphans import (
    Disagreements,
    LostUnits,
    disagreements,
    gap_cause,
    incarnation_row,
    latest_incarnation,
)
from kvcustody.audit.kinds import END_UNRECORDED, CustodyEnded, Event, ResidencyReleased
from kvcustody.audit.kinds.block_runs import FlatRuns
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.errors import LedgerUnavailable
from kvcustody.governance.erasure.tier_protocol import HeldCopy
from kvcustody.governance.orphans.finding import Finding, RepairableFinding
from kvcustody.governance.orphans.scan_protocol import Held, LedgerJoin, TierCopies
from kvcustody.governance.orphans.scans import Scanned
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from kvcustody.logger import get_logger

ENDED_BY_SCAN = END_UNRECORDED
_WITHIN_US = 1_000_000
_log = get_logger(__name__)


class WriterJoin:
    """A writer's own ledger, joined with the recorded process."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer

    def findings(self, held: Held, now_us: int) -> list[RepairableFinding]:
        """Return the disagreements of the ledger and this process; raises `LedgerUnavailable` where it is not up to
        date.
        """
        if not self._writer.flush():
            raise LedgerUnavailable("the ledger is behind: a scan would report records that are still on their way")
        with self._writer.engine.connect() as connection:
            differences = disagreements(
                connection, self._writer.incarnation, held.residencies, held.live, held.unlisted
            )
            copies = [finding for tier in held.tiers for finding in self._copies(connection, tier, now_us)]
        return [
            *copies,
            *self._residencies(differences, now_us),
            *self._units(differences, now_us),
            *self._processes(differences, now_us),
        ]

    def _finding(
        self, finding: Finding, action: str, events: Callable[[], list[Event]], outcome: str = "recovered"
    ) -> RepairableFinding:
        def record() -> tuple[str, str]:
            self._writer.submit(events())
            return action, outcome

        return RepairableFinding(finding, record)

    def _residencies(self, differences: Disagreements, now_us: int) -> list[RepairableFinding]:
        findings = []
        for one in differences.unreleased:
            finding = Finding(
                "residency without block",
                one.tenant,
                "open in the ledger, not in the process",
                (),
                max(0, now_us - one.opened_boot_us),
                one.residency,
            )
            event = ResidencyReleased(now_us, one.residency, one.tenant, "orphan", (), 0)
            findings.append(self._finding(finding, "release recorded", lambda event=event: [event]))  # type: ignore[misc]
        for residency in differences.unopened:
            finding = Finding("ledger gap", "", "a running residency is in no leaf", (), 0, residency)
            findings.append(self._finding(finding, "named in the record", list, "on record"))
        return findings

    def _units(self, found: Disagreements, now_us: int) -> list[RepairableFinding]:
        findings = []
        for orphan, cause, units in (
            ("ledger gap", "custody has ended without a leaf", found.unended),
            ("receipt without release", "overwritten without an end on record", found.unreleased_receipts),
        ):
            for lost in units:
                finding = Finding(orphan, lost.tenant, cause, tuple(lost.blocks.tolist()), pool=lost.pool)
                findings.append(self._finding(finding, "end recorded", _End(lost, now_us)))
        return findings

    def _copies(self, connection: Connection, tier: TierCopies, now_us: int) -> Iterator[RepairableFinding]:
        """Copies of one tier that leaves have open and it has not, and the other way round."""
        life = incarnation_row(connection, self._writer.incarnation)
        by_key = {(copy.number, copy.name.hex()): copy for copy in tier.copies}
        differences = differing_copies(connection, life, HeldCopies(tier.tier, frozenset(by_key)))
        for lost in differences.lost:
            count = len(lost.numbers)
            cause = f"in tier `{tier.tier}`: {count} copies that the ledger has and the tier has not"
            event = lost.end(now_us, END_UNRECORDED, now_us, _WITHIN_US)
            finding = Finding("custody without copy", lost.tenant, cause, ())
            yield self._finding(finding, "end recorded", lambda event=event: [event])  # type: ignore[misc]
        for key in differences.unrecorded:
            copy = by_key[key]
            known = was_stored(connection, life, tier.tier, copy.number)
            said = "its end is on record" if known else "no leaf says that it was stored"
            cause = f"in tier `{tier.tier}`, {copy.blocks} blocks: {said}"
            finding = Finding("copy without custody", copy.tenant, cause, (), max(0, now_us - copy.since_us))
            yield RepairableFinding(finding, _EndCopy(self._writer, tier, copy, known, now_us))

    def _processes(self, differences: Disagreements, now_us: int) -> list[RepairableFinding]:
        findings = []
        utc_us = now_us + self._writer.offset_us
        for dead in differences.dead:
            age_us = max(0, utc_us - dead.started_us)
            cause = f"process {dead.incarnation} of `{dead.worker}` ended without a word"
            finding = Finding("dead incarnation", "", cause, (), age_us)
            close = _Close(self._writer, dead.worker)
            findings.append(self._finding(finding, "custody closed as unproven", close))
        for gap in differences.gaps:
            finding = Finding("ledger gap", "", gap_cause(gap), ())
            findings.append(self._finding(finding, "named in the record", list, "on record"))
        return findings


def recover(scan: Callable[[LedgerJoin | None], Scanned], writer: object) -> Scanned:
    """Scan and repair, joined with the writer's ledger where it belongs to this process and is up to date.

    Behind a control plane nobody here can read the ledger; one that is behind is joined by the next scan.
    """
    if isinstance(writer, EventWriter):
        try:
            return scan(WriterJoin(writer))
        except LedgerUnavailable as problem:
            _log.warning("scanned without the ledger", reason=problem.message)
    return scan(None)


class _EndCopy:
    """The end of a copy that the ledger does not know; that it was there goes on record first."""

    def __init__(self, writer: EventWriter, tier: TierCopies, copy: HeldCopy, known: bool, now_us: int) -> None:
        self.writer = writer
        self.tier = tier
        self.copy = copy
        self.known = known
        self.now_us = now_us

    def __call__(self) -> tuple[str, str]:
        copy = self.copy
        if not self.known:
            begun = CopyEvent("stored", *copy[:6], copy.since_us, copy.due_us)
            self.writer.submit(copy_leaves(self.tier.tier, [begun]))
        return "destroyed", "recovered" if self.tier.destroy([copy.name]) else "gone before"


class _End:
    """The end of custody that no leaf has."""

    def __init__(self, lost: LostUnits, now_us: int) -> None:
        self.lost = lost
        self.now_us = now_us

    def __call__(self) -> list[Event]:
        lost, now_us = self.lost, self.now_us
        order = lost.generations.argsort()
        runs = FlatRuns(lost.blocks[order], lost.generations[order], lost.pool)
        times = (now_us, now_us, now_us)
        return [CustodyEnded(now_us, lost.tenant, lost.classification, runs, ENDED_BY_SCAN, *times, _WITHIN_US)]


class _Close:
    """The closing of a worker's dead processes, once."""

    def __init__(self, writer: EventWriter, worker: str) -> None:
        self.writer = writer
        self.worker = worker

    def __call__(self) -> list[Event]:
        self.writer.flush()
        with self.writer.engine.connect() as connection:
            latest = latest_incarnation(connection, self.worker)
        self.writer.close_predecessors(self.worker, latest)
        return []
