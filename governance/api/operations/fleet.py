"""Operations for fleet operators: orphan scans, quotas, capacity, webhooks, the clock.

1. They show what a fleet needs to be run, by tenant's name and in blocks: never a subject, a session or a leaf.

Operations on scans that workers are asked for: operators ask, workers take and answer.

2. A worker sees and answers its own orders alone; another's are absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from kvcustody.audit.evidence.counters.read_figures import tenant_totals
from kvcustody.audit.evidence.query.prefix_value import prefix_values
from kvcustody.audit.evidence.query.scans import scan_of, scans
from kvcustody.audit.evidence.query.showback import costs_of, showback
from kvcustody.audit.evidence.routes.route_measures import measure_tenants
from kvcustody.audit.evidence.routes.route_receipts import RoutePeriod, receipts_in_order
from kvcustody.audit.kinds import ClockConfirmed
from kvcustody.clock import MICROSECONDS
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep, ServiceDep
from kvcustody.governance.api.http.long_poll import Wait, long_poll
from kvcustody.governance.api.models.jobs import JobModel
from kvcustody.governance.api.models.operations import (
    Capacity,
    Clock,
    ClockReason,
    Prefixes,
    Quotas,
    ScanDetail,
    Scans,
    Showback,
    Sink,
    SinkPage,
    SinkReason,
)
from kvcustody.governance.api.models.scan_orders import (
    ScanDone,
    ScanOrderModel,
    ScanOrderPage,
    ScansOwed,
    ScanWanted,
)
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.fleet.workers import WorkerRun, statuses
from kvcustody.governance.service.jobs import shown
from kvcustody.governance.service.operations.desk import last_day_or
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import page
from kvcustody.governance.service.operations.parameters import (
    LARGE,
    NUMBER,
    Cursor,
    Limit,
    Path,
    Query,
    Since,
    Tenant,
    Until,
)
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError, not_found

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

Incarnation = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["ab" * 16])]
Number = Annotated[int, Path(ge=0, lt=LARGE, examples=[3]), NUMBER]
SinkName = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", examples=["siem"])]
_ROUTED = ("routed_requests", "routed_tokens", "routed_found_tokens")
_read = partial(Operation, method="GET", action=Permission.READ_OPERATIONS, tag="operations")
_operate = partial(Operation, method="POST", action=Permission.OPERATE, tag="operations", keyed=True)


def add_fleet(api: Declarations) -> None:
    """Declare the operations."""
    scanning = _operate("startScan", path="/v1/orphans/scans", command="scan start")
    api.add(scanning, start_scan, answers=JobModel, status=202)
    listing = _read("listScans", path="/v1/orphans/scans", command="scan list")
    api.add(listing, listed_scans, answers=Scans, problems=("cursor-invalid",))
    one = _read("getScan", path="/v1/orphans/scans/{incarnation}/{scan}", command="scan show")
    api.add(one, one_scan, answers=ScanDetail, problems=("not-found",))
    quotas_ = _read("listQuotas", path="/v1/quotas", command="worker quotas")
    api.add(quotas_, quotas, answers=Quotas, problems=("cursor-invalid",))
    capacity_ = _read("getCapacity", path="/v1/capacity", command="worker capacity")
    api.add(capacity_, capacity, answers=Capacity, problems=("cursor-invalid",))
    api.add(_read("getShowback", path="/v1/showback", command="showback"), get_showback, answers=Showback)
    api.add(_read("listPrefixes", path="/v1/prefixes", command="prefixes top"), list_prefixes, answers=Prefixes)
    api.add(_read("listSinks", path="/v1/sinks", command="service sinks"), sinks, answers=SinkPage)
    for act, says in _SINK_ACTS.items():
        operation = _operate(f"{act}Sink", path=f"/v1/sinks/{{name}}/{act}", command=f"service {act}-sink")
        api.add(operation, _changing(act, says), answers=Sink, problems=("not-found",))
    api.add(_read("getClock", path="/v1/clock", command="service clock"), clock_state, answers=Clock)
    confirming = _operate("confirmClock", path="/v1/clock:confirm", command="service confirm-clock")
    api.add(confirming, confirm_clock, answers=Clock, problems=("conflict",))


_SINK_ACTS = {
    "detach": "Pause a webhook. It stays paused over restarts and keeps its position.",
    "attach": "Resume a webhook from its position.",
    "retry": "Send the failed batches of a webhook again, oldest first.",
    "acknowledge": (
        "Acknowledge the leaves that a webhook lost in restores and purges, so that they are no longer shown."
    ),
}


def start_scan(caller: CallerDep, service: ServiceDep) -> dict[str, Any]:
    """Scan the ledger for contradictions; the job's result names the scan."""
    return shown(service.scans.start(caller.name))


