"""Evidence reports as jobs: asked for, watched, downloaded by whoever asked (`governance.service.reports`)."""

from __future__ import annotations

from starlette.responses import FileResponse, Response

from kvcustody.audit.query.known_names import check_tenant
from kvcustody.audit.report.framework import NAMES, load_framework
from kvcustody.console.web.page_request import PageRequest, redirect
from kvcustody.console.web.pages.audit import moment_us
from kvcustody.console.web.pages.overview import sees_all
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.reports import report_parameters, start_report

_LISTED = 50
_SHOWN = ("sound", "again", "digest", "unproved")  # of a result: what the page says in words of its own
_TYPES = {"html": "text/html; charset=utf-8", "pdf": "application/pdf", "json": "application/json"}


def listed(visit: PageRequest) -> Response:
    """One's own reports and other jobs, newest first, and a form for another."""
    visit.caller.must(Permission.READ_CUSTODY, Permission.READ_OPERATIONS)
    jobs = visit.service.jobs.listed(principal=visit.caller.name, limit=_LISTED)
    return visit.page(
        "operate/reports.html",
        "Reports",
        jobs=jobs,
        makes=visit.may(Permission.READ_CUSTODY),
        all_tenants=sees_all(visit),
        frameworks=[load_framework(name) for name in NAMES],
        formats=visit.service.documents.formats(),
    )


def make(visit: PageRequest) -> Response:
    """Begin a report (rule 1 of `reports`)."""
    tenant = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, visit.text("tenant"))
    framework = visit.text("framework") or ""
    if framework not in NAMES:
        raise ProblemError("invalid", f"`framework` is none of {', '.join(NAMES)}")
    service = visit.service
    if tenant != visit.caller.tenant:  # a name that was typed
        with service.reading() as connection:
            check_tenant(connection, tenant)
    asked = report_parameters(
        service,
        framework,
        tenant,
        since_us=moment_us(visit, "since"),
        until_us=moment_us(visit, "until"),
        as_of=visit.number("as_of"),
    )
    visit.record("consoleReport", tenant=tenant)
    service.export(visit.caller)
    job = start_report(
        service, visit.caller.name, asked, service.documents.formats(), party=visit.caller.party
    )
    return redirect(f"/reports/{job.job}")


def show(visit: PageRequest) -> Response:
    """One job: how far it is, and what it made."""
    visit.caller.must(Permission.READ_CUSTODY, Permission.READ_OPERATIONS)
    job = visit.service.jobs.get(visit.places["job"], principal=visit.caller.name)
    plain = (str, int, float)
    facts = [
        (name.replace("_", " "), value)
        for name, value in (job.result or {}).items()
        if name not in _SHOWN and isinstance(value, plain)
    ]
    return visit.page("operate/job.html", f"{job.kind.capitalize()} {job.job[:12]}", job=job, facts=facts)


def cancel(visit: PageRequest) -> Response:
    """Ask a job to stop."""
    visit.caller.must(Permission.READ_CUSTODY, Permission.READ_OPERATIONS)
    job = visit.service.jobs.cancel(visit.places["job"], principal=visit.caller.name)
    return redirect(f"/reports/{job.job}")


def download(visit: PageRequest) -> Response:
    """A file that one of one's own jobs made."""
    visit.caller.must(Permission.READ_CUSTODY)
    name = visit.places["file"]
    visit.service.export(visit.caller, once=True)
    path = visit.service.jobs.file(visit.places["job"], name, principal=visit.caller.name)
    kind = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
    return FileResponse(path, media_type=kind, filename=name)
