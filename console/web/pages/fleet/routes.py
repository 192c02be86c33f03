"""Routes: a map of workers by what requests found there, and receipts with problems.

The newest halves of a period are measured, and all of them where it is asked to. Links to further pages name the moment
from which on they are measured (`part`), as cursors are of one period.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from kvcustody.audit.evidence.routes.route_receipts import RoutePeriod, tokens_over_time
from kvcustody.console.render.time_chart import ChartSeries, NameChart, TimeChart
from kvcustody.console.routes.print_routes import decimal, kept, percent
from kvcustody.console.web.charts import PagePeriod, Timeline, from_rows, period_of
from kvcustody.console.web.page_request import PageRequest
from kvcustody.governance.api.operations.routing import route_receipts as routes_api
from kvcustody.governance.service.access.roles import Permission

_PAGE = 50
_HALVES_MAX = 300  # of doors, and as many of workers, that the page measures; where asked to, all that the API does
_SHOWN_MAX = 64  # workers in the map


def show(visit: PageRequest) -> Response:
    """Return a period's measures, the map of workers, tenants, and the findings one by one."""
    tenant_name = visit.text("tenant")
    chosen = period_of(visit)  # its end stands in links to further pages: cursors are of one period
    since_us, until_us = chosen.since_us, chosen.until_us
    asked: dict[str, Any] = {"tenant": tenant_name, "since": since_us, "until": until_us}
    tenant = visit.service.tenant_of(visit.caller, Permission.READ_OPERATIONS, tenant_name)
    part_us, whole = visit.number("part"), visit.text("all") is not None
    measured = RoutePeriod(since_us if part_us is None else min(max(since_us, part_us), until_us), until_us, tenant)
    measures = routes_api.measured(
        visit.service, measured, routes_api.HALVES_MAX if whole or part_us is not None else _HALVES_MAX
    )
    from_us = measures["measured_since_us"]
    cursor = visit.text("cursor", 1024)
    request, receipt = visit.text("request", 160), visit.text("receipt", 32)
    sought = {"request": request, "receipt": receipt, "cursor": visit.text("after", 1024)}
    receipts = visit.ask(routes_api.listed, limit=_PAGE, **sought, **asked) if request or receipt else None
    return visit.page(
        "operate/routes.html",
        "Routes",
        tenant=tenant_name,
        period=chosen,
        measures=measures | {"since_us": since_us},
        tiles=(
            (percent(measures["locality"]), "locality"),
            (decimal(measures["hit_length"]), "tokens found, on average"),
            (decimal(measures["queue_delta_mean"]), "queue delta"),
            (percent(measures["stale_rate"]), "stale-location misses"),
            (decimal(measures["imbalance"]), "imbalance"),
            (kept(measures), "promised tokens found"),
        ),
        chart=_over_time(visit, chosen, tenant),
        map=_map(measures["workers"]),
        percent=percent,
        decimal=decimal,
        findings=visit.ask(routes_api.findings, cursor=cursor, limit=_PAGE, **asked | {"since": from_us}),
        request=request,
        receipts=None if receipts is None else receipts["items"],
        receipts_next=None if receipts is None else receipts["next"],
    )


def _over_time(visit: PageRequest, chosen: PagePeriod, tenant: str | None) -> TimeChart:
    """Return the prompt tokens that requests with a receipt found at their workers, and those they computed."""
    with visit.service.reading(tenant) as connection:
        buckets = Timeline.of(visit, connection, chosen, tenant).for_rows(chosen)
        span = buckets.starts_us[0], chosen.until_us, buckets.width_us
        rows = tokens_over_time(connection, *span, tenant=tenant)
    sums = [("found", row.at_us, row.found_tokens) for row in rows]
    sums += [("computed", row.at_us, row.prompt_tokens - row.found_tokens) for row in rows]
    return from_rows(buckets, "Prompt tokens at workers", "count", ("found", "computed"), sums)


def _map(workers: list[dict[str, Any]]) -> NameChart:
    """Return each worker's prompt tokens, found there and computed."""
    shown = sorted(workers, key=lambda one: -one["prompt_tokens"])[:_SHOWN_MAX]
    series = (
        ChartSeries("found", [one["found_tokens"] for one in shown], 1),
        ChartSeries("computed", [one["prompt_tokens"] - one["found_tokens"] for one in shown], 2),
    )
    names = [one["worker"] for one in shown]
    return NameChart("Prompt tokens by worker", "count", "Worker", names, series, across=True)
