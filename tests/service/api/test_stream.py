"""The ledger as a stream: nothing twice, nothing missed, whatever the page size and whoever commits in between."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from sqlalchemy import select

from kvcustody.audit.siem.commit_order_reader import START, read_in_commit_order
from kvcustody.audit.store.schema.ledger import events, logs
from standins.service.service_world import Worker, register, ship


@pytest.fixture(scope="module")
def filled(service, people, client):
    worker = Worker()
    register(client, people["worker"], worker)
    ship(client, people["worker"], worker, worker.batch([worker.started()]))
    return service, people, client, worker


def more(client: Any, people: Any, worker: Worker, *tenants: str) -> None:
    made = [event for tenant in tenants for event in worker.request(tenant)]
    assert ship(client, people["worker"], worker, worker.batch(made)).status_code == 200


def places(items: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(item["log"], item["idx"]) for item in items]


def everything(service: Any, log: str | None = None) -> set[tuple[str, int]]:
    with service.reading() as connection:
        query = select(logs.c.name, events.c.idx).join(logs, logs.c.id == events.c.log)
        return {(row.name, row.idx) for row in connection.execute(query) if log in (None, row.name)}


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_every_leaf_is_given_once_while_others_commit(filled, limit: int) -> None:
    service, people, client, worker = filled
    more(client, people, worker, "acme", "labs", "acme")
    at, seen = START, []
    for step in range(10_000):
        assert service.writer.seal()
        with service.reading() as connection:
            page = read_in_commit_order(connection, at, limit=limit)
        assert len(page.rows) <= limit
        seen += [(row.log, row.idx) for row in page.rows]
        at = page.position
        if step in (1, 2):
            more(client, people, worker, "labs", "acme")
        if not page.rows and not page.more and step > 3:
            break
    assert len(seen) == len(set(seen)) and set(seen) == everything(service)
    for log in {log for log, _ in seen}:
        assert [idx for of, idx in seen if of == log] == sorted(idx for of, idx in seen if of == log)


def test_a_stream_goes_on_where_it_ended_and_shows_a_tenant_its_own(filled) -> None:
    service, people, client, worker = filled
    more(client, people, worker, "acme", "labs")
    who, path = people["tenant-viewer@acme"], "/v1/audit/stream?shape=leaf&limit=3"
    seen, cursor = [], ""
    for _ in range(50):
        page = client("GET", path + (f"&cursor={cursor}" if cursor else ""), who).json()
        seen += places(page["items"])
        cursor = page["next"]
        if not page["items"]:
            break
    assert set(seen) == everything(service, "tenant/acme") and len(seen) == len(set(seen))
    more(client, people, worker, "labs", "acme")
    page = client("GET", f"/v1/audit/stream?shape=leaf&limit=1000&cursor={cursor}", who).json()
    assert places(page["items"]) == sorted(everything(service, "tenant/acme") - set(seen))
    foreign = client("GET", f"/v1/audit/stream?cursor={cursor}", people["tenant-viewer@labs"])
    assert foreign.status_code == 400, "a cursor is its caller's own"


def test_shapes(filled) -> None:
    _, people, client, worker = filled
    more(client, people, worker, "acme")
    ask = "/v1/audit/stream?tenant=acme&shape="
    clouds = client("GET", ask + "cloudevents", people["dpo"]).json()["items"]
    assert {item["specversion"] for item in clouds} == {"1.0"} and clouds[0]["subject"] == "tenant/acme"
    assert all("class_uid" in item for item in client("GET", ask + "ocsf", people["dpo"]).json()["items"])
    assert client("GET", ask + "xml", people["dpo"]).status_code == 422


def test_only_what_comes_and_a_wait_that_ends_with_news(filled, make_client) -> None:
    service, people, client, worker = filled
    more(client, people, worker, "acme")
    who = people["tenant-viewer@acme"]
    first = client("GET", "/v1/audit/stream?begin=newest&shape=leaf", who).json()
    assert first["items"] == []
    other = make_client(service)

    def later() -> None:
        time.sleep(0.2)
        more(other, people, worker, "acme")

    thread = threading.Thread(target=later)
    thread.start()
    page = client("GET", f"/v1/audit/stream?wait=30&shape=leaf&cursor={first['next']}", who).json()
    thread.join()
    assert page["items"][0]["event"]["kind"] == "residency-opened"
