"""Deletion: how much due custody has evidence, how late it was, and where two sources disagree."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from kvcustody.audit.evidence.coverage.summary import coverage_by_period
from kvcustody.console.render.charts import Figure, columns
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.overview import sees_all
from kvcustody.governance.api.operations import custody as custody_api
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.times import readable

_HOUR_US = 3_600_000_000
_PERIODS = {
    "24h": (24, _HOUR_US, "%H:00"),
    "7d": (28, 6 * _HOUR_US, "%m-%d %Hh"),
    "30d": (30, 24 * _HOUR_US, "%m-%d"),
}
_PAGE = 50
_LEGEND = [("covered", 1), ("due and not covered", 4)]


def show(visit: PageRequest) -> Response:
    """Return a period's coverage by tenant and classification, over time, with orphan findings and gaps."""
    tenant_name = visit.text("tenant")
    tenant = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, tenant_name)
    visit.record("consoleDeletion", tenant=tenant)
    name = visit.text("period") or "24h"
    count, step_us, form = _PERIODS.get(name, _PERIODS["24h"])
    until_us = visit.service.clock.utc_us()
    since_us = (until_us // step_us + 1 - count) * step_us
    covered = visit.ask(custody_api.covered, tenant_name, since_us, until_us)
    everything = visit.caller.reach(Permission.READ_CUSTODY) is Reach.ALL
    return visit.page(
        "erasure/deletion.html",
        "Deletion",
        tenant=tenant_name or tenant,
        all_tenants=sees_all(visit),
        periods=list(_PERIODS),
        period=name,
        found=covered,
        chart=_over_time(visit, tenant, since_us, until_us, step_us, form),
        findings=visit.ask(custody_api.findings, tenant_name, cursor=visit.text("cursor", 1024), limit=_PAGE),
        gaps=visit.ask(custody_api.gaps, limit=_PAGE)["items"] if everything else None,
    )


def _over_time(visit: PageRequest, tenant: str | None, since_us: int, until_us: int, step_us: int, form: str) -> Figure:
    with visit.service.reading(tenant) as connection:
        rows: Any = coverage_by_period(connection, since_us, until_us, step_us, tenant=tenant)
    labels = [readable(start, form) for start, _ in rows]
    values = [[row.covered, row.due - row.covered] for _, row in rows]
    return columns("Units due for deletion, by when they were due", labels, values, _LEGEND, "UTC", "units")
