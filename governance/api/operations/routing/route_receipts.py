"""Route receipts: what they measure, each of them, and what is wrong with them. For those who run or audit a fleet.

A tenant's own viewers see its halves as leaves of its log; what a fleet's workers have to do is not shown to tenants.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from kvcustody.audit.evidence.routes.route_measures import RouteMeasures, measure
from kvcustody.audit.evidence.routes.route_receipts import (
    JoinedRoutes,
    Receipt,
    RoutePeriod,
    by_problem,
    read_routes,
)
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep
from kvcustody.governance.api.models.routing.route_receipts import (
    RouteFindings,
    RouteMeasuresModel,
    RouteReceipts,
)
from kvcustody.governance.edge.route_receipt import request_digest
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.operations.desk import Desk, last_day_or
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.parameters import Cursor, Limit, Query, Since, Tenant, Until
from kvcustody.governance.service.page_cursor import CursorBinding

_read = partial(Operation, method="GET", action=Permission.READ_OPERATIONS, tag="operations")
RequestId = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=160,
        description="Of this request alone: its `X-Request-Id`, as the answer of the door has it.",
    ),
]
ReceiptName = Annotated[
    str | None, Query(pattern=r"^[0-9a-f]{1,32}$", description="Receipts whose name begins so.")
]


def add_routes(api: Declarations) -> None:
    """Declare the operations."""
    api.add(
        _read("getRoutes", path="/v1/routes", command="routes summary"), summary, answers=RouteMeasuresModel
    )
    api.add(
        _read("listRouteReceipts", path="/v1/routes/receipts", command="routes list"),
        listed,
        answers=RouteReceipts,
        problems=("cursor-invalid",),
    )
    api.add(
        _read("listRouteFindings", path="/v1/routes/findings", command="routes findings"),
        findings,
        answers=RouteFindings,
        problems=("cursor-invalid",),
    )


def summary(
    desk: DeskDep, caller: CallerDep, *, tenant: Tenant = None, since: Since = None, until: Until = None
) -> dict[str, Any]:
    """What route receipts of [since, until) measure of routing, the last day by default."""
    period = _period(desk, caller, tenant, since, until)
    joined = _joined(desk, period)
    return measures_of(joined, measure(joined.receipts)) | {
        "since_us": period.since_us,
        "until_us": period.until_us,
    }


def measures_of(joined: JoinedRoutes, made: RouteMeasures) -> dict[str, Any]:
    """The figures as they are answered."""
    return made._asdict() | {
        "locality": made.locality,
        "hit_length": made.hit_length,
        "stale_rate": made.stale_rate,
        "workers": [
            one._asdict() | {"locality": one.locality, "stale_rate": one.stale_rate} for one in made.workers
        ],
        "tenants": [one._asdict() | {"locality": one.locality} for one in made.tenants],
        "scores": [one._asdict() for one in made.scores],
        "receipts": len(joined.receipts),
        "awaited": joined.awaited,
        "findings": by_problem(joined.findings),
    }


def listed(
    desk: DeskDep,
    caller: CallerDep,
    *,
    tenant: Tenant = None,
    request: RequestId = None,
    receipt: ReceiptName = None,
    since: Since = None,
    until: Until = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Route receipts: both halves of each, in the order of time; of the last day by default."""
    prefix = (receipt or "") if request is None else request_digest(request)
    period = _period(desk, caller, tenant, since, until)._replace(prefix=prefix)
    items, following = _page(
        desk, caller, "listRouteReceipts", period, since, until, cursor, limit,
        [_shown(one) for one in _joined(desk, period).receipts],
    )  # fmt: skip
    return {"items": items, "next": following}


def findings(
    desk: DeskDep,
    caller: CallerDep,
    *,
    tenant: Tenant = None,
    receipt: ReceiptName = None,
    since: Since = None,
    until: Until = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """What is wrong with route receipts: a half that is missing, a promise that was not found, a claim of elsewhere."""
    period = _period(desk, caller, tenant, since, until)._replace(prefix=receipt or "")
    items, following = _page(
        desk, caller, "listRouteFindings", period, since, until, cursor, limit,
        [one._asdict() for one in _joined(desk, period).findings],
    )  # fmt: skip
    return {"items": items, "next": following}


def _period(
    desk: Desk, caller: Caller, tenant: str | None, since: int | None, until: int | None
) -> RoutePeriod:
    mine = desk.tenant_of(caller, Permission.READ_OPERATIONS, tenant)
    return RoutePeriod(*last_day_or(desk, since, until), mine)


def _joined(desk: Desk, period: RoutePeriod) -> JoinedRoutes:
    with desk.reading(period.tenant) as connection:
        return read_routes(connection, period, now_us=desk.clock.utc_us())


def _shown(one: Receipt) -> dict[str, Any]:
    sent = None if one.sent is None else one.sent._asdict()
    found = [half._asdict() for half in one.found]
    return {"receipt": one.receipt, "tenant": one.tenant, "sent": sent, "found": found, "at_us": one.at_us}


def _page(
    desk: Desk,
    caller: Caller,
    operation: str,
    period: RoutePeriod,
    since: int | None,
    until: int | None,
    cursor: str | None,
    limit: int,
    items: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], str | None]:
    """The items behind a cursor: those after the last one of the page before."""
    asked = {"tenant": period.tenant, "prefix": period.prefix, "since": since, "until": until}
    question = CursorBinding(operation, caller.name, asked)
    position = desk.cursors.read(question, cursor)
    keys = _keys(items)
    first = 0
    if position is not None:
        first = bisect_right(keys, (int(position[0]), str(position[1]), str(position[2]), int(position[3])))
    shown = items[first : first + limit]
    more = first + limit < len(items)
    return shown, desk.cursors.write(question, list(keys[first + limit - 1])) if more else None


def _keys(items: Sequence[dict[str, Any]]) -> list[tuple[int, str, str, int]]:
    """What items are in the order of; equal findings of one receipt are numbered."""
    equal = Counter[tuple[int, str, str]]()
    keys = []
    for item in items:
        key = item["at_us"], item["receipt"], f"{item.get('problem', '')} {item.get('worker', '')}"
        equal[key] += 1
        keys.append((*key, equal[key]))
    return keys
