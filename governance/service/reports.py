"""Evidence reports as jobs, made as of a signed checkpoint, for those who may see their content.

1. A report is of what its principal may see: one tenant's own, or all. That it is made is on record before it is.
2. It is made as of a signed checkpoint, so that it can be made again and compared by its digest.
3. It is signed by the key that the ledger names for reports, whose creation is recorded before the first report. Where
   another process signs the ledger, the report is not signed here, and states that.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sqlalchemy import Connection, Engine

from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.section import sections
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import ConfigError
from kvcustody.files import write_file
from kvcustody.governance.keys.report_signing_key import open_report_key, signed_report
from kvcustody.governance.service.ingest.traced_writer import TracedWriter
from kvcustody.governance.service.jobs import Job, JobProgress, JobRunner
from kvcustody.governance.service.problem_details import not_found
from kvcustody.governance.service.render_protocol import DocumentRenderer
from kvcustody.governance.service.schedules.made_reports import Verdict, add_report
from kvcustody.governance.service.schedules.signed_verdicts import DOCUMENT
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.logger import get_logger

_LOG = get_logger("kvcustody.service")

_ENROLLING = threading.Lock()  # two first reports at once make one key


class ReportingService(Protocol):
    """The parts of a service that make reports."""

    settings: ServiceSettings
    engine: Engine
    clock: DeadlineClock
    writer: TracedWriter
    documents: DocumentRenderer

    @property
    def signer(self) -> CheckpointSigner | None:
        """The signer of checkpoints; None where another process signs."""

    @property
    def jobs(self) -> JobRunner:
        """Long work."""

    def cover(self) -> None:
        """Seal and sign committed leaves."""

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection in one read transaction."""

    def reading_at_rest(self) -> AbstractContextManager[Connection]:
        """Return a connection in one read transaction that may last long."""


def report_parameters(
    service: ReportingService,
    framework: str,
    tenant: str | None,
    *,
    since_us: int | None = None,
    until_us: int | None = None,
    as_of: int | None = None,
    **more: Any,
) -> ReportParameters:
    """Return a request's parameters with checkpoint and period fixed (rule 2); raises `not-found` without a
    signed one.
    """
    if as_of is None:
        service.cover()
    with service.reading() as connection:
        try:
            size = newest_checkpoint(connection) if as_of is None else LedgerProofs(connection).checkpoint(as_of).size
            bounds = period(connection, size, since_us, until_us)
        except ProofError:
            raise not_found() from None
    return ReportParameters(framework, size, *bounds, tenant=tenant, **more)


def start_report(
    service: ReportingService,
    principal: str,
    asked: ReportParameters,
    formats: Sequence[str],
    *,
    expects: str | None = None,
    party: str = "",
    schedule: str | None = None,
) -> Job:
    """Start the job; `expects` is the expected SHA-256 of report.json: the result says whether it matches.

    `schedule` keeps its own list of what it made (`schedules.report_scheduler`); any other report is listed here.
    """

    def work(progress: JobProgress) -> dict[str, Any]:
        done, parts = 0, sum(bool(section.fields) for section in sections())

        def tell(part: str) -> None:
            nonlocal done
            done += 1
            progress(done, parts + 1)

        key = report_key(service)
        with service.reading_at_rest() as connection:
            report = build_report(connection, asked, progress=tell)
            if key is not None:
                report = signed_report(connection, report, key)
        files, not_made = _rendered(service, report, formats)
        for name, data in {
            DOCUMENT: report.to_bytes(),
            **files,
        }.items():  # the first: what verdicts are read from
            write_file(progress.folder / name, data)
        progress(parts + 1, parts + 1)
        verdict, digest = Verdict.of(report), report.digest()
        if schedule is None:
            job, now_us = progress.folder.name, service.clock.utc_us()
            add_report(service.engine, job, principal, asked, formats, verdict, now_us)
        return {
            "files": [_file(name, data) for name, data in sorted(files.items())],
            "not_made": not_made,
            "checkpoint": asked.checkpoint,
            **verdict._asdict(),
            "as_expected": None if expects is None else digest == expects,
            "again": report.rerun(),
        }

    parameters = {"framework": asked.framework, "since_us": asked.since_us, "until_us": asked.until_us}
    parameters |= {} if schedule is None else {"schedule": schedule}
    return service.jobs.start(
        "report", work, principal=principal, tenant=asked.tenant, parameters=parameters, party=party
    )


def _rendered(
    service: ReportingService, report: Report, formats: Sequence[str]
) -> tuple[dict[str, bytes], list[dict[str, str]]]:
    """The files of a report, and each format that could not be made, with the reason; raises where none could be."""
    files, not_made = dict[str, bytes](), list[dict[str, str]]()
    for name in formats:
        try:
            files |= service.documents.report(report, [name])
        except ConfigError as problem:
            _LOG.error("a report lacks a format", format=name, reason=problem.message)
            not_made.append({"format": name, "why": problem.message})
            if len(not_made) == len(formats):
                raise
    return files, not_made


def report_key(service: ReportingService) -> SigningKey | None:
    """Return the key of rule 3, once a signed checkpoint covers its leaf."""
    if service.signer is None:
        return None
    settings = service.settings
    with _ENROLLING:
        key = open_report_key(
            settings.report_key_file,
            settings.ledger_origin,
            service.engine,
            service.writer,
            service.clock,
            KeyKind.named(settings.signing_key_kind),
        )
    service.cover()
    return key


def _file(name: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
