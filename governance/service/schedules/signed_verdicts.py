"""Verdicts of reports, read from the reports themselves: the list of what was made has copies, and anybody may edit it.

1. A verdict that is shown is that of `report.json` in the folder of its job, which must be of the digest that its row
   names; what else the row says of it is not looked at.
2. Where the file is not here (another process made it, or it was removed), a scheduled report's verdict is that of the
   leaf `scheduled-report-made`, and any other has none.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.schema.all_tables import has_leaf
from kvcustody.audit.schema.ledger import events
from kvcustody.audit.verify.report.verify_report import open_report
from kvcustody.errors import LedgerError
from kvcustody.governance.service.jobs import Job
from kvcustody.governance.service.schedules.made_reports import Verdict

DOCUMENT = "report.json"
_BYTES_MAX = 256 << 20
_KEPT_MAX = 256
_JOB = re.compile("[0-9a-f]{32}")
_KIND = "scheduled-report-made"


class SignedVerdicts:
    """The verdicts behind rows; `folder` is that of the jobs of this process, None where there is none."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._kept: OrderedDict[tuple[str, int, int], Verdict] = OrderedDict()

    def __call__(self, connection: Connection, row: Any) -> Verdict | None:
        """The verdict of a row of `service_reports` (rules 1 and 2)."""
        found = self.of_job(row.job)
        if found is None:
            return self._of_leaf(connection, row.report) if row.schedule is not None else None
        return found if found.digest == row.digest else None

    def of_job(self, job: str | None) -> Verdict | None:
        """The verdict of the report that a job made; None where it is not here, or is no report."""
        if self._folder is None or job is None or _JOB.fullmatch(job) is None:
            return None
        path = self._folder / job / DOCUMENT
        try:
            status = path.stat()
            if status.st_size > _BYTES_MAX:
                return None
            key = (job, status.st_mtime_ns, status.st_size)
            if key not in self._kept:
                self._kept[key] = Verdict.of(open_report(path.read_bytes()))
                while len(self._kept) > _KEPT_MAX:
                    self._kept.popitem(last=False)
            return self._kept[key]
        except (OSError, LedgerError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def on(self, job: Job) -> Job:
        """A job as it is shown: of one that made a report, the verdict is the report's too."""
        if job.kind != "report" or job.result is None:
            return job
        verdict = self.of_job(job.job) or Verdict("", "", [], None)
        return job._replace(result={**job.result, **verdict._asdict()})

    def _of_leaf(self, connection: Connection, report: str) -> Verdict | None:
        query = (
            select(events.c.leaf)
            .where(events.c.kind == _KIND, has_leaf(events))
            .order_by(events.c.at_us.desc())
        )
        for leaf in connection.execution_options(yield_per=200).scalars(query):
            found = orjson.loads(leaf)
            if found["report"] == report:
                return Verdict(found["digest"], found["opinion"], [], found["signed_by"] or None)
        return None
