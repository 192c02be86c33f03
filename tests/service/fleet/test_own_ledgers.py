"""Workers that write their ledger themselves: start and health say that nobody checks who gave their orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.audit.evidence.processes.orders import ALL_AUTHENTICATED, NOT_AUTHENTICATED, orders_followed
from kvcustody.audit.kinds import WorkerStarted
from kvcustody.audit.kinds.control_events import FROM_CONTROL_PLANE, SIGNED
from kvcustody.clock import SystemClock
from kvcustody.governance.service.service import Service
from kvcustody.governance.settings import load_settings
from kvcustody.governance.worker.worker import MemoryPlan, open_worker
from standins import builders
from standins.service.control_plane_world import APART
from standins.service.service_world import Worker, register, ship

SAYS = "orders are not authenticated"


def test_health_names_who_writes_the_ledger_without_the_control_plane(
    service: Service, client: Any, people: Any, tmp_path: Path
) -> None:
    behind = Worker("worker")
    register(client, people["worker"], behind)
    assert ship(client, people["worker"], behind, behind.batch([behind.started()])).status_code == 200

    def named() -> list[str]:
        return list(client("GET", "/v1/health", people["operator"]).json()["orders_not_authenticated"])

    assert named() == [], "control: the worker behind the control plane writes no order"
    writer = builders.writer(service.engine, tmp_path / "spill", worker="own", clock=SystemClock())
    writer.submit([WorkerStarted(SystemClock().now_us(), "own", 10, 1, 4096, "cpu", "test")])
    assert writer.flush()
    assert named() == ["own"]
    writer.close()
    writer = builders.writer(service.engine, tmp_path / "second", worker="own", clock=SystemClock())
    started = WorkerStarted(SystemClock().now_us(), "own", 10, 1, 4096, "cpu", "test")
    writer.submit([started._replace(orders=SIGNED)])
    assert writer.flush()
    assert named() == [], "its successor follows signed orders alone, and says so"
    writer.close()


def test_a_worker_with_a_ledger_of_its_own_says_so_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(APART)
    settings = load_settings(
        **builders.worker_files(tmp_path),
    )
    clock = SystemClock()
    plan = MemoryPlan(lambda blocks: UnbackedMemory(blocks, 1, clock=clock), 128, 1, 1024)
    with structlog.testing.capture_logs() as said:
        open_worker(settings, plan, clock=clock).close()
    assert [line["why"] for line in said if line["event"] == SAYS]


def test_a_report_says_whether_every_worker_states_whose_orders_it_follows() -> None:
    """`test_reperformance` derives the same of whole ledgers."""
    started = {"kind": "worker-started"}
    said = [started | {"orders": orders} for orders in (SIGNED, FROM_CONTROL_PLANE)]
    assert orders_followed(said) == ALL_AUTHENTICATED
    assert orders_followed([*said, started]) == orders_followed([]) == NOT_AUTHENTICATED
