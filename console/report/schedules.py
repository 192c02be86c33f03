"""`kvcustody report schedules`, `report list` and `report retry`: reports by calendar, and those made so far.

On the ledger itself, as whoever may write it (on record as `local:<user>`), or asked of a control plane.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvcustody.audit.reports.framework import NAMES
from kvcustody.console.api.client import done
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.options import ActSource
from kvcustody.console.render.document_forms import FORMATS
from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.governance.service.schedules.calendar_periods import Cadence
from kvcustody.times import TO_THE_MINUTE, readable

_Id = Annotated[str, typer.Argument(help="The schedule's id.", metavar="SCHEDULE")]
_Reason = Annotated[str, typer.Option(help="Why: on record.")]
RETRY_EPILOG = "Example:\n\n    kvcustody report retry 5446d35c1765446d35c1765446d35c17"

app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Scheduled reports and their delivery: create, pause, resume and delete schedules.",
    epilog="docs/concepts/reports.md says when a report is due, and what happens to undelivered ones.",
)


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
    hour: Annotated[int, typer.Option(min=0, max=23, help="Full hour at which a report is due, in that zone.")] = 6,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Have a report made of every week, month or quarter from now on, and handed over."""
    if framework not in NAMES:
        raise ConfigError(f"framework `{framework}` is none of: {', '.join(NAMES)}", framework=framework)
    formats = tuple(filter(None, (name.strip() for name in format.split(","))))
    if not formats or not set(formats) <= set(FORMATS):
        raise ConfigError(f"format `{format}` names none of: {', '.join(FORMATS)}", format=format)
    schedule = done(
        "makeReportSchedule",
        source,
        framework=framework,
        every=every.value,
        tenant=tenant,
        formats=list(formats),
        destinations=to or [],
        zone=zone,
        hour=hour,
    )
    _told(schedule, as_json)


@app.command(epilog="Example: `kvcustody report schedules pause 1f0c2a9d5e6b7788`")
@grouped
def pause(
    schedule: _Id,
    *,
    reason: _Reason = "",
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Pause a schedule. Reports that fall due while it is paused are not made."""
    _change(source, schedule, "pause", reason, as_json)


@app.command(epilog="Example: `kvcustody report schedules resume 1f0c2a9d5e6b7788`")
@grouped
def resume(
    schedule: _Id,
    *,
    reason: _Reason = "",
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Resume a schedule from the next period on."""
    _change(source, schedule, "resume", reason, as_json)


@app.command(epilog="Example: `kvcustody report schedules delete 1f0c2a9d5e6b7788 --reason 'the audit is over'`")
@grouped
def delete(
    schedule: _Id,
    *,
    reason: _Reason = "",
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Delete a schedule. Its finished reports stay listed, and its pending deliveries are cancelled."""
    _change(source, schedule, "delete", reason, as_json)


@grouped
def retry(
    report: Annotated[str, typer.Argument(help="The report's id.", metavar="REPORT")],
    *,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Try again what failed for good: making a scheduled report, or handing it over."""
    _check_id(report)
    found = done("retryReport", source, report=report)
    if as_json:
        print_json(found)
        return
    say(f"report {report} is tried again at the service's next check")


def _change(source: ActSource, schedule: str, act: str, reason: str, as_json: bool) -> None:
    _check_id(schedule)
    made = done(f"{act}ReportSchedule", source, schedule=schedule, reason=reason)
    _told(made, as_json)


def _check_id(text: str) -> None:
    if not text or not set(text) <= set("0123456789abcdef"):
        raise ConfigError(f"`{text}` is no id: the lists show them")


def _told(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    due = f", next due {readable(found['next_us'], TO_THE_MINUTE)} UTC" if found["next_us"] else ""
    say(f"schedule {found['schedule']} is {found['state']}{due}")
