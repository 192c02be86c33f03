"""Health: the ledger's writer, its signatures and witnesses, and every worker."""

from __future__ import annotations

from starlette.responses import Response

from kvcustody.console.web.overview import witnesses
from kvcustody.console.web.visit import Visit
from kvcustody.governance.api import health as health_api
from kvcustody.governance.service.roles import Action

_WORKERS_MAX = 1000


def show(visit: Visit) -> Response:
    """What is well, and what is not; workers for those who may see operations."""
    visit.caller.must(Action.READ_HEALTH)
    visit.record("consoleHealth")
    workers = None
    if visit.may(Action.READ_OPERATIONS):
        workers = [worker for _, worker in visit.service.fleet.listed(limit=_WORKERS_MAX)]
        workers.sort(key=lambda worker: (worker.ended_us is not None, worker.worker, -worker.started_us))
    return visit.page(
        "health.html",
        "Health",
        health=health_api.health(visit.service),
        witnesses=witnesses(visit),
        workers=workers,
    )
