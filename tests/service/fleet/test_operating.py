"""What those who run a fleet see and do: scans that find what was planted, quotas, capacity, webhooks, live custody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.kinds import ResidencyOpened
from kvcustody.audit.siem.sink import check_webhook
from kvcustody.audit.tlog.witness.status import UNWITNESSED
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.settings import Webhook
from standins.service.service_world import Worker, register, ship
from standins.sinks import WebhookReceiver
from standins.waiting import until

KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def worker(client, people) -> Worker:
    made = Worker()
    register(client, people["worker"], made)
    ship(client, people["worker"], made, made.batch([made.started(), *made.request("acme", blocks=3)]))
    return made


def scanned(client: Any, people: Any) -> dict[str, Any]:
    job = client("POST", "/v1/orphans/scans", people["operator"]).json()
    while (found := client("GET", f"/v1/jobs/{job['job']}", people["operator"]).json())["ended_us"] is None:
        time.sleep(0.01)
    assert found["state"] == "finished", found
    return found["result"]


def test_a_scan_finds_a_hole_once(client, people, worker) -> None:
    before = scanned(client, people)
    worker.sequence += 2  # two events that no batch ever had
    ship(client, people["worker"], worker, worker.batch(worker.request("acme")))
    first, two = scanned(client, people), scanned(client, people)
    assert (before["findings"], first["findings"], two["findings"]) == (0, 1, 0)
    assert two["scan"] == first["scan"] + 1 == before["scan"] + 2
    shown = client("GET", f"/v1/orphans/scans/{first['incarnation']}/{first['scan']}", people["auditor"]).json()
    assert shown["scan"]["mode"] == "ledger" and shown["scan"]["findings"] == 1
    [finding] = shown["findings"]
    assert finding["orphan"] == "ledger gap" and worker.incarnation in finding["cause"]
    listed = client("GET", "/v1/orphans/findings", people["auditor"]).json()["items"]
    assert finding in listed
    gone = client("GET", f"/v1/orphans/scans/{first['incarnation']}/99", people["auditor"])
    assert gone.status_code == 404


def test_findings_are_paged_newest_first_or_oldest_first(client, people, worker) -> None:
    for _ in range(3):
        worker.sequence += 2
        ship(client, people["worker"], worker, worker.batch(worker.request("acme")))
        scanned(client, people)

    def paged(order: str) -> list[dict[str, object]]:
        seen, cursor = [], ""
        while True:
            query = f"?limit=2&order={order}" + (f"&cursor={cursor}" if cursor else "")
            page = client("GET", f"/v1/orphans/findings{query}", people["auditor"]).json()
            seen += page["items"]
            cursor = page["next"]
            if cursor is None:
                return seen

    newest, oldest = paged("newest"), paged("oldest")
    assert len(newest) >= 3 and newest == oldest[::-1]
    assert [item["at_us"] for item in newest] == sorted((item["at_us"] for item in newest), reverse=True)
    unsaid = client("GET", "/v1/orphans/findings", people["auditor"]).json()["items"]
    assert unsaid == newest


def test_scans_are_paged_newest_first(client, people, worker) -> None:
    numbers = [scanned(client, people)["scan"] for _ in range(3)]
    seen, cursor = [], ""
    while True:
        query = f"?limit=2&cursor={cursor}" if cursor else "?limit=2"
        page = client("GET", f"/v1/orphans/scans{query}", people["operator"]).json()
        assert len(page["items"]) <= 2
        seen += [item["scan"] for item in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == sorted(seen, reverse=True) and seen[:3] == numbers[::-1] and len(seen) == len(set(seen))


def test_capacity_is_what_workers_say_and_quotas_what_tenants_hold(client, people, worker) -> None:
    said = {"blocks.total": 4096, "blocks.clean": 4000, "blocks.active": 96, "bytes_per_block": 8192}
    client("PUT", f"{worker.path}/status", people["worker"], json={"status": said})
    found = client("GET", "/v1/capacity", people["operator"]).json()
    [mine] = [item for item in found["items"] if item["worker"] == "worker"]
    assert mine["blocks"] == 4096 and mine["by_state"] == {"active": 96, "clean": 4000}
    assert found["blocks"] == sum(item["blocks"] for item in found["items"])
    before = _held(client, people)
    opened = worker.request("acme", blocks=5)[0]
    assert isinstance(opened, ResidencyOpened)
    ship(client, people["worker"], worker, worker.batch([opened]))
    assert _held(client, people) == before + 5


def test_health_says_how_far_witnesses_have_seen(client, people, worker) -> None:
    found = client("GET", "/v1/health", people["operator"]).json()["witnesses"]
    assert found["witnesses"] == [] and found["warning"] == UNWITNESSED


def test_what_no_checkpoint_covers_is_visible_and_a_fault_after_three_intervals(make_service, make_client) -> None:
    service = make_service(root_interval_seconds=3600.0)
    service.principals.enrol("olga", [Role.OPERATOR], by="test")
    key = service.principals.issue_key("olga", days=1, by="test").key
    client = make_client(service)
    health = client("GET", "/v1/health", key).json()
    assert health["status"] == "ok" and health["unsealed"]["leaves"] > 0 and health["unsealed"]["logs"] == 1
    assert health["unsealed"]["age_us"] > 0 and health["unsealed"]["overdue"] is False
    with service.engine.begin() as connection:  # nobody sealed for four hours
        connection.exec_driver_sql("UPDATE unsealed_heads SET grown_us = grown_us - 14400000000")
    health = client("GET", "/v1/health", key).json()
    assert health["status"] == "degraded" and health["unsealed"]["overdue"] is True
    lines = client("GET", "/metrics", key).text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if "_unsealed_" in line and not line.startswith("#"))
    assert float(figures["kvcustody_ledger_unsealed_age_seconds"]) > 14_000
    assert float(figures["kvcustody_ledger_unsealed_leaves"]) > 0
    assert service.writer.seal()
    health = client("GET", "/v1/health", key).json()
    assert health["status"] == "ok" and health["unsealed"]["age_us"] < 14_000_000_000


def _held(client: Any, people: Any) -> int:
    found = client("GET", "/v1/quotas?tenant=acme", people["operator"]).json()
    [row] = found["items"]
    assert row["cap"] is None and found["revision"] == 0, "no policy is active here"
    return int(row["held_blocks"])


def test_live_residencies_are_paged_without_hole_or_double(client, people, worker) -> None:
    opened = [worker.request("acme")[0] for _ in range(5)]
    ship(client, people["worker"], worker, worker.batch(opened))
    whole = client("GET", "/v1/custody/live?tenant=acme&limit=1000", people["auditor"]).json()["items"]
    assert len(whole) >= 5 and all(item["running"] and "user-1" not in item["subject"] for item in whole)
    seen, cursor = [], ""
    while cursor is not None:
        query = f"&cursor={cursor}" if cursor else ""
        path = f"/v1/custody/live?limit=2{query}"
        page = client("GET", path, people["tenant-viewer@acme"]).json()
        seen += page["items"]
        cursor = page["next"]
    assert seen == whole
    none = client("GET", "/v1/custody/live", people["tenant-viewer@labs"]).json()["items"]
    assert none == []


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as opened:
        yield opened


def test_a_webhook_is_sent_every_leaf_detached_attached_and_given_its_dead_again(
    make_service, make_client, make_people, receiver, tmp_path: Path
) -> None:
    key = tmp_path / "hook.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    service = make_service(webhooks=(Webhook(name="siem", url=receiver.url, key_path=key),))
    people, client = make_people(service), make_client(service)

    def status() -> dict[str, Any]:
        [found] = client("GET", "/v1/sinks", people["operator"]).json()["items"]
        return found

    until(lambda: status()["delivered"] > 0)
    headers, body = receiver.batches[0]
    signed = (headers[f"webhook-{part}"] for part in ("id", "timestamp", "signature"))
    check_webhook(KEY, *signed, body, now_seconds=int(time.time()))
    detached = client("POST", "/v1/sinks/siem/detach", people["operator"], json={"reason": "collector is down"})
    assert detached.json()["attached"] is False
    receiver.status = 400  # refuses for good: the batch is given up and kept
    assert client("POST", "/v1/sinks/siem/attach", people["operator"], json={}).json()["attached"] is True
    until(lambda: status()["dead"] > 0)
    refused = client("POST", "/v1/sinks/siem/retry", people["operator"], json={})
    assert refused.status_code == 503
    receiver.status = 200
    assert client("POST", "/v1/sinks/siem/retry", people["operator"], json={}).json()["dead"] == 0
    found = client("GET", "/v1/audit/events?kind=sink-changed", people["auditor"]).json()["items"]
    said = [(item["leaf"]["action"], item["leaf"]["actor"], item["leaf"]["reason"]) for item in found]
    assert said[:2] == [("detached", "operator", "collector is down"), ("attached", "operator", "")]
    assert client("POST", "/v1/sinks/none/detach", people["operator"], json={}).status_code == 404


def test_a_webhooks_key_that_others_read_is_refused(make_service, tmp_path: Path) -> None:
    from kvcustody.errors import ConfigError

    key = tmp_path / "hook.key"
    key.write_bytes(KEY)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        make_service(webhooks=(Webhook(name="siem", url="http://127.0.0.1:1/", key_path=key),))
