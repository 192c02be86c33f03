"""Health: the ledger's writer, its signatures and witnesses, workers, erase epochs, and scans.

1. A scan is asked for by the API's own function, by those who operate; one that waits is not asked for twice.
"""

from __future__ import annotations

from starlette.responses import Response

from kvcustody.console.web.page_request import PageRequest, redirect
from kvcustody.console.web.pages.overview import witnesses
from kvcustody.governance.api.models.scan_orders import ScanWanted
from kvcustody.governance.api.operations import fleet as orders_api
from kvcustody.governance.api.operations import health as health_api
from kvcustody.governance.observability.serving_summary import ServingSummary, summary
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.epochs.epoch_takers import EpochTaker
from kvcustody.governance.service.fleet.scan_orders import ScanOrder
from kvcustody.governance.service.operations.parameters import LARGE
from kvcustody.governance.service.problem_details import not_found

_WORKERS_MAX = 1000
_ORDERS_SHOWN = 20


def show(visit: PageRequest) -> Response:
    """Return the state of each part, and the workers for callers who may see operations."""
    visit.caller.must(Permission.READ_HEALTH)
    visit.record("consoleHealth")
    workers = None
    orders: list[ScanOrder] = []
    takers: list[EpochTaker] = []
    serving: list[tuple[str, ServingSummary]] = []
    if visit.may(Permission.READ_OPERATIONS):
        workers = [worker for _, worker in visit.service.fleet.listed(limit=LARGE)]
        workers.sort(key=lambda worker: (worker.ended_us is not None, worker.worker, -worker.started_us))
        del workers[_WORKERS_MAX:]  # those that ended long ago
        at_work = [worker for worker in workers if worker.ended_us is None and worker.status]
        serving = [(worker.worker, summary(worker.status)) for worker in at_work]
        takers = visit.service.epochs.takers.listed()
        orders, _ = visit.service.scans.orders.listed(limit=_ORDERS_SHOWN)
    return visit.page(
        "operate/health.html",
        "Health",
        health=visit.ask(health_api.health),
        witnesses=witnesses(visit),
        effect=visit.service.policies_in_effect(),
        workers=workers,
        serving=serving,
        orders=orders,
        takers=takers,
        asked={order.worker for order in orders if order.is_open},
        operates=visit.may(Permission.OPERATE),
    )


def scan(visit: PageRequest) -> Response:
    """Order a full scan from a worker (rule 1); the page shows its progress."""
    visit.caller.must(Permission.OPERATE)
    worker = visit.text("worker", 128)
    if worker is None:
        raise not_found()
    visit.ask(orders_api.order_scan, worker, ScanWanted())
    return redirect("/health")
