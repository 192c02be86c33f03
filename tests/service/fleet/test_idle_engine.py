"""Every order of a control plane reaches an engine that sleeps, over the API and by the command that waits for it.

Nobody steps the engine while a test waits: what it does, it was woken for.

The control is in `release/test_idle_engine.py`: what nothing wakes carries nothing out.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from kvcustody.governance.control_plane import agent, erasures
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.release import worker_follow as feed
from kvcustody.governance.service.access.roles import Role
from standins.release.idle_engine import IdleEngine
from standins.service.control_plane_world import APART, MODEL, READS, ControlPlane, known, until

HOLDER = tenant_owner("idp", "holder")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVCUSTODY_"):
            monkeypatch.delenv(name)
    for module in (agent, erasures, feed):  # questions that are held open end with the connection
        monkeypatch.setattr(module, "_END_SECONDS", 0.05)


@pytest.fixture
def idle(plane: ControlPlane) -> Iterator[IdleEngine]:
    with IdleEngine(plane.settings(monitoring="allowed"), MODEL) as engine:
        yield engine


def test_an_erasure(plane: ControlPlane, idle: IdleEngine) -> None:
    with plane.connect("dora") as officer:
        asked = officer.post("/v1/erasures", {"tenant": "holder"})["erasure"]
        until(lambda: officer.get(f"/v1/erasures/{asked}")["outcome"] == "complete")


@pytest.mark.system("an engine that sleeps carries out no scan")
def test_a_scan_by_the_command_that_waits(plane: ControlPlane, idle: IdleEngine) -> None:
    command = plane.command("olive", "scan", "worker", "gpu-0", "--wait", "--json")
    done = subprocess.run(command, capture_output=True, timeout=90, check=True)
    found: dict[str, Any] = orjson.loads(done.stdout)
    assert (found["outcome"], found["incarnation"]) == ("scanned", idle.worker.writer.incarnation)


def test_a_narrowing_and_a_widening(plane: ControlPlane, idle: IdleEngine) -> None:
    for document in (APART, READS):
        revision = plane.release(document)
        until(lambda revision=revision: idle.port.table.revision == revision)


def test_a_rotation_and_a_destruction_of_keys(plane: ControlPlane, idle: IdleEngine) -> None:
    service = plane._service
    assert service is not None
    service.principals.enrol("carl", [Role.KEY_CUSTODIAN], by="test")
    key = service.principals.issue_key("carl", days=1, by="test").key
    keyring = idle.port._keyring
    before = max(keyring.epochs(HOLDER))
    with ControlPlaneConnection(plane.address, key) as custodian:
        for at, action in enumerate(("rotate", "destroy"), 1):
            body = {"tenant": "holder", "reason": "test"}
            custodian.post(f"/v1/keys/tenants:{action}", body)
            until(lambda at=at: max(keyring.epochs(HOLDER)) == before + at)
        until(lambda: keyring.epochs(HOLDER) == (before + 2,))  # the new one comes first, then the others go


def test_for_whom_it_enforces(plane: ControlPlane, idle: IdleEngine) -> None:
    service = plane._service
    assert service is not None
    service.principals.enrol("gail", [Role.APPROVER], by="test")
    key = service.principals.issue_key("gail", days=1, by="test").key
    place = "/v1/policies/enforcement"
    with ControlPlaneConnection(plane.address, key) as approver:
        until_us = service.clock.utc_us() + 3_600_000_000
        body: dict[str, Any] = {"reason": "test", "until_us": until_us}
        approver.post(f"{place}:order", body | {"mode": "monitor"})
        until(lambda: idle.port.enforcement.mode == "monitor")
        until(lambda: [one["mode"] for one in approver.get(place)["workers"]] == ["monitor"])
        assert [one["mode"] for one in approver.get("/v1/policies/in-effect")["monitoring"]] == ["monitor"]
        canary = body | {"mode": "canary", "tenants": ["holder"], "share": "2.5%"}
        order = approver.post(f"{place}:order", canary)
        until(lambda: idle.port.enforcement.mode == "canary")
        assert idle.port.enforcement.order == order["order"] and idle.port.enforcement.actor == "gail"
        approver.post(f"{place}:enforce", {"reason": "test"})
        until(lambda: idle.port.enforcement.mode == "enforce")
        until(lambda: approver.get("/v1/policies/in-effect")["monitoring"] == [])
        periods = approver.get(place)["periods"]
        assert [(one["worker"], one["mode"]) for one in periods] == [
            ("gpu-0", "monitor"),
            ("gpu-0", "canary"),
        ]
        assert periods[0]["until_us"] == periods[1]["from_us"] < periods[1]["until_us"]


def test_its_counters_are_fresh(plane: ControlPlane, idle: IdleEngine) -> None:
    life = idle.worker.writer.incarnation
    until(lambda: "status_age_seconds" in known(plane, life)["status"])
    assert known(plane, life)["status"]["status_age_seconds"] < agent.REPORT_SECONDS
    allocated = idle.port.pool.next_generation - 1
    until(lambda: known(plane, life)["status"]["allocated"] == allocated)


def test_last_of_all_a_revocation(plane: ControlPlane, idle: IdleEngine) -> None:
    """It is for good, so no test of this file may follow."""
    assert "reads" not in idle.port.revoked
    plane.revoke("reads")
    until(lambda: "reads" in idle.port.revoked)
