"""Verdicts read from the signed reports themselves, because anybody could edit the list of reports.

1. A displayed verdict comes from `report.json` in the folder of its job. That file must have the digest that its row
   names; the rest of the row is not used.
2. The report's signature is verified, by the keys that the ledger names. Where this process signs reports, a report
   without a signature does not count.
3. Where the file is not here, another process made it, or it was removed. A scheduled report's verdict is then that of
   the leaf `scheduled-report-made`. Any other report has none.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.reports.document import read_document
from kvcustody.audit.reports.model import REPORT
from kvcustody.audit.reports.signing.document_signature import signature_problems
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.signed_note import VerifierKey
from kvcustody.audit.verify.documents.report_rules import open_report
from kvcustody.errors import LedgerError
from kvcustody.governance.service.jobs import Job
from kvcustody.governance.service.schedules.made_reports import Verdict

DOCUMENT = "report.json"
_BYTES_MAX = 256 << 20
_KEPT_MAX = 4096
_JOB = re.compile("[0-9a-f]{32}")
_KIND = "scheduled-report-made"


class ReportsHere(NamedTuple):
    """This process's job folder, the ledger's signing keys, and whether the ledger signs reports."""

    folder: Path
    keys: Callable[[], Sequence[VerifierKey]]
    signs: Callable[[], bool]


class SignedVerdicts:
    """The verdicts of listed reports; without `here` only those of leaves."""

    def __init__(self, here: ReportsHere | None = None) -> None:
        self._here = here
        self._kept: OrderedDict[tuple[str, int, int, int, int], Verdict] = OrderedDict()

    def __call__(self, connection: Connection, rows: Sequence[Any]) -> dict[str, Verdict]:
        """The verdicts of rows of `service_reports`, by report; of a report without one there is none."""
        found = {row.report: self.of_job(row.job) for row in rows}
        elsewhere = {row.report for row in rows if found[row.report] is None and row.schedule is not None}
        shown = {
            row.report: verdict
            for row in rows
            if (verdict := found[row.report]) is not None and verdict.digest == row.digest
        }
        return shown | _of_leaves(connection, elsewhere)

    def of_job(self, job: str | None) -> Verdict | None:
        """Return the verdict of the report that a job made; None where it is elsewhere, or not signed by us."""
        if self._here is None or job is None or _JOB.fullmatch(job) is None:
            return None
        path = self._here.folder / job / DOCUMENT
        try:
            status = path.stat()
            if status.st_size > _BYTES_MAX:
                return None
            key = (job, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if key not in self._kept:
                document = read_document(path.read_bytes(), [REPORT])
                report = open_report(document)
                if document.signature is not None:
                    if signature_problems(document, self._here.keys()):
                        return None
                elif self._here.signs():
                    return None
                self._kept[key] = Verdict.of(report)
                while len(self._kept) > _KEPT_MAX:
                    self._kept.popitem(last=False)
            return self._kept[key]
        except (OSError, LedgerError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def on(self, job: Job) -> Job:
        """Return a job as it is shown; a report's job has the report's verdict."""
        if job.kind != "report" or job.result is None:
            return job
        verdict = self.of_job(job.job) or Verdict("", "", [], None)
        return job._replace(result={**job.result, **verdict._asdict()})


def _of_leaves(connection: Connection, reports: set[str]) -> dict[str, Verdict]:
    """The verdicts of scheduled reports by their leaves, the newest of each, in one pass that ends with the last."""
    verdicts: dict[str, Verdict] = {}
    if not reports:
        return verdicts
    query = select(events.c.leaf).where(events.c.kind == _KIND, has_leaf(events)).order_by(events.c.at_us.desc())
    with connection.execution_options(yield_per=200).scalars(query) as leaves:
        for leaf in leaves:
            body = orjson.loads(leaf)
            if body["report"] in reports and body["report"] not in verdicts:
                verdicts[body["report"]] = Verdict(body["digest"], body["opinion"], [], body["signed_by"] or None)
                if len(verdicts) == len(reports):
                    break
    return verdicts
