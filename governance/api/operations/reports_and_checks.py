"""Evidence reports and checks of the whole ledger, as jobs.

1. A report is of what its principal may see; a check reads every log, so it is for those who see all.
2. That any was asked for is on record before it begins, for those whose reads are events.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvcustody.audit.query.known_names import check_tenant
from kvcustody.audit.report.framework import NAMES, load_framework
from kvcustody.audit.tlog.signed_note import NoteError, parse_vkey
from kvcustody.audit.verify.fsck_ledger import FsckReport, fsck
from kvcustody.errors import ConfigError
from kvcustody.governance.api.http.console_mount import record_read
from kvcustody.governance.api.http.operation import Operation
from kvcustody.governance.api.http.route_builder import Api, CallerDep, ServiceDep
from kvcustody.governance.api.models.evidence import (
    CheckRequest,
    Frameworks,
    ReportRequest,
)
from kvcustody.governance.api.models.jobs import JobModel
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.jobs import JobProgress, shown
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.reports import report_parameters, start_report

READ = Permission.READ_CUSTODY
_PROBLEMS_MAX = 100
_LEAVES_BETWEEN = 50_000
_evidence = partial(Operation, action=READ, tag="evidence")


def add_evidence(api: Api) -> None:
    """Declare the operations."""
    reporting = _evidence("makeReport", "POST", "/v1/reports", keyed=True, exports=True)
    problems = ("not-found", "not-acceptable")
    api.add(reporting, make_report, answers=JobModel, status=202, problems=problems)
    listing = _evidence("listFrameworks", "GET", "/v1/reports/frameworks")
    api.add(listing, frameworks, answers=Frameworks)
    checking = _evidence("checkLedger", "POST", "/v1/checks", keyed=True, whole=True)
    api.add(checking, check, answers=JobModel, status=202)


def make_report(caller: CallerDep, service: ServiceDep, what: ReportRequest) -> dict[str, Any]:
    """Make an evidence report of a period: its files, its SHA-256 and the command that makes it again."""
    mine = service.tenant_of(caller, READ, what.tenant)
    if mine != caller.tenant:  # a name that was typed
        with service.reading() as connection:
            check_tenant(connection, mine)
    able = service.documents.formats()
    formats: Sequence[str] = what.formats or able
    if not set(formats) <= set(able):
        raise ProblemError("not-acceptable", "this service cannot write one of these formats")
    try:
        asked = report_parameters(
            service, what.framework, mine, since_us=what.since, until_us=what.until, as_of=what.as_of,
            seed=what.seed, sample=what.sample, extends=what.extends, recount=what.recount,
        )  # fmt: skip
    except ConfigError as error:
        raise ProblemError("invalid", error.message) from None
    record_read(service, caller, "makeReport", tenant=mine)
    return shown(
        start_report(service, caller.name, asked, formats, expects=what.expected_digest, party=caller.party)
    )


def frameworks() -> dict[str, Any]:
    """The frameworks that reports are arranged by, and the controls that there is evidence for."""
    found = [load_framework(name) for name in NAMES]
    return {
        "items": [
            {"id": item.id, "title": item.title, "edition": item.edition, "controls": len(item.controls)}
            for item in found
        ],
        "next": None,
    }


def check(caller: CallerDep, service: ServiceDep, what: CheckRequest) -> dict[str, Any]:
    """Compute trees, roots, checkpoints and derived rows again from the leaves; the result names the first bad one."""
    try:
        keys = [parse_vkey(text) for text in what.keys]
    except NoteError as error:
        raise ProblemError("invalid", error.message) from None
    kept = [note.encode() for note in what.notes]
    record_read(service, caller, "checkLedger")

    def work(progress: JobProgress) -> dict[str, Any]:
        told = 0

        def tell(log: str, done: int, total: int) -> None:
            nonlocal told
            if done >= told + _LEAVES_BETWEEN or done == total:
                told = done
                progress(done, total)

        with service.reading() as connection:
            return _found(fsck(connection, keys=keys, kept=kept, progress=tell))

    parameters = {"keys": len(keys), "notes": len(kept)}
    return shown(
        service.jobs.start(
            "check", work, principal=caller.name, tenant=None, parameters=parameters, party=caller.party
        )
    )


def _found(report: FsckReport) -> dict[str, Any]:
    names = (
        "logs",
        "leaves",
        "root_leaves",
        "checkpoints",
        "signed",
        "verified",
        "purged",
        "segmented",
        "unproved",
    )
    problems = [problem._asdict() for problem in report.problems[:_PROBLEMS_MAX]]
    first = None if report.first is None else report.first._asdict()
    facts = {name: getattr(report, name) for name in names}
    return facts | {"sound": report.ok, "first": first, "problems": problems}
