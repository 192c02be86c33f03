"""The control plane's own scan: it records contradictions within the ledger, for all workers.

1. It finds processes whose end was never reported, and gaps that no finding has named. A worker's memory is scanned by
   the worker itself, on schedule or on request (scan_orders), which records its scans in the same way.
2. It reports, and changes nothing. A worker that starts again closes what its dead processes held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine, func, select

from kvcustody.audit.evidence.query.orphans import dead_incarnations, gap_cause, new_gaps
from kvcustody.audit.kinds import Event, OrphanFound, OrphanScanned
from kvcustody.audit.kinds.block_runs import gather
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import orphan_findings, orphan_scans
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import Clock
from kvcustody.governance.service.fleet.scan_orders import ScanOrders
from kvcustody.governance.service.jobs import Job, JobProgress, JobRunner

_STEPS = 3


class LedgerScans:
    """Scans of one service, one at a time, with consecutive numbers."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        writer: EventWriter,
        jobs: JobRunner,
        reading: Callable[[], AbstractContextManager[Connection]],
    ) -> None:
        self._clock = clock
        self._writer = writer
        self._jobs = jobs
        self._reading = reading
        self._lock = threading.Lock()
        self.orders = ScanOrders(engine, clock)  # what workers are asked for (rule 1)

    def start(self, principal: str) -> Job:
        """Begin a scan as a job; its result names the scan."""
        return self._jobs.start("scan", self._work, principal=principal, tenant=None, parameters={})

    def _work(self, progress: JobProgress) -> dict[str, Any]:
        with self._lock:
            return self._scan(progress)

    def _scan(self, progress: JobProgress) -> dict[str, Any]:
        writer = self._writer
        started_us = self._clock.now_us()
        writer.flush()  # what is on its way is not missing
        with self._reading() as connection:
            progress(0, _STEPS)
            dead = [
                ("dead incarnation", f"process {one.incarnation} of `{one.worker}` ended without a word")
                for one in dead_incarnations(connection)
            ]
            known = set(connection.scalars(select(orphan_findings.c.cause).where(has_leaf(orphan_findings))))
            dead = [findings for findings in dead if findings[1] not in known]
            progress(1, _STEPS)
            gaps = [("ledger gap", gap_cause(gap)) for gap in new_gaps(connection)]
            progress(2, _STEPS)
            lives = connection.scalar(select(func.count()).select_from(incarnations)) or 0
            last = (
                select(func.max(orphan_scans.c.scan))
                .join(incarnations, incarnations.c.id == orphan_scans.c.incarnation)
                .where(incarnations.c.uuid == writer.incarnation, has_leaf(orphan_scans))
            )
            number = (connection.scalar(last) or 0) + 1
        findings = dead + gaps
        writer.submit(list(_events(self._clock.now_us(), number, started_us, findings)))
        writer.flush()
        progress(_STEPS, _STEPS)
        return {
            "incarnation": writer.incarnation,
            "scan": number,
            "processes": lives,
            "findings": len(findings),
        }


def _events(now_us: int, number: int, started_us: int, found: list[tuple[str, str]]) -> Iterator[Event]:
    nothing = np.zeros(0, dtype=np.int64)
    yield OrphanScanned(now_us, number, "ledger", started_us, now_us, 0, 0, len(found))
    for place, (orphan, cause) in enumerate(found, 1):
        yield OrphanFound(
            now_us,
            number,
            place,
            orphan,
            cause,
            None,
            0,
            gather(nothing, nothing),
            "named in the record",
            "on record",
        )
