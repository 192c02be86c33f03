"""Operations on route receipts, for those who run or audit a fleet: measures, receipts and problems.

A tenant's own viewers see its halves as leaves of its log; what a fleet's workers have to do is not shown to tenants.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Annotated, Any, Final

from kvcustody.audit.evidence.routes.route_measures import RouteMeasures, measure
from kvcustody.audit.evidence.routes.route_receipts import (
    BEFORE_ALL,
    HalfPlace,
    JoinedRoutes,
    Receipt,
    RoutePeriod,
    by_problem,
    judge,
    read_routes,
    receipts_in_order,
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

HALVES_MAX: Final = 50_000  # that measures are of
_JUDGED_MAX: Final = 20_000  # receipts that one page of findings looks at
_read = partial(Operation, method="GET", action=Permission.READ_OPERATIONS, tag="operations")
RequestId = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=160,
        description="Only this request, by the `X-Request-Id` in the door's answer.",
    ),
]
ReceiptName = Annotated[
    str | None, Query(pattern=r"^[0-9a-f]{1,32}$", description="Only receipts whose name starts with this text.")
]


def add_routes(api: Declarations) -> None:
    """Declare the operations."""
    api.add(_read("getRoutes", path="/v1/routes", command="routes summary"), summary, answers=RouteMeasuresModel)
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
    """Measure routing from the route receipts of [since, until), by default the last day.

    They are of the newest 50,000 halves of doors and as many of workers.
    """
    return measured(desk, _period(desk, caller, tenant, since, until), HALVES_MAX)


def measured(desk: Desk, period: RoutePeriod, newest: int) -> dict[str, Any]:
    """Measure routing from so many of the newest halves of a period, as `summary` does for who may read it."""
    with desk.reading(period.tenant) as connection:
        joined = read_routes(connection, period, now_us=desk.clock.utc_us(), halves_max=newest)
    return measures_of(joined, measure(joined.receipts)) | {
        "since_us": period.since_us,
        "until_us": period.until_us,
        "measured_since_us": joined.since_us,
    }


def measures_of(joined: JoinedRoutes, measures: RouteMeasures) -> dict[str, Any]:
    """Convert the measures to the API's form."""
    return measures._asdict() | {
        "locality": measures.locality,
        "hit_length": measures.hit_length,
        "stale_rate": measures.stale_rate,
        "workers": [
            one._asdict() | {"locality": one.locality, "stale_rate": one.stale_rate} for one in measures.workers
        ],
        "tenants": [one._asdict() | {"locality": one.locality} for one in measures.tenants],
        "scores": [one._asdict() for one in measures.scores],
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
    """List route receipts in order of time, with both halves of each; by default the last day."""
    prefix = (receipt or "") if request is None else request_digest(request)
    period = _period(desk, caller, tenant, since, until)._replace(prefix=prefix)
    question = _question("listRouteReceipts", caller, period, since, until)
    position = desk.cursors.read(question, cursor)
    after = BEFORE_ALL if position is None else HalfPlace(*map(int, position))
    with desk.reading(period.tenant) as connection:
        receipts = [*islice(receipts_in_order(connection, period, after=after), limit + 1)]
    following = desk.cursors.write(question, list(receipts[limit - 1].place)) if len(receipts) > limit else None
    return {"items": [_shown(one) for one in receipts[:limit]], "next": following}


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
    """List problems of route receipts: a missing half, a promise that was not kept, a claim from another worker.

    A page looks at 20,000 receipts at most: one with fewer items than `limit` may have a following page.
    """
    period = _period(desk, caller, tenant, since, until)._replace(prefix=receipt or "")
    binding = _question("listRouteFindings", caller, period, since, until)
    position = desk.cursors.read(binding, cursor)
    after, shown = (
        BEFORE_ALL,
        0,
    )  # the receipt before, and how many findings of the next one were on earlier pages
    if position is not None:
        after, shown = HalfPlace(*map(int, position[:3])), int(position[3])
    items: list[dict[str, Any]] = []
    following: list[int] | None = None
    with desk.reading(period.tenant) as connection:
        for number, one in enumerate(receipts_in_order(connection, period, after=after), 1):
            wrong = judge(one, now_us=desk.clock.utc_us())[1][shown:]
            room = limit - len(items)
            items += [finding._asdict() for finding in wrong[:room]]
            if len(wrong) > room:
                following = [*after, shown + room]
                break
            after, shown = one.place, 0
            if number == _JUDGED_MAX:
                following = [*after, 0]
                break
    return {"items": items, "next": desk.cursors.write(binding, following) if following else None}


def _period(desk: Desk, caller: Caller, tenant: str | None, since: int | None, until: int | None) -> RoutePeriod:
    mine = desk.tenant_of(caller, Permission.READ_OPERATIONS, tenant)
    return RoutePeriod(*last_day_or(desk, since, until), mine)


def _shown(one: Receipt) -> dict[str, Any]:
    sent = None if one.sent is None else one.sent._asdict()
    found = [half._asdict() for half in one.found]
    return {"receipt": one.receipt, "tenant": one.tenant, "sent": sent, "found": found, "at_us": one.at_us}


def _question(
    operation: str, caller: Caller, period: RoutePeriod, since: int | None, until: int | None
) -> CursorBinding:
    asked = {"tenant": period.tenant, "prefix": period.prefix, "since": since, "until": until}
    return CursorBinding(operation, caller.name, asked)
