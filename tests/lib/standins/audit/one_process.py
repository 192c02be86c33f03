"""A ledger of one process, and its reports; a process that ended everything in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kvcustody.audit.kinds import OrphanScanned, WorkerStopped
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.write.append_leaves import Appender
from standins.audit.falsified import leaf_bytes
from standins.audit.ledgers import report_ledger

KEY = SigningKey.from_seed(report_ledger.ORIGIN, KeyKind.ED25519, bytes(32))


class OneProcess:
    """A ledger of one process, and its reports."""

    def __init__(self, store: Engine, folder: Path) -> None:
        self.store, self.folder = store, folder

    def fill(self, events: list[Any], uuid: str = "d" * 32, *, first: int = 1) -> None:
        """Put events on record, from this sequence on, and sign."""
        with self.store.connect().execution_options(**WRITE) as connection, connection.begin():
            Appender().append(connection, read_leaves(leaf_bytes(events, uuid, first)))
        report_ledger.sign(self.store, KEY, self.folder)

    def report(self, framework: str = "nist-800-53", *, sample: int = 0, **more: Any) -> Report:
        with self.store.connect() as connection:
            size = newest_checkpoint(connection)
            asked = ReportParameters(framework, size, *period(connection, size, None, None), sample=sample)
            return build_report(connection, asked, **more)


def clean(world: Callable[..., Any], *, scanned: bool = True) -> list[Any]:
    """A process that ended everything in order: nothing qualifies it."""
    first = world(1).run(60)
    for residency in sorted(first.open):
        first.leave(residency)
    first.now += 9_000_000
    first.expire()
    while first.dirty:
        first.scrub()
    scan = [OrphanScanned(first.now, 1, "full", first.now - 5, first.now, 1, 48, 0)] if scanned else []
    stopped = WorkerStopped(first.now + 6, "worker-1", "closed", first.generation, tuple(first.scrubbed))
    return [*first.events, *scan, stopped]
