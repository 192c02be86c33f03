"""The engine-side agent: a real worker tells a real service how it is, and goes on telling it (control_plane.agent)."""

from __future__ import annotations

import os
import pytest
from control_plane_world import ControlPlane, ask, known, until

from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane import agent as agents


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVCUSTODY_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(agents, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(agents, "_WAIT_SECONDS_MAX", 0.1)
    monkeypatch.setattr(agents, "_WAIT_SECONDS", 0.05)


def test_a_workers_counters_revision_and_charges_are_known_there(plane: ControlPlane) -> None:
    with plane.worker() as worker, plane.connect("olive") as operator:
        life = worker.writer.incarnation
        assert ask(worker, "holder") == 0
        until(
            lambda: known(plane, life)["charged"] == {"holder": 4}, worker
        )  # and the partial block is CLEAN
        found = known(plane, life)
        said = found["status"]
        assert found["policy_revision"] == worker.governor.table.revision > 0
        assert (said["blocks.total"], said["blocks.cached"], said["bytes_per_block"]) == (128, 4, 1024)
        assert (said["running"], said["overdue"], said["overdue_seconds"], said["drift"]) == (0, 0, 0, 0)
        assert said["ledger.spilled_bytes"] == 0 and said["status_age_seconds"] >= 0
        assert said["requests"] == 1 and dict(worker.governor.stats().charged) == {"holder": 4}
        [quota] = operator.get("/v1/quotas", tenant="holder")["items"]
        assert quota["charged_blocks"] == 4
        [mine] = [row for row in operator.get("/v1/capacity")["items"] if row["worker"] == "gpu-0"]
        assert mine["blocks"] == 128 and mine["by_state"]["cached"] == 4
        text = operator.request("GET", "/metrics").text
        assert 'kvcustody_kv_cache_capacity_blocks{worker="gpu-0"} 128.0' in text


def test_an_engine_that_stands_still_is_heard_with_the_age_of_its_counters(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_SNAPSHOT_SECONDS", 0.02)
    with plane.worker() as worker:
        life = worker.writer.incarnation
        until(lambda: "blocks.total" in known(plane, life)["status"], worker)
        before = known(plane, life)

        def heard_again() -> bool:
            found = known(plane, life)
            older = found["status"]["status_age_seconds"] > before["status"]["status_age_seconds"]
            return bool(found["seen_us"] > before["seen_us"] and older)

        until(heard_again)  # without a step
        ask(worker, "holder")
        until(lambda: known(plane, life)["status"]["requests"] == 1, worker)  # control: with steps


def test_a_worker_that_is_told_nothing_waits_longer_each_time(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_WAIT_SECONDS_MAX", 60.0)
    made = agents.Agent(plane.connect("olive"), None, None, bytes_per_block=1)  # type: ignore[arg-type]
    away = ServiceError("away", problem="unreachable")
    waits = [made._refused(away) for _ in range(16)]
    # each is within a quarter of twice the one before, up to the bound
    for number, wait in enumerate(waits):
        meant = min(0.05 * 2**number, 60.0)
        assert 0.75 * meant <= wait <= 1.25 * meant
    assert made.problem == "away"
    slow = ServiceError("later", problem="too-many-requests", wait_seconds=300.0)
    assert made._refused(slow) >= 225.0
