"""Reports that were made, or are due by a schedule; and the schedules."""

from __future__ import annotations

from typing import Any

from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.operations.desk import Desk, ReadOperation
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.schedules.made_reports import made_reports
from kvcustody.governance.service.schedules.schedule_book import read_schedules

READ = Permission.READ_CUSTODY


def _reports(
    desk: Desk, caller: Caller, *, tenant: str | None, cursor: str | None = None, limit: int | None = None
) -> dict[str, Any]:
    """`limit` None: all of them, on one page."""
    mine = desk.tenant_of(caller, READ, tenant)
    question = CursorBinding("listReports", caller.name, {"tenant": tenant})
    position = desk.cursors.read(question, cursor)
    before = None if position is None else (int(position[0]), str(position[1]))
    with desk.reading() as connection:
        found, more = made_reports(
            connection, tenant=mine, before=before, limit=limit, verdicts=desk.verdicts
        )
    following = desk.cursors.write(question, [found[-1].created_us, found[-1].report]) if more else None
    return {"items": [item.data() for item in found], "next": following}


def _schedules(desk: Desk, caller: Caller) -> dict[str, Any]:
    with desk.reading() as connection:
        found = read_schedules(connection, tenant=caller.tenant_of(READ, None))
    now_us = desk.clock.utc_us()
    return {"items": [each.data(now_us) for each in found], "next": None}


LIST_REPORTS = ReadOperation(
    Operation("listReports", "GET", "/v1/reports", READ, "evidence", recorded=True), _reports
)
LIST_SCHEDULES = ReadOperation(
    Operation("listReportSchedules", "GET", "/v1/reports/schedules", READ, "evidence"), _schedules
)
