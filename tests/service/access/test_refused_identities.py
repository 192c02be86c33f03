"""Refused credentials of the service, and what a worker's door hands in: counted, on record, and shown."""

from __future__ import annotations

from typing import Any

from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages import health as health_page
from kvcustody.governance.service.service import Service


def test_refused_credentials_are_counted_recorded_and_shown(
    client: Any, people: Any, service: Service
) -> None:
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


def test_what_a_door_refused_goes_on_record_as_its_workers(
    client: Any, people: Any, service: Service
) -> None:
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
