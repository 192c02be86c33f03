"""A ledger in which two policies follow each other, and a grant is used and taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.kinds import (
    DecisionRecorded,
    GrantsRevoked,
    PolicyActivated,
    PolicyText,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.reports.build_report import newest_checkpoint
from kvcustody.audit.reports.document import Document
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.documents.document_check import DocumentCheck
from kvcustody.clock import VirtualClock
from kvcustody.governance.keys.report_signing_key import open_report_key
from kvcustody.governance.processing.build_record import RecordRequest, build_record, signed_record
from kvcustody.governance.processing.record import ControllerStatement, ProcessingRecord
from kvcustody.policies.document.digest import digest
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.times import DAY_US, moment_us
from standins import builders
from standins.audit.documents import verify_record

ORIGIN = "ledger.example/ropa"
DAY_0 = moment_us("2026-01-01")
FIRST = builders.policy(name="first", more=builders.grant("2026-03-01"))
SECOND = builders.policy(name="second", retention="{idle: 5m, absolute: 1h, active_max: 1h}", more=builders.grant())
THIRD = builders.policy(name="third")


def day(number: int) -> int:
    """A day of the history (UTC)."""
    return DAY_0 + number * DAY_US


class RecordLedger(NamedTuple):
    """Policy `first` from day 0, `second` from day 40, whose grant is taken back on day 50, and the end on day 60."""

    store: Engine
    key: SigningKey
    report_key: SigningKey
    size: int
    folder: Path

    def record(self, since: int, until: int, **how: Any) -> ProcessingRecord:
        """The record of these days."""
        given = how.pop("given", None)
        stated = ControllerStatement("Example AG")
        asked = RecordRequest("controller", self.size, day(since), day(until), stated)
        with self.store.connect() as connection:
            return build_record(connection, asked._replace(**how), given=given)

    def document(self, since: int, until: int, **how: Any) -> Document:
        """The same, signed."""
        made = self.record(since, until, **how)
        with self.store.connect() as connection:
            return signed_record(connection, made, self.report_key)

    def exported(self) -> Path:
        """An export of all of it."""
        folder = self.folder / "export"
        if not folder.exists():
            write_export(folder, LedgerSource(self.store), made_at_us=1)
        return folder

    def check(self, data: bytes, *, is_compared: bool = True, **how: Any) -> DocumentCheck:
        """A check against the ledger, or with what is in the file alone."""
        with self.store.connect() as connection:
            against = connection if is_compared else None
            return verify_record(data, [str(self.key.verifier)], **({"source": against} | how))


def told(document: str, at_us: int) -> list[Any]:
    """What a worker records of a policy that it begins to enforce."""
    policy = load_policy(document, name="policy")
    activated = PolicyActivated(at_us, 1, policy.name, "shared", digest(policy), "governor")
    half = len(document) // 2
    texts = (document[:half], document[half:])
    return [
        activated,
        *(PolicyText(at_us, digest(policy), number, 2, text) for number, text in enumerate(texts, 1)),
    ]


def fill(store: Engine, folder: Path) -> RecordLedger:
    """Write the history, and sign it."""
    clock = VirtualClock(utc_us=DAY_0)
    writer = builders.writer(store, folder / "spill", worker="gpu-0", clock=clock)
    base = clock.now_us()
    writer.submit([WorkerStarted(base, "gpu-0", 8, 1, 64, "cpu", "test"), *told(FIRST, base + 1)])
    used = base + 10 * DAY_US
    writer.submit([DecisionRecorded(used, "reuse", "permit", "reader", "holder", "low", ("own",), 1, "grant")])
    writer.submit(told(SECOND, base + 40 * DAY_US))
    writer.submit([GrantsRevoked(base + 50 * DAY_US, ("reads",), 1, "dana")])
    file = folder / "report.key"
    report_key = open_report_key(file, ORIGIN, store, writer, clock)
    assert writer.flush(60)
    writer.submit([WorkerStopped(base + 60 * DAY_US, "gpu-0", "closed", 0, (0,))])
    assert writer.flush(60)
    clock.advance(60 * DAY_US)
    key = SigningKey.generate(ORIGIN)
    writer.close(60)
    CheckpointSigner(store, [key], memory=folder / "signed", clock=clock).sign_once()
    with store.connect() as connection:
        size = newest_checkpoint(connection)
    return RecordLedger(store, key, report_key, size, folder)
