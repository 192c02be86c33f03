"""The list of reports with their opinions, digests and deliveries.

1. A report that somebody made by hand is here once it is finished; one of a schedule from when it is due.
2. It is shown to those who may see what is in it: one tenant's, or all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Engine, func, insert, or_, select

from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sections.opinion import SECTION as OPINION
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import (
    service_report_deliveries,
    service_report_schedules,
    service_reports,
)
from kvcustody.audit.store.schema.stored_rows import StoredRow, stored_page, stored_rows
from kvcustody.governance.service.schedules.schedule_book import DELETED

_reports, _deliveries = service_reports.c, service_report_deliveries.c
NOT_HERE = "the report that this row names is missing: its verdict is not shown"
_UNTIL_MADE = ("waiting", "making", "failed")


class Delivery(NamedTuple):
    """The delivery of a report to one destination: `waiting`, `delivered` or `given-up`."""

    destination: str
    state: str
    tries: int
    next_us: int
    failing_us: int | None
    delivered_us: int | None
    place: str | None
    error: str | None
    unread: str = ""  # what of its row cannot be read


class MadeReport(NamedTuple):
    """A report. `state`: `waiting`, `making`, `made`, `failed` or `skipped` (not made: too many were missed)."""

    report: str
    schedule: str | None
    job: str | None
    principal: str
    tenant: str | None
    framework: str
    formats: tuple[str, ...]
    since_us: int
    until_us: int
    due_us: int | None
    state: str
    tries: int
    checkpoint: int | None
    digest: str | None
    opinion: str | None
    reasons: tuple[dict[str, Any], ...]
    signed_by: str | None
    error: str | None
    created_us: int
    made_us: int | None
    deliveries: tuple[Delivery, ...] = ()
    unread: str = ""  # what of its row cannot be read

    def data(self) -> dict[str, Any]:
        """Return JSON data."""
        return self._asdict() | {"deliveries": [each._asdict() for each in self.deliveries]}


class Verdict(NamedTuple):
    """The result of a report: its opinion with reasons, its digest, and the key that signed it."""

    digest: str
    opinion: str
    reasons: list[dict[str, Any]]
    signed_by: str | None

    @classmethod
    def of(cls, report: Report) -> Verdict:
        """Return the verdict of a report."""
        reasons = [
            {"id": each.id, "adverse": each.is_adverse, "amount": each.amount, "cause": each.cause}
            for each in report[OPINION].exceptions
        ]
        signed = None
        if report.signature is not None:  # the key's name and id, without the public key itself
            signed = "+".join(report.signature.key.split("+")[:2])
        return cls(report.digest(), report[OPINION].kind, reasons, signed)


Verdicts = Callable[[Connection, Sequence[Any]], Mapping[str, Verdict]]
"""The verdicts of rows, by report; one is missing where nothing but the row says it."""


def add_report(
    engine: Engine,
    job: str,
    principal: str,
    asked: ReportParameters,
    formats: Sequence[str],
    verdict: Verdict,
    now_us: int,
) -> None:
    """List a report that a person requested (rule 1); `job` is its job's unique name."""
    values = {
        "report": job, "schedule": None, "job": job, "principal": principal, "tenant": asked.tenant,
        "framework": asked.framework, "formats": ",".join(formats), "since_us": asked.since_us,
        "until_us": asked.until_us, "due_us": None, "state": "made", "owner": "", "lease_us": 0, "tries": 1,
        "next_us": 0, "checkpoint": asked.checkpoint, "digest": verdict.digest, "opinion": verdict.opinion,
        "reasons": orjson.dumps(verdict.reasons).decode(), "signed_by": verdict.signed_by, "error": None,
        "created_us": now_us, "made_us": now_us,
    }  # fmt: skip
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(insert(service_reports).values(**values))


