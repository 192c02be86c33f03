"""`kvcustody report schedules`, `report list` and `report retry`: what is made by a calendar, and what was made.

On the ledger itself, as whoever may write it (on record as `local:<user>`), or asked of a control plane.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.text import Text

from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.reports.framework import NAMES
from kvcustody.audit.write.record_operator_act import recorder
from kvcustody.clock import SystemClock
from kvcustody.console.api.asking import asked, listed
from kvcustody.console.command import CustodyGroup, Json, make_table, print_answer, printable, say, stdout
from kvcustody.console.opening import control_plane, service_settings, writing
from kvcustody.console.options import OldestFirst, ServiceSource, Source
from kvcustody.console.report.document import FORMATS
from kvcustody.errors import ConfigError
from kvcustody.governance.api.models.evidence import (
    MadeReportModel,
    MadeReportPage,
    ScheduleList,
    ScheduleModel,
)
from kvcustody.governance.service.access.local_administration import local_name
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.answers.reports import LIST_REPORTS, LIST_SCHEDULES
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.schedules.calendar_periods import Cadence
from kvcustody.governance.service.schedules.made_reports import made_reports
from kvcustody.governance.service.schedules.schedule_book import Maker, ScheduleBook, WantedSchedule
from kvcustody.governance.service.schedules.signed_verdicts import SignedVerdicts
from kvcustody.plurals import several
from kvcustody.times import TO_THE_MINUTE, readable

_MARKS = {"adverse": "bold red", "qualified": "yellow", "failed": "bold red", "given-up": "bold red"}
_Id = Annotated[str, typer.Argument(help="The schedule's id.", metavar="SCHEDULE")]
_Reason = Annotated[str, typer.Option(help="Why: on record.")]
LIST_EPILOG = (
    "Examples:\n\n    kvcustody report list\n\n    kvcustody report list --tenant acme --json\n\n"
    "    kvcustody report list --server https://kvcustody.example:8443 --api-key-file me.key"
)
RETRY_EPILOG = "Example:\n\n    kvcustody report retry 5446d35c1765446d35c1765446d35c17"

app = typer.Typer(
    cls=CustodyGroup,
    no_args_is_help=True,
    help="Reports that are made by a calendar and handed over: make, pause, resume and delete schedules.",
    epilog="docs/audit/reports.md says when a report is due and what becomes of what is not taken.",
)


@app.command("list", epilog="Example: `kvcustody report schedules list --json`")
@grouped
def list_schedules(
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """List the schedules of reports, and when each is due next."""
    items = asked(LIST_SCHEDULES, source)["items"]
    if as_json:
        print_answer(ScheduleList, {"items": items})
        return
    if not items:
        say("there is no schedule; `kvcustody report schedules add` makes one")
        return
    columns = ("schedule", "framework", "of", "every", "to", "state", "next (UTC)", "made by")
    table = make_table("schedules", *columns, left=len(columns))
    for item in items:
        due = readable(item["next_us"], TO_THE_MINUTE)
        whose, to = item["tenant"] or "all tenants", ", ".join(item["destinations"]) or "nobody"
        every = f"{item['every']}, {item['zone']}"
        table.add_row(
            item["schedule"], item["framework"], whose, every, to, item["state"], due, item["principal"]
        )
    stdout().print(table)
    for item in items:
        if item["unread"]:
            say(f"schedule {item['schedule']} makes no report: {item['unread']}")


@app.command(
    epilog="Examples:\n\n    kvcustody report schedules add --framework soc2 --every monthly --to auditors\n\n"
    "    kvcustody report schedules add --framework gdpr --every quarterly --tenant acme --zone Europe/Berlin"
)
@grouped
def add(
    *,
    framework: Annotated[str, typer.Option(help=f"One of: {', '.join(NAMES)}.")],
    every: Annotated[Cadence, typer.Option(help="How often: after each week, month or quarter.")],
    tenant: Annotated[str | None, typer.Option(help="One tenant's own report; default: all tenants.")] = None,
    format: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(FORMATS)}.")] = ",".join(FORMATS),
    to: Annotated[
        list[str] | None,
        typer.Option("--to", help="A destination of the settings, by its name; may be given again."),
    ] = None,
    zone: Annotated[
        str | None, typer.Option(help="Time zone (IANA name); default: the tenant's, or the service's.")
    ] = None,
    hour: Annotated[
        int, typer.Option(min=0, max=23, help="Full hour at which a report is due, in that zone.")
    ] = 6,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Have a report made of every week, month or quarter from now on, and handed over."""
    if framework not in NAMES:
        raise ConfigError(f"framework `{framework}` is none of: {', '.join(NAMES)}", framework=framework)
    formats = tuple(filter(None, (name.strip() for name in format.split(","))))
    if not formats or not set(formats) <= set(FORMATS):
        raise ConfigError(f"format `{format}` names none of: {', '.join(FORMATS)}", format=format)
    if source.plane.server is not None:
        body: dict[str, Any] = {"framework": framework, "every": every.value, "tenant": tenant}
        body |= {"formats": list(formats), "destinations": to or [], "zone": zone, "hour": hour}
        given = {name: value for name, value in body.items() if value is not None}
        with control_plane(source) as plane:
            made = plane.post("/v1/reports/schedules", given)
    else:
        with _book(source) as (book, engine, now_us):
            with engine.connect() as connection:
                tenant = known_tenant(connection, tenant)
            maker = Maker(local_name(), (Role.AUDITOR.value,), None)
            wanted = WantedSchedule(framework, tenant, formats, tuple(to or ()), every, zone, hour)
            made = book.make(maker, wanted).data(now_us)
    _told(made, as_json)


