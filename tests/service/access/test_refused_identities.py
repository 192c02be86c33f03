"""Refused credentials of the service, and what a worker's door hands in: counted, on record, and shown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import SystemClock
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages import health as health_page
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.service.service import Service
from kvcustody.integrations.identity.from_settings import open_attempts, open_request_gate
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from standins.service.control_plane_world import ControlPlane


def test_refused_credentials_are_counted_recorded_and_shown(client: Any, people: Any, service: Service) -> None:
    for key in ("kvc_wrong", None, "kvc_wrong"):
        assert client("GET", "/v1/health", key).status_code == 401
    metrics = client("GET", "/metrics", people["operator"]).text
    assert 'kvcustody_credentials_refused_total{reason="invalid"} 2.0' in metrics
    assert 'kvcustody_credentials_refused_total{reason="missing"} 1.0' in metrics
    path = "/v1/audit/events?kind=attempts-refused"
    assert client("GET", path, people["auditor"]).json()["items"] == [], "not each by itself"
    service.attempts.flush()
    service.writer.flush()
    leaves = [item["leaf"] for item in client("GET", path, people["auditor"]).json()["items"]]
    assert {(leaf["place"], leaf["reason"], leaf["attempts"]) for leaf in leaves} == {
        ("service", "invalid", 2),
        ("service", "missing", 1),
    }
    assert "kvc_wrong" not in str(leaves)


def test_what_a_door_refused_goes_on_record_as_its_workers(client: Any, people: Any, service: Service) -> None:
    items = [{"reason": "invalid", "source": "203.0.113.0/24", "attempts": 17}]
    report = {"seconds": 60, "items": items}
    for name in ("auditor", "operator", "tenant-admin@acme"):
        assert client("POST", "/v1/worker/attempts", people[name], json=report).status_code == 403
    assert client("POST", "/v1/worker/attempts", people["worker"], json=report).status_code == 200
    for wrong in ({"reason": "because"}, {"source": "<b>"}, {"source": "somebody"}, {"attempts": 0}):
        body = {"seconds": 60, "items": [items[0] | wrong]}
        assert client("POST", "/v1/worker/attempts", people["worker"], json=body).status_code == 422, wrong
    service.writer.flush()
    shown = client("GET", "/v1/health", people["operator"]).json()["refused_identities"]
    (found,) = [item for item in shown if item["place"] == "door"]
    assert (found["of_worker"], found["reason"], found["attempts"], found["sources"]) == (
        "worker",
        "invalid",
        17,
        1,
    )
    caller = service.authenticator.caller(f"Bearer {people['operator']}", None, "test")
    page = health_page.show(PageRequest(service, caller, "/console/health", {}, {}, {}, None))
    assert "door of worker" in bytes(page.body).decode()


IDENTITY = "schema: kvcustody/identity@1\napi_keys: {path: keys.yaml}\n"


def knock(door: IdentityMiddleware, path: str, key: str | None) -> int:
    """One request to a door; the status of its answer."""
    sent: list[Any] = []
    headers = [(b"content-length", b"0")] + ([(b"authorization", f"Bearer {key}".encode())] if key else [])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "client": ("203.0.113.7", 1)}
    asyncio.run(door(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.system("refusals at a worker's door stay with the worker")
def test_a_door_behind_a_control_plane_hands_its_refusals_over(plane: ControlPlane, tmp_path: Path) -> None:
    """From the request that is refused at the door to the leaf in the ledger that the control plane writes."""
    (tmp_path / "identity.yaml").write_text(IDENTITY)
    known = add_key(tmp_path / "keys.yaml", {"name": "holder-ci", "tenant": "holder"})
    settings = plane.settings(identity_path=tmp_path / "identity.yaml", scope_token_key_path=tmp_path / "scope.key")

    async def engine(*_: Any) -> None:
        raise AssertionError("a request that is refused reached the engine")

    reporter = open_attempts(settings, SystemClock())
    door = IdentityMiddleware(engine, open_request_gate(settings), refused=reporter.note)
    asked = [
        ("/v1/models", None),
        ("/v1/models", "wrong"),
        ("/metrics", known),
        ("/v1/responses/resp_x", known),
    ]
    assert [knock(door, *one) for one in asked] == [401, 401, 403, 404]
    service = plane._service
    assert service is not None

    def leaves() -> set[tuple[str, str, str, int]]:
        assert service is not None and service.writer.flush()
        with plane.connect("dora") as officer:
            found = officer.get("/v1/audit/events", kind="attempts-refused")["items"]
        bodies = [item["leaf"] for item in found]
        return {(body["of_worker"], body["place"], body["reason"], body["attempts"]) for body in bodies}

    assert leaves() == set(), "control: before the window ends nothing is handed over"
    reporter.close()
    reasons = ("missing", "invalid", "not-served", "not-found")
    assert leaves() == {("gpu-0", "door", reason, 1) for reason in reasons}
