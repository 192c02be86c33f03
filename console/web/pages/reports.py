"""Evidence reports: requested, followed and downloaded as jobs, made by schedules, listed with their verdicts.

What a schedule may do is decided where the API decides it (`reports_and_checks`).
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import FileResponse, Response

from kvcustody.audit.evidence.query.known_names import check_tenant
from kvcustody.audit.reports.framework import NAMES, load_framework
from kvcustody.console.web.form_errors import FieldError, refused
from kvcustody.console.web.page_request import PageRequest, redirect
from kvcustody.console.web.pages.audit import moment_us
from kvcustody.console.web.pages.overview import sees_all
from kvcustody.governance.api.models.evidence import ScheduleRequest
from kvcustody.governance.api.operations.reports_and_checks import (
    SCHEDULE_ACTS,
    change_schedule,
    make_schedule,
    retry,
    schedules_of,
)
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import not_found
from kvcustody.governance.service.reports import report_parameters, start_report
from kvcustody.governance.service.schedules.calendar_periods import Cadence
from kvcustody.governance.service.schedules.made_reports import MadeReport, made_reports
from kvcustody.governance.service.schedules.schedule_book import listed_destinations

_LISTED = 50
_SHOWN = (
    "sound",
    "again",
    "digest",
    "unproved",
    "opinion",
    "signed_by",
)  # of a result: what the page says in words of its own
_TYPES = {"html": "text/html; charset=utf-8", "pdf": "application/pdf", "json": "application/json"}


def listed(visit: PageRequest) -> Response:
    """Return made reports with verdicts, schedules, the caller's jobs (newest first), and forms for more."""
    visit.caller.must(Permission.READ_CUSTODY, Permission.READ_OPERATIONS)
    service, caller, makes = visit.service, visit.caller, visit.may(Permission.READ_CUSTODY)
    reports: list[MadeReport] = []
    schedules: list[dict[str, Any]] = []
    if makes:
        visit.record_live("consoleReports")
        with service.reading() as connection:
            mine = caller.tenant_of(Permission.READ_CUSTODY, None)
            reports, _ = made_reports(connection, tenant=mine, limit=_LISTED, verdicts=service.verdicts)
        now_us = service.clock.utc_us()
        schedules = [each.data(now_us) for each in schedules_of(service, caller)]
    settings = service.settings
    return visit.page(
        "operate/reports.html",
        "Reports",
        jobs=service.jobs.listed(principal=caller.name, limit=_LISTED)[0],
        makes=makes,
        made=reports,
        schedules=schedules,
        destinations=listed_destinations(settings.report_destinations, caller.tenant),
        cadences=[each.value for each in Cadence],
        zone=settings.tenant_time_zones.get(caller.tenant or "", settings.time_zone),
        all_tenants=sees_all(visit),
        frameworks=[load_framework(name) for name in NAMES],
        formats=service.documents.formats(),
    )


def schedule(visit: PageRequest) -> Response:
    """Make a schedule."""
    visit.caller.must(Permission.READ_CUSTODY)
    asked = {
        "framework": visit.text("framework"),
        "every": visit.text("every"),
        "tenant": visit.text("tenant"),
        "zone": visit.text("zone"),
        "hour": visit.number("hour"),
        "destinations": [name[3:] for name in visit.form if name.startswith("to-")],
    }
    try:
        what = ScheduleRequest.model_validate({name: value for name, value in asked.items() if value is not None})
    except ValidationError as error:
        raise refused(error) from None
    visit.ask(make_schedule, what)
    return redirect("/reports")


def change(visit: PageRequest) -> Response:
    """Pause, resume or delete a schedule."""
    visit.caller.must(Permission.READ_CUSTODY)
    act = visit.places["act"]
    if act not in SCHEDULE_ACTS:
        raise not_found()
    reason = visit.text("reason") or ""
    change_schedule(visit.caller, visit.service, visit.places["schedule"], act, reason)
    return redirect("/reports")


def again(visit: PageRequest) -> Response:
    """Retry what failed permanently."""
    visit.ask(retry, visit.places["job"])
    return redirect("/reports")


def make(visit: PageRequest) -> Response:
    """Start a report (rule 1 of `reports`)."""
    tenant = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, visit.text("tenant"))
    framework = visit.text("framework") or ""
    if framework not in NAMES:
        raise FieldError({"framework": f"choose one of: {', '.join(NAMES)}"})
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
    job = start_report(service, visit.caller.name, asked, service.documents.formats(), party=visit.caller.party)
    return redirect(f"/reports/{job.job}")


def show(visit: PageRequest) -> Response:
    """Return one job: its progress and its files."""
    visit.caller.must(Permission.READ_CUSTODY, Permission.READ_OPERATIONS)
    job = visit.service.verdicts.on(visit.service.jobs.get(visit.places["job"], principal=visit.caller.name))
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
    """Return a file that one of the caller's jobs made."""
    visit.caller.must(Permission.READ_CUSTODY)
    name = visit.places["file"]
    visit.service.export(visit.caller, once=True)
    path = visit.service.jobs.file(visit.places["job"], name, principal=visit.caller.name)
    kind = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
    return FileResponse(path, media_type=kind, filename=name)
