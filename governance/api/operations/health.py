"""Operations of health: liveness, readiness, problems, metrics, and the caller's open tasks."""

from __future__ import annotations

from typing import Any

from anyio.to_thread import run_sync

from kvcustody.audit.evidence.processes.orders import unsigned_orders
from kvcustody.audit.evidence.query.attempts import refused_identities
from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.tlog.root_sealer import unsealed
from kvcustody.audit.tlog.witness.status import witness_status
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep, ServiceDep
from kvcustody.governance.api.models.health import Alive, Health, InboxPage
from kvcustody.governance.observability.metrics import exposition
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.fleet.workers import WorkerState
from kvcustody.governance.service.health.verdict import TroubleKind
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import page
from kvcustody.governance.service.operations.parameters import LARGE, Cursor, Limit
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.guarding_thread import not_guarding
from kvcustody.times import DAY_US


def add_health(api: Declarations) -> None:
    """Declare the operations. The two public ones answer one word and reveal nothing else."""
    api.add(
        Operation("live", "GET", "/health/live", None, "operations", command="service live"),
        live,
        answers=Alive,
    )
    api.add(
        Operation("ready", "GET", "/health/ready", None, "operations", command="service ready"),
        ready,
        answers=Alive,
    )
    measured = Operation(
        "getMetrics", "GET", "/metrics", Permission.READ_HEALTH, "operations", command="service metrics"
    )
    api.add(measured, metrics, media="text/plain")
    api.add(
        Operation("getHealth", "GET", "/v1/health", Permission.READ_HEALTH, "operations", command="service health"),
        health,
        answers=Health,
    )
    listing = Operation("listInbox", "GET", "/v1/inbox", Permission.SELF, "operations", recorded=True, command="inbox")
    api.add(listing, inbox, answers=InboxPage, problems=("cursor-invalid",))


def live() -> dict[str, Any]:
    """Answer that the process runs."""
    return {"status": "ok"}


def ready(service: ServiceDep) -> dict[str, Any]:
    """Answer whether requests can be served: the ledger records, and the database answers."""
    if not service.ready():
        raise ProblemError("unavailable", headers={"Retry-After": "2"})
    return {"status": "ok"}


async def metrics(service: ServiceDep) -> Content:
    """Get every metric in Prometheus' text format; tenants by pseudonym unless the settings say otherwise."""
    measuring = service.measuring
    text = await run_sync(lambda: exposition(measuring.samples()), limiter=measuring.threads)
    return Content(text, "text/plain; version=0.0.4; charset=utf-8")


def health(service: ServiceDep) -> dict[str, Any]:
    """Get the state of the ledger's writer, its signatures and witnesses, workers' batches and the workers.

    Where the database does not answer, so does this within two seconds, and says why.
    """
    troubles = service.verdict.troubles()
    if any(one.kind is TroubleKind.DATABASE for one in troubles):
        said = "; ".join(one.text for one in troubles)
        raise ProblemError("unavailable", said, headers={"Retry-After": "2"})
    with service.reading() as connection:
        seen = witness_status(connection, service.clock.utc_us())
        issuers = known_issuers(connection)
        waiting = unsealed(connection, service.clock.utc_us())
        refused = refused_identities(connection, service.clock.utc_us() - DAY_US)
        unsigned = unsigned_orders(connection)
    status = service.writer.status()
    overdue = waiting.overdue(service.settings.root_interval_seconds)
    signer = service.signer
    signed = signer.status()._asdict() if signer is not None and signer.at_work else None
    workers = [worker for _, worker in service.fleet.listed(limit=LARGE, only_open=True)]
    return {
        "status": "degraded" if troubles else "ok",
        "troubles": [one._asdict() for one in troubles],
        "ledger": status._asdict(),
        "checkpoints": signed,
        "unsealed": waiting._asdict() | {"overdue": overdue},
        "witnesses": seen._asdict() | {"witnesses": [witness._asdict() for witness in seen.witnesses]},
        "row_walls": service.row_walls,
        "issuers": list(issuers.all),
        "refused_identities": [one._asdict() for one in refused],
        "received_leaves": service.ingest.stored_leaves,
        "sink_troubles": [f"{name}: {trouble.text}" for name, trouble in service.sinks.troubles()],
        "workers": len(workers),
        "not_guarding": list(not_guarding()),
        "orders_not_authenticated": list(service.fleet.own_ledgers()),
        "orders_authenticated": service.orders is not None,
        "orders_not_followed": list(map(str, unsigned)),
        "silent_workers": sorted({worker.worker for worker in workers if worker.state is WorkerState.SILENT}),
    }


def inbox(caller: CallerDep, desk: DeskDep, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """List your open tasks: approvals, consents, missed erasures, and what ends soon; the most urgent first."""
    items = [item.data() for item in desk.inbox_of(caller)]
    return page(desk, CursorBinding("listInbox", caller.name, {}), items, cursor, limit)