@app.command(epilog="Example: `kvcustody report schedules pause 1f0c2a9d5e6b7788`")
@grouped
def pause(
    schedule: _Id,
    *,
    reason: _Reason = "",
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Make nothing more by a schedule until it is resumed. What falls due until then is not made."""
    _change(source, schedule, "pause", reason, as_json)


@app.command(epilog="Example: `kvcustody report schedules resume 1f0c2a9d5e6b7788`")
@grouped
def resume(
    schedule: _Id,
    *,
    reason: _Reason = "",
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Make reports by a schedule again, from the next period on."""
    _change(source, schedule, "resume", reason, as_json)


@app.command(
    epilog="Example: `kvcustody report schedules delete 1f0c2a9d5e6b7788 --reason 'the audit is over'`"
)
@grouped
def delete(
    schedule: _Id,
    *,
    reason: _Reason = "",
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """End a schedule. What it made stays on the list; what waited to be handed over is given up."""
    _change(source, schedule, "delete", reason, as_json)


@grouped
def list_reports(
    *,
    tenant: Annotated[str | None, typer.Option(help="Only reports of this tenant.")] = None,
    oldest_first: OldestFirst = False,
    source: Source,
    as_json: Json = False,
) -> None:
    """What a control plane made, newest first: each report's opinion, digest, signature, and how it was handed over."""
    items = listed(LIST_REPORTS, source, tenant=tenant)
    items = items[::-1] if oldest_first else items
    if as_json:
        print_answer(MadeReportPage, {"items": items})
        return
    if not items:
        say("no report was made; `kvcustody report schedules add` has them made by a calendar")
        return
    columns = ("period (UTC)", "framework", "of", "verdict", "why", "handed over", "digest", "report")
    table = make_table(f"{several(len(items), 'report')}", *columns, left=len(columns))
    for item in items:
        period = f"{readable(item['since_us'], '%Y-%m-%d')} to {readable(item['until_us'], '%Y-%m-%d')}"
        why = item["error"] or "; ".join(each["cause"] for each in item["reasons"])
        handed = Text(", ").join(
            Text(printable(f"{each['destination']}: ")) + _marked(each["state"])
            for each in item["deliveries"]
        )
        verdict = (item["opinion"] or "not shown") if item["state"] == "made" else item["state"]
        digest = (item["digest"] or "")[:12]
        table.add_row(
            period, item["framework"], item["tenant"] or "all tenants", _marked(verdict), why, handed,
            digest, item["report"],
        )  # fmt: skip
    stdout().print(table)
    for one in (*items, *(each for item in items for each in item["deliveries"])):
        if one["unread"]:
            say(f"not read: {one['unread']}")


@grouped
def retry(
    report: Annotated[str, typer.Argument(help="The report's id.", metavar="REPORT")],
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Try again what failed for good: making a scheduled report, or handing it over."""
    _check_id(report)
    if source.plane.server is not None:
        with control_plane(source) as plane:
            found = plane.post(f"/v1/reports/{report}/retry", {})
    else:
        with _book(source) as (book, engine, _):
            book.retry(report, by=local_name())
            with engine.connect() as connection:
                found = made_reports(connection, only=report, verdicts=SignedVerdicts())[0][0].data()
    if as_json:
        print_answer(MadeReportModel, found)
        return
    say(f"report {report} is tried again at the service's next look")


@contextmanager
def _book(source: ServiceSource) -> Iterator[tuple[ScheduleBook, Any, int]]:
    """The book of schedules of the ledger itself, its engine, and now; a refusal is one line."""
    settings, clock = service_settings(source.config, source.ledger), SystemClock()
    with writing(settings.database_url) as engine, recorder(engine, clock) as writer:
        try:
            yield ScheduleBook(engine, clock, writer.submit_durable, settings), engine, clock.utc_us()
        except ProblemError as error:
            absent = error.type.status == 404
            raise ConfigError("there is none of this id" if absent else error.detail) from None


def _change(source: ServiceSource, schedule: str, act: str, reason: str, as_json: bool) -> None:
    _check_id(schedule)
    if source.plane.server is not None:
        with control_plane(source) as plane:
            done = plane.post(f"/v1/reports/schedules/{schedule}/{act}", {"reason": reason})
    else:
        with _book(source) as (book, _, now_us):
            done = book.change(schedule, act, by=local_name(), reason=reason).data(now_us)
    _told(done, as_json)


def _check_id(text: str) -> None:
    if not text or not set(text) <= set("0123456789abcdef"):
        raise ConfigError(f"`{text}` is no id: the lists show them")


def _told(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_answer(ScheduleModel, found)
        return
    due = f", next due {readable(found['next_us'], TO_THE_MINUTE)} UTC" if found["next_us"] else ""
    say(f"schedule {found['schedule']} is {found['state']}{due}")


def _marked(word: str) -> Text:
    return Text(printable(word), _MARKS.get(word, ""))
