"""Routes: a map of workers by what requests found there, and receipts with problems."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from kvcustody.console.render.charts import Figure, rows
from kvcustody.console.render.number_format import count
from kvcustody.console.routes.print_routes import decimal, kept, percent
from kvcustody.console.web.page_request import PageRequest
from kvcustody.governance.api.operations.routing import route_receipts as routes_api
from kvcustody.times import DAY_US

_PERIODS = {"1h": 1 / 24, "24h": 1, "7d": 7}
_PAGE = 50
_SHOWN_MAX = 64  # workers in the map


def show(visit: PageRequest) -> Response:
    """Return a period's measures, the map of workers, tenants, and the findings one by one."""
    tenant_name = visit.text("tenant")
    name = visit.text("period") or "24h"
    until_us = visit.number("until") or visit.service.clock.utc_us()  # cursors are of one period
    since_us = max(0, until_us - round(_PERIODS.get(name, 1) * DAY_US))
    asked: dict[str, Any] = {"tenant": tenant_name, "since": since_us, "until": until_us}
    measures = visit.ask(routes_api.summary, **asked)
    cursor = visit.text("cursor", 1024)
    request, receipt = visit.text("request", 160), visit.text("receipt", 32)
    sought = {"request": request, "receipt": receipt, "cursor": visit.text("after", 1024)}
    receipts = visit.ask(routes_api.listed, limit=_PAGE, **sought, **asked) if request or receipt else None
    return visit.page(
        "operate/routes.html",
        "Routes",
        tenant=tenant_name,
        periods=list(_PERIODS),
        period=name,
        measures=measures,
        tiles=(
            (percent(measures["locality"]), "locality"),
            (decimal(measures["hit_length"]), "tokens found, on average"),
            (decimal(measures["queue_delta_mean"]), "queue delta"),
            (percent(measures["stale_rate"]), "stale-location misses"),
            (decimal(measures["imbalance"]), "imbalance"),
            (kept(measures), "promised tokens found"),
        ),
        map=_map(measures["workers"]),
        percent=percent,
        decimal=decimal,
        findings=visit.ask(routes_api.findings, cursor=cursor, limit=_PAGE, **asked),
        request=request,
        receipts=None if receipts is None else receipts["items"],
        receipts_next=None if receipts is None else receipts["next"],
    )


def _map(workers: list[dict[str, Any]]) -> Figure:
    """Return each worker's prompt tokens, found there and computed, with other known figures."""
    shown = sorted(workers, key=lambda one: -one["prompt_tokens"])[:_SHOWN_MAX]
    return rows(
        "Prompt tokens by worker",
        [one["worker"] for one in shown],
        [[one["found_tokens"], one["prompt_tokens"] - one["found_tokens"]] for one in shown],
        [("found", 1), ("computed", 2)],
        [
            f"{percent(one['locality'])}, queue {decimal(one['queue_mean'])}, {count(one['free_blocks_last'])} free"
            for one in shown
        ],
    )
