"""Deletion: how much due custody has evidence, how late it was, and where two sources disagree.

1. The page reads coverage as it was judged last, by hour or, of a short period, by minute; it says when that was. With
   `recount` it counts the evidence of the period instead, which takes as long as there is much of it.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from kvcustody.audit.evidence.counters.hourly_coverage import PeriodCoverage
from kvcustody.audit.evidence.counters.read_figures import tier_totals
from kvcustody.audit.evidence.processes.enforcement import (
    monitored_periods,
    qualification,
    unnamed,
    unnamed_qualification,
)
from kvcustody.console.web.charts import CoverageOverTime, PagePeriod, Timeline, period_of
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.overview import sees_all
from kvcustody.governance.api.operations import custody as custody_api
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.times import HOUR_US

_PAGE = 50


def show(visit: PageRequest) -> Response:
    """Return a period's coverage by tenant and classification, over time, with orphan findings and gaps."""
    tenant_name = visit.text("tenant")
    tenant = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, tenant_name)
    visit.record("consoleDeletion", tenant=tenant)
    chosen = period_of(visit)
    with visit.service.reading(tenant) as connection:
        times = Timeline.of(visit, connection, chosen, tenant)
        over_time = CoverageOverTime.of(visit, connection, chosen, times)
        tiers = tier_totals(connection, tenant=tenant)
    judged = over_time.judged
    recounted = visit.text("recount") is not None
    if recounted:
        covered = visit.ask(custody_api.covered, tenant_name, chosen.since_us, chosen.until_us)
    else:
        covered = _as_judged(visit, judged, chosen, tenant)
    everything = visit.caller.reach(Permission.READ_CUSTODY) is Reach.ALL
    return visit.page(
        "erasure/deletion.html",
        "Deletion",
        tenant=tenant_name or tenant,
        all_tenants=sees_all(visit),
        period=chosen,
        found=covered,
        state=judged.state,
        recounted=recounted,
        tiers=tiers,
        charts=over_time.charts(),
        by_minute=over_time.width_us < HOUR_US,
        findings=visit.ask(custody_api.findings, tenant_name, cursor=visit.text("cursor", 1024), limit=_PAGE),
        gaps=visit.ask(custody_api.gaps, limit=_PAGE)["items"] if everything else None,
    )


def _as_judged(visit: PageRequest, judged: PeriodCoverage, chosen: PagePeriod, tenant: str | None) -> dict[str, Any]:
    """Return what the exact answer has, from hourly figures (rule 1)."""
    with visit.service.reading(None) as connection:  # system leaves are in nobody's rows
        monitored = monitored_periods(connection, chosen.since_us, chosen.until_us, tenant)
    return {
        "rows": [row._asdict() for row in judged.rows],
        "total": judged.total._asdict(),
        "lag_us_p99": judged.lags.percentile(99),
        "lag_us_max": judged.lags.longest_us,
        "qualification": qualification(monitored) if tenant is None else unnamed_qualification(unnamed(monitored)),
    }