def listed_scans(caller: CallerDep, desk: DeskDep, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """List scans of workers and of the ledger, newest first."""
    question = CursorBinding("listScans", caller.name, {})
    position = desk.cursors.read(question, cursor)
    after = None if position is None else (int(position[0]), int(position[1]), int(position[2]))
    with desk.reading() as connection:
        found = scans(connection, after=after, limit=limit)
    following = None if found.next is None else desk.cursors.write(question, list(found.next))
    return {"items": [scan._asdict() for scan in found.scans], "next": following}


def one_scan(desk: DeskDep, incarnation: Incarnation, scan: Number) -> dict[str, Any]:
    """Get one scan and its findings."""
    with desk.reading() as connection:
        found = scan_of(connection, incarnation, scan)
    if found is None:
        raise not_found()
    return {"scan": found[0]._asdict(), "findings": [finding._asdict() for finding in found[1]]}


def quotas(
    caller: CallerDep, desk: DeskDep, tenant: Tenant = None, cursor: Cursor = None, limit: Limit = 100
) -> dict[str, Any]:
    """Compare each tenant's quota under the policy, its custody in the ledger, and what workers charge it for."""
    with desk.reading() as connection:
        totals = tenant_totals(connection)
    held = {row.tenant: row.held_blocks for row in totals}
    charged: Counter[str] = Counter()
    for worker in desk.fleet.running():
        charged.update(worker.charged)
    effect = desk.policies_in_effect()
    policies = [one for one in effect.policies if not one.stage]
    policy = policies[0].policy if len(policies) == 1 else None  # several: no share is everybody's
    named = {} if policy is None else {listed.id: listed for listed in policy.tenants}
    rows = []
    for name in sorted(held.keys() | named.keys() | charged.keys()):
        if tenant in (None, name):
            listed = named.get(name)
            rows.append(
                {
                    "tenant": name,
                    "group": None if listed is None else listed.group,
                    "guaranteed": None if listed is None else _percent(listed.guaranteed),
                    "cap": None if listed is None else _percent(listed.cap),
                    "held_blocks": held.get(name, 0),
                    "charged_blocks": charged[name],
                }
            )
    question = CursorBinding("listQuotas", caller.name, {"tenant": tenant})
    return page(desk, question, rows, cursor, limit) | {
        "revision": policies[0].revision if len(policies) == 1 else 0,
        "policies": [one.data() for one in policies],
    }


def capacity(caller: CallerDep, desk: DeskDep, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """Get every running worker's blocks by state, from its last report."""
    rows = [_capacity(worker) for worker in desk.fleet.running()]
    found = page(desk, CursorBinding("getCapacity", caller.name, {}), rows, cursor, limit)
    return found | {"blocks": sum(row["blocks"] for row in rows)}


def sinks(service: ServiceDep) -> dict[str, Any]:
    """List the webhooks of the settings: delivered, given up, and why one has stopped."""
    return {"items": [status._asdict() for status in service.sinks.listed()], "next": None}


def clock_state(service: ServiceDep) -> dict[str, Any]:
    """Get the time that deadlines are compared with, and the difference of the machine's clock."""
    return service.clock.state()._asdict()


def confirm_clock(caller: CallerDep, service: ServiceDep, what: ClockReason) -> dict[str, Any]:
    """Accept the machine's clock after a jump that no clock makes by itself. The reason goes on record first.

    Every deadline before its time is over from then on, for good. Workers whose own clocks agree go on by theirs.
    """
    now = service.clock.state()
    if not now.in_doubt:
        raise ProblemError("conflict", "the clock of this service is not in doubt")
    service.record(ClockConfirmed(service.clock.now_us(), now.ahead_us // MICROSECONDS, caller.name, what.reason))
    service.clock.confirm()
    return service.clock.state()._asdict()


def _changing(act: str, says: str) -> Callable[..., dict[str, Any]]:
    def change(caller: CallerDep, service: ServiceDep, name: SinkName, what: SinkReason) -> dict[str, Any]:
        changing = getattr(service.sinks, act)
        status: dict[str, Any] = changing(name, by=caller.name, reason=what.reason)._asdict()
        return status

    change.__doc__ = says
    return change


def _capacity(worker: WorkerRun) -> dict[str, Any]:
    states = {
        name.removeprefix("blocks."): whole(value)
        for name, value in sorted(worker.status.items())
        if name.startswith("blocks.") and name != "blocks.total"
    }
    return {
        "worker": worker.worker,
        "incarnation": worker.incarnation,
        "silent": worker.silent,
        "state": worker.state,
        "blocks": whole(worker.status.get("blocks.total", 0)),
        "bytes_per_block": whole(worker.status.get("bytes_per_block", 0)),
        "by_state": states,
    }


def whole(value: float) -> int:
    """Return a reported count as a whole number."""
    return int(min(max(value, 0), LARGE - 1))


def _percent(share: Fraction) -> str:
    return f"{float(share * 100):g}%"


WorkerName = Annotated[str, Path(min_length=1, max_length=128, examples=["gpu-0"])]
OrderId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["cd" * 16])]
Uuid = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["ab" * 16])]
_work = partial(Operation, action=Permission.WORK, tag="worker")


