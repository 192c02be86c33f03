"""Evidence reports and full checks of the ledger, as jobs.

1. A report is of what its principal may see; a check reads every log, so it is for those who see all.
2. That any was asked for is on record before it begins, for those whose reads are events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from kvcustody.audit.evidence.query.known_names import check_tenant
from kvcustody.audit.reports.framework import NAMES, Control, load_framework
from kvcustody.audit.tlog.signed_note import NoteError, parse_vkey
from kvcustody.audit.verify.ledger.fsck_ledger import FsckReport, fsck
from kvcustody.errors import ConfigError
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep, ServiceDep
from kvcustody.governance.api.http.console_mount import record_read
from kvcustody.governance.api.models.evidence import (
    CheckRequest,
    DestinationList,
    Frameworks,
    MadeReportModel,
    MadeReportPage,
    ReportRequest,
    ScheduleList,
    ScheduleModel,
    ScheduleReason,
    ScheduleRequest,
)
from kvcustody.governance.api.models.jobs import JobModel
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach, Role
from kvcustody.governance.service.jobs import JobProgress, shown
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.parameters import Cursor, Limit, Path, Tenant
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.governance.service.reports import report_parameters, start_report
from kvcustody.governance.service.schedules.made_reports import MadeReport, made_reports
from kvcustody.governance.service.schedules.open_destinations import may_hand_over
from kvcustody.governance.service.schedules.schedule_book import (
    Maker,
    Schedule,
    WantedSchedule,
    listed_destinations,
    read_schedules,
)
from kvcustody.time_zones import check_zone

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

READ = Permission.READ_CUSTODY
ScheduleId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$", examples=["ab12" * 4])]
ReportId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["cd" * 16])]
_PROBLEMS_MAX = 100
_LEAVES_BETWEEN = 50_000
_evidence = partial(Operation, action=READ, tag="evidence")


def add_evidence(api: Declarations) -> None:
    """Declare the operations."""
    reporting = _evidence("makeReport", "POST", "/v1/reports", keyed=True, exports=True, command="job report")
    problems = ("not-found", "not-acceptable")
    api.add(reporting, make_report, answers=JobModel, status=202, problems=problems)
    listing = _evidence("listFrameworks", "GET", "/v1/reports/frameworks", command="report frameworks")
    api.add(listing, frameworks, answers=Frameworks)
    api.add(
        _evidence("listReports", "GET", "/v1/reports", recorded=True, command="report list"),
        list_reports,
        answers=MadeReportPage,
        problems=("cursor-invalid", "not-found"),
    )
    api.add(
        _evidence("listReportDestinations", "GET", "/v1/reports/destinations", command="report destinations"),
        destinations,
        answers=DestinationList,
    )
    api.add(
        _evidence("listReportSchedules", "GET", "/v1/reports/schedules", command="report schedules list"),
        schedules,
        answers=ScheduleList,
    )
    scheduling = _evidence(
        "makeReportSchedule",
        "POST",
        "/v1/reports/schedules",
        keyed=True,
        exports=True,
        command="report schedules add",
    )
    problems = ("not-found", "not-acceptable")
    api.add(scheduling, make_schedule, answers=ScheduleModel, status=201, problems=problems)
    for act, says in SCHEDULE_ACTS.items():
        changing = _evidence(
            f"{act}ReportSchedule",
            "POST",
            f"/v1/reports/schedules/{{schedule}}/{act}",
            keyed=True,
            command=f"report schedules {act}",
        )
        api.add(changing, _changing(act, says), answers=ScheduleModel, problems=("not-found",))
    retrying = _evidence(
        "retryReport", "POST", "/v1/reports/{report}/retry", keyed=True, exports=True, command="report retry"
    )
    api.add(retrying, retry, answers=MadeReportModel, problems=("not-found",))
    checking = _evidence("checkLedger", "POST", "/v1/checks", keyed=True, whole=True, command="job check")
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
        check_zone(what.zone)
        asked = report_parameters(
            service, what.framework, mine, since_us=what.since, until_us=what.until, as_of=what.as_of,
            seed=what.seed, sample=what.sample, extends=what.extends, recount=what.recount,
            threshold_ppm=round(what.threshold * 10_000), preparer=what.prepared_by,
            organisation=what.organisation, zone=what.zone,
        )  # fmt: skip
    except ConfigError as error:
        raise ProblemError("invalid", error.message) from None
    record_read(service, caller, "makeReport", tenant=mine)
    return shown(start_report(service, caller.name, asked, formats, expects=what.expected_digest, party=caller.party))


SCHEDULE_ACTS = {
    "pause": "Pause a schedule. Reports that fall due while it is paused are not made.",
    "resume": "Resume a schedule from the next period on.",
    "delete": "Delete a schedule. Its finished reports stay listed, and its pending deliveries are cancelled.",
}


def destinations(caller: CallerDep, service: ServiceDep) -> dict[str, Any]:
    """List the destinations that your schedules may deliver reports to, by their names in the settings."""
    named = service.settings.report_destinations
    return {"items": listed_destinations(named, caller.tenant), "next": None}


def schedules_of(service: Service, caller: Caller) -> list[Schedule]:
    """Return the schedules whose reports this person may see."""
    return service.schedules.listed(tenant=caller.tenant_of(READ, None))


def make_schedule(caller: CallerDep, service: ServiceDep, what: ScheduleRequest) -> dict[str, Any]:
    """Schedule a report of every week, month or quarter from now on, with its deliveries."""
    return _new_schedule(caller, service, what).data(service.clock.utc_us())


def _new_schedule(caller: Caller, service: Service, what: ScheduleRequest) -> Schedule:
    """Make a schedule for this person: of what they may see, to where they may send it."""
    mine = service.tenant_of(caller, READ, what.tenant)
    _check_hands_over(caller, what.destinations)
    if mine != caller.tenant:  # a name that was typed
        with service.reading() as connection:
            check_tenant(connection, mine)
    able = service.documents.formats()
    formats: Sequence[str] = what.formats or able
    if not set(formats) <= set(able):
        raise ProblemError("not-acceptable", "this service cannot write one of these formats")
    maker = Maker(caller.name, tuple(sorted(caller.roles)), caller.tenant)
    wanted = WantedSchedule(
        what.framework, mine, tuple(dict.fromkeys(formats)), tuple(dict.fromkeys(what.destinations)), what.every,
        what.zone, what.hour,
    )  # fmt: skip
    return service.schedules.make(maker, wanted)


def _check_hands_over(caller: Caller, destinations: Sequence[object]) -> None:
    """Raise `forbidden` where this person may read reports, and have none handed over."""
    if destinations and not may_hand_over(caller):
        raise ProblemError(
            "forbidden", "only a tenant's administrator may schedule deliveries; viewers may read the reports"
        )


def change_schedule(caller: Caller, service: Service, schedule: str, act: str, reason: str) -> Schedule:
    """Pause, resume or delete a schedule: allowed to its maker, to those who see all, and to its tenant's
    administrators.
    """
    current = service.schedules.get(schedule)
    whole = caller.reach(READ) is Reach.ALL
    if not whole and (caller.tenant is None or current.tenant != caller.tenant):
        raise not_found()
    if not whole and current.principal != caller.name and Role.TENANT_ADMIN not in caller.roles:
        raise ProblemError("forbidden", "another person created it")
    if act == "resume":
        _check_hands_over(caller, current.destinations)
    return service.schedules.change(schedule, act, by=caller.name, reason=reason)


def retry(caller: CallerDep, service: ServiceDep, report: ReportId) -> dict[str, Any]:
    """Retry a scheduled report or a delivery that failed permanently."""
    return _retried_report(caller, service, report).data()


def _retried_report(caller: Caller, service: Service, report: str) -> MadeReport:
    """The report, about to be tried again; raises `not-found` for one that this person may not see."""
    mine = caller.tenant_of(READ, None)
    with service.reading() as connection:
        found, _ = made_reports(connection, tenant=mine, only=report, verdicts=service.verdicts)
    if not found:
        raise not_found()
    _check_hands_over(caller, found[0].deliveries)
    service.schedules.retry(report, by=caller.name)
    with service.reading() as connection:
        return made_reports(connection, only=report, verdicts=service.verdicts)[0][0]


def _changing(act: str, says: str) -> Callable[..., dict[str, Any]]:
    def change(caller: CallerDep, service: ServiceDep, schedule: ScheduleId, what: ScheduleReason) -> dict[str, Any]:
        done = change_schedule(caller, service, schedule, act, what.reason)
        return done.data(service.clock.utc_us())

    change.__doc__ = says
    return change


def frameworks(desk: DeskDep) -> dict[str, Any]:
    """List the frameworks that reports follow, and the controls that the ledger has evidence for."""
    loaded = [load_framework(name) for name in NAMES]
    return {
        "items": [
            {
                "id": item.id,
                "title": item.title,
                "edition": item.edition,
                "ids_from": item.ids_from,
                "ids_taken": item.ids_taken,
                "controls": [_control(control) for control in item.controls],
            }
            for item in loaded
        ],
        "next": None,
    }


def _control(control: Control) -> dict[str, Any]:
    """A control: what it is about, what the evidence supports, and what it does not show."""
    return {
        **{name: getattr(control, name) for name in ("id", "title", "scope", "supports", "limit", "clock")},
        "evidence": list(control.evidence),
        "shows": [each.name for each in control.shows],
    }


def check(caller: CallerDep, service: ServiceDep, what: CheckRequest) -> dict[str, Any]:
    """Recompute trees, roots, checkpoints and derived rows from the leaves; the result names the first error."""
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

        with service.reading_at_rest() as connection:
            return _found(fsck(connection, keys=keys, kept=kept, progress=tell))

    parameters = {"keys": len(keys), "notes": len(kept)}
    return shown(
        service.jobs.start("check", work, principal=caller.name, tenant=None, parameters=parameters, party=caller.party)
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


def list_reports(
    desk: DeskDep, caller: CallerDep, *, cursor: Cursor = None, limit: Limit = 50, tenant: Tenant = None
) -> dict[str, Any]:
    """List reports that exist or are due by a schedule, newest first: opinion, digest, signature, deliveries."""
    mine = desk.tenant_of(caller, READ, tenant)
    question = CursorBinding("listReports", caller.name, {"tenant": tenant})
    position = desk.cursors.read(question, cursor)
    before = None if position is None else (int(position[0]), str(position[1]))
    with desk.reading() as connection:
        found, more = made_reports(connection, tenant=mine, before=before, limit=limit, verdicts=desk.verdicts)
    following = desk.cursors.write(question, [found[-1].created_us, found[-1].report]) if more else None
    return {"items": [item.data() for item in found], "next": following}


def schedules(desk: DeskDep, caller: CallerDep) -> dict[str, Any]:
    """List the report schedules that you may see: your tenant's, or all."""
    with desk.reading() as connection:
        found = read_schedules(connection, tenant=caller.tenant_of(READ, None))
    now_us = desk.clock.utc_us()
    return {"items": [each.data(now_us) for each in found], "next": None}