def made_reports(
    connection: Connection,
    *,
    tenant: str | None = None,
    before: tuple[int, str] | None = None,
    limit: int | None = 50,
    only: str | None = None,
    verdicts: Verdicts,
) -> tuple[list[MadeReport], bool]:
    """Return reports of one tenant (None: all), newest first, from before `before` (`created_us` and `report`) on.

    `limit`, and more where the order of the last could not be read; and whether more follow. `only`: the one of this
    name. `verdicts`: what is shown of a verdict (`signed_verdicts`), whatever a row says.
    """
    query = select(service_reports)
    if tenant is not None:
        query = query.where(_reports.tenant == tenant)
    if only is not None:
        query = query.where(_reports.report == only)
    if before is not None:
        created_us, report = before
        query = query.where(
            or_(
                _reports.created_us < created_us,
                (_reports.created_us == created_us) & (_reports.report < report),
            )
        )
    query = query.order_by(_reports.created_us.desc(), _reports.report.desc())
    rows, more = stored_rows(connection, query), False
    if limit is not None:
        rows, more = stored_page(connection, query, (_reports.created_us, _reports.report), limit)
    handed: dict[str, list[Delivery]] = {}
    for row in stored_rows(
        connection,
        select(service_report_deliveries)
        .where(_deliveries.report.in_([row.report for row in rows]))
        .order_by(_deliveries.destination),
    ):
        delivery = Delivery(*(getattr(row, name) for name in Delivery._fields))
        handed.setdefault(row.report, []).append(delivery)
    said = verdicts(connection, [row for row in rows if row.state == "made"])
    return [_made(row, handed.get(row.report, ()), said.get(row.report)) for row in rows], more


class Undelivered(NamedTuple):
    """A report that could not be made (`destination` empty) or delivered, of a schedule that is not deleted."""

    report: str
    schedule: str
    framework: str
    tenant: str | None
    principal: str
    destination: str
    is_given_up: bool
    tries: int
    since_us: int
    error: str


def undelivered(connection: Connection) -> list[Undelivered]:
    """Return all of them, oldest first."""
    table = service_report_schedules.c
    lives = select(table.schedule).where(table.state != DELETED)
    query = select(service_reports).where(
        _reports.schedule.in_(lives), _reports.state.in_(_UNTIL_MADE), _reports.tries > 0
    )
    reports = [
        Undelivered(
            row.report, row.schedule, row.framework, row.tenant, row.principal, "", row.state == "failed",
            row.tries, row.due_us or 0, row.error or "",
        )
        for row in stored_rows(connection, query)
        if row.error
    ]  # fmt: skip
    handed = (
        select(
            service_report_deliveries,
            _reports.schedule,
            _reports.framework,
            _reports.tenant,
            _reports.principal,
        )
        .join_from(service_report_deliveries, service_reports, _reports.report == _deliveries.report)
        .where(_reports.schedule.in_(lives), _deliveries.state != "delivered", _deliveries.tries > 0)
    )
    reports += [
        Undelivered(
            row.report, row.schedule, row.framework, row.tenant, row.principal, row.destination,
            row.state == "given-up", row.tries, row.failing_us or row.next_us, row.error or "",
        )
        for row in stored_rows(connection, handed)
    ]  # fmt: skip
    return sorted(reports, key=lambda each: (each.since_us, each.report, each.destination))


def report_figures(connection: Connection, verdicts: Verdicts) -> dict[str, dict[str, int]]:
    """Count schedules, reports by the opinion of their verdicts, and deliveries, by state."""
    columns = (_reports.report, _reports.schedule, _reports.job, _reports.digest)
    rows = stored_rows(connection, select(*columns).where(_reports.state == "made"))
    opinions = Counter(verdict.opinion for verdict in verdicts(connection, rows).values())
    figures: dict[str, dict[str, int]] = {"reports": dict(opinions)}
    for name, column in (
        ("report_schedules", service_report_schedules.c.state),
        ("report_deliveries", _deliveries.state),
    ):
        query = select(column, func.count().label("number")).where(column.is_not(None)).group_by(column)
        known: Counter[str] = Counter()
        for row in stored_rows(connection, query):
            known[row.state] += row.values["number"]
        figures[name] = dict(known)
    figures["report_schedules"].pop(DELETED, None)
    return figures


def _made(row: StoredRow, handed: Sequence[Delivery], verdict: Verdict | None) -> MadeReport:
    values: dict[str, Any] = {name: getattr(row, name) for name in MadeReport._fields if name != "deliveries"}
    values["formats"] = tuple(filter(None, values["formats"].split(",")))
    values |= Verdict("", "", [], None)._asdict() if verdict is None else verdict._asdict()
    values |= {name: values[name] or None for name in ("digest", "opinion")}
    values["reasons"] = tuple(values["reasons"])
    if verdict is None and row.state == "made":
        values["error"] = NOT_HERE
    return MadeReport(**values, deliveries=tuple(handed))
