"""Evidence reports as jobs: asked for, watched, downloaded by whoever asked.

J1 A report is of what its principal may see: one tenant's own, or all. That it is made is on record before it is.
J2 It is made as of a signed checkpoint, so that it can be made again and compared by its digest.
"""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.responses import FileResponse, Response

from kvcustody.audit.ledger_proofs import LedgerProofs
from kvcustody.audit.report.build import build_report, newest_checkpoint, period
from kvcustody.audit.report.contents import Asked
from kvcustody.audit.report.framework import NAMES, load_framework
from kvcustody.console.report.document import FORMATS, render_all
from kvcustody.console.web.audit import moment_us
from kvcustody.console.web.overview import sees_all
from kvcustody.console.web.visit import Visit, redirect
from kvcustody.governance.api.audit import absent_is_absent
from kvcustody.governance.service.jobs import Progress
from kvcustody.governance.service.problems import ProblemError
from kvcustody.governance.service.roles import Action

_LISTED = 50
_PARTS = 12  # about as many as a report says that it is at
_TYPES = {"html": "text/html; charset=utf-8", "pdf": "application/pdf", "json": "application/json"}


def listed(visit: Visit) -> Response:
    """One's own reports and other jobs, newest first, and a form for another."""
    visit.caller.must(Action.READ_CUSTODY)
    jobs = visit.service.jobs.listed(principal=visit.caller.name, limit=_LISTED)
    return visit.page(
        "reports.html",
        "Reports",
        jobs=jobs,
        all_tenants=sees_all(visit),
        frameworks=[load_framework(name) for name in NAMES],
        formats=formats(),
    )


def make(visit: Visit) -> Response:
    """Begin a report (J1)."""
    tenant = visit.caller.tenant_of(Action.READ_CUSTODY, visit.text("tenant", 128))
    framework = visit.text("framework") or ""
    if framework not in NAMES:
        raise ProblemError("invalid", f"`framework` is none of {', '.join(NAMES)}")
    asked = _asked(visit, framework, tenant)
    visit.record("consoleReport", tenant)
    service, chosen = visit.service, formats()

    def work(progress: Progress) -> dict[str, Any]:
        done = 0

        def tell(part: str) -> None:
            nonlocal done
            done = min(done + 1, _PARTS)
            progress(done, _PARTS + 1)

        with service.reading(tenant) as connection:
            report = build_report(connection, asked, progress=tell)
        files = render_all(report, chosen)
        for name, data in files.items():
            (progress.folder / name).write_bytes(data)
        progress(_PARTS + 1, _PARTS + 1)
        sums = [
            {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in sorted(files.items())
        ]
        return {
            "files": sums,
            "checkpoint": asked.checkpoint,
            "digest": report.digest(),
            "again": report.rerun(),
        }

    parameters = {"framework": framework, "since_us": asked.since_us, "until_us": asked.until_us}
    job = service.jobs.start(
        "report", work, principal=visit.caller.name, tenant=tenant, parameters=parameters
    )
    return redirect(f"/reports/{job.job}")


def show(visit: Visit) -> Response:
    """One job: how far it is, and what it made."""
    visit.caller.must(Action.READ_CUSTODY)
    job = visit.service.jobs.get(visit.places["job"], principal=visit.caller.name)
    return visit.page("job.html", f"{job.kind.capitalize()} {job.job[:12]}", job=job)


def cancel(visit: Visit) -> Response:
    """Ask a job to stop."""
    visit.caller.must(Action.READ_CUSTODY)
    job = visit.service.jobs.cancel(visit.places["job"], principal=visit.caller.name)
    return redirect(f"/reports/{job.job}")


def download(visit: Visit) -> Response:
    """A file that one of one's own jobs made."""
    visit.caller.must(Action.READ_CUSTODY)
    name = visit.places["file"]
    path = visit.service.jobs.file(visit.places["job"], name, principal=visit.caller.name)
    kind = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
    return FileResponse(path, media_type=kind, filename=name)


def formats() -> tuple[str, ...]:
    """The formats that this installation can write: PDF needs an extra."""
    from importlib.util import find_spec

    return tuple(name for name in FORMATS if name != "pdf" or find_spec("reportlab") is not None)


def _asked(visit: Visit, framework: str, tenant: str | None) -> Asked:
    with visit.service.reading(tenant) as connection, absent_is_absent():
        checkpoint = visit.number("as_of")
        size = (
            newest_checkpoint(connection)
            if checkpoint is None
            else LedgerProofs(connection).checkpoint(checkpoint).size
        )
        since_us, until_us = period(connection, size, moment_us(visit, "since"), moment_us(visit, "until"))
    return Asked(framework, size, since_us, until_us, tenant=tenant)