def add_scan_orders(api: Declarations) -> None:
    """Declare the operations."""
    place = "/v1/workers/{worker}/scans"
    asking = Operation("orderScan", "POST", place, Permission.OPERATE, "operations", keyed=True, command="scan worker")
    api.add(asking, order_scan, answers=ScanOrderModel, status=202, problems=("not-found", "conflict"))
    listing = _read("listScanOrders", path="/v1/orphans/orders", command="scan orders")
    api.add(listing, listed_scan_orders, answers=ScanOrderPage, problems=("cursor-invalid",))
    one = _read("getScanOrder", path="/v1/orphans/orders/{order}", command="scan order")
    api.add(one, one_scan_order, answers=ScanOrderModel, problems=("not-found",))
    api.add(_work("takeScans", "GET", "/v1/worker/scans", command="protocol take-scans"), owed, answers=ScansOwed)
    answering = _work(
        "answerScan",
        "PUT",
        "/v1/worker/incarnations/{incarnation}/scans/{order}",
        command="protocol answer-scan",
    )
    api.add(answering, answer_scan_order, answers=ScanOrderModel, problems=("not-found", "conflict"))


def order_scan(caller: CallerDep, service: ServiceDep, worker: WorkerName, what: ScanWanted) -> dict[str, Any]:
    """Order a worker to scan all of its memory for orphans and repair its findings, at its next pull.

    The order that already waits for this worker is given again.
    """
    made = service.scans.orders.ask(worker, caller.name, what.deadline_seconds)
    service.changed()
    return made._asdict()


def listed_scan_orders(
    caller: CallerDep, service: ServiceDep, cursor: Cursor = None, limit: Limit = 100
) -> dict[str, Any]:
    """List scan orders, newest first, with the outcome of each."""
    question = CursorBinding("listScanOrders", caller.name, {})
    position = service.cursors.read(question, cursor)
    before = None if position is None else (int(position[0]), str(position[1]))
    found, more = service.scans.orders.listed(before=before, limit=limit)
    following = service.cursors.write(question, [found[-1].at_us, found[-1].order]) if more else None
    return {"items": [item._asdict() for item in found], "next": following}


def one_scan_order(service: ServiceDep, order: OrderId) -> dict[str, Any]:
    """Get one order; `getScan` has the findings, by the scan's incarnation and number."""
    return service.scans.orders.get(order)._asdict()


async def owed(
    caller: CallerDep,
    service: ServiceDep,
    wait: Wait = 0,
    known: Annotated[
        str, Query(max_length=4096, pattern=r"^[a-f0-9,]*$", description="Orders that the worker has.")
    ] = "",
) -> dict[str, Any]:
    """List the scans ordered from this worker; held open up to `wait` seconds for a new one."""
    taken = set(known.split(","))
    return await long_poll(
        service,
        caller,
        wait,
        lambda: _owed(service, caller.name),
        lambda answer: any(item not in taken for item in answer["orders"]),
        kept=("scans", lambda answer: not answer["orders"]),
    )


def answer_scan_order(
    caller: CallerDep, service: ServiceDep, incarnation: Uuid, order: OrderId, what: ScanDone
) -> dict[str, Any]:
    """Report the outcome of an order. A repeated answer changes nothing; the scan must be in the ledger first."""
    service.fleet.sender(caller.name, incarnation)
    orders = service.scans.orders
    return orders.answer(caller.name, order, incarnation, scan=what.scan, reason=what.reason)._asdict()


def _owed(service: Service, worker: str) -> dict[str, Any]:
    return {"orders": [item.order for item in service.scans.orders.owed(worker)]}


def get_showback(
    desk: DeskDep,
    caller: CallerDep,
    *,
    since: Since = None,
    until: Until = None,
    tenant: Tenant = None,
) -> dict[str, Any]:
    """Get each tenant's custody and the prefill that reuse avoided, in [since, until) UTC microseconds; by default the
    last day.
    """
    since_us, until_us = last_day_or(desk, since, until)
    with desk.reading() as connection:
        rows = showback(connection, since_us, until_us, costs_of(statuses(connection)))
        period = RoutePeriod(since_us, until_us, tenant)
        routed = {one.tenant: one[1:4] for one in measure_tenants(receipts_in_order(connection, period))}
    items = [
        row._asdict() | dict(zip(_ROUTED, routed.get(row.tenant, (None,) * 3), strict=True))
        for row in rows
        if tenant in (None, row.tenant)
    ]
    return {"since_us": since_us, "until_us": until_us, "items": items}


def list_prefixes(
    desk: DeskDep,
    caller: CallerDep,
    *,
    since: Since = None,
    until: Until = None,
    tenant: Tenant = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """List the requests whose blocks saved later ones most, in [since, until) UTC microseconds; by default the last
    day.
    """
    since_us, until_us = last_day_or(desk, since, until)
    with desk.reading() as connection:
        costs = costs_of(statuses(connection))
        rows = prefix_values(connection, since_us, until_us, costs, tenant=tenant, limit=limit)
    return {"since_us": since_us, "until_us": until_us, "items": [row._asdict() for row in rows]}
