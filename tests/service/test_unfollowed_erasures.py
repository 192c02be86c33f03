"""An erasure's order that no trusted key signed: every list says that nobody follows it, and none counts it as open."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvcustody.audit.evidence.erasure.erasure_state import ErasureState
from kvcustody.audit.kinds import ErasureRequested
from kvcustody.audit.store.database.signed_orders import SignedOrders, authenticate
from kvcustody.console.web.app import Console
from kvcustody.governance.service.service import Service
from standins.erasure.signing import orders
from standins.service.service_world import Worker, register, ship

WHY = "it is not signed"


@pytest.fixture
def unsigned(service: Service, client: Any, people: Any) -> str:
    """An order of a service that asks nobody for signatures, to a worker that has not answered."""
    worker = Worker()
    assert register(client, people["worker"], worker).status_code == 200
    made = [worker.started(), *worker.request("acme")]
    assert ship(client, people["worker"], worker, worker.batch(made)).status_code == 200
    asked = client("POST", "/v1/erasures", people["dpo"], json={"tenant": "acme", "subject": "user-1"})
    assert asked.status_code == 202, asked.text
    return str(asked.json()["erasure"])


@contextmanager
def believing(service: Service, signed: SignedOrders) -> Iterator[None]:
    for store in (service.engine, service.reader):
        authenticate(store, signed)
    try:
        yield
    finally:
        for store in (service.engine, service.reader):
            authenticate(store, None)


def said(service: Service, client: Any, people: Any, make_client: Any, erasure: str) -> dict[str, Any]:
    """How each place says that this erasure stands."""
    places: dict[str, Any] = {}
    for who in ("dpo", "tenant-admin@acme"):
        listed = client("GET", "/v1/erasures", people[who]).json()["items"]
        [one] = [item for item in listed if item["erasure"] == erasure]
        shown = client("GET", f"/v1/erasures/{erasure}", people[who]).json()
        places[who] = {(item["state"], item["why"]) for item in (one, shown)}
    pages = make_client(service, pages=Console(service))
    begun = pages("POST", "/v1/session", people["dpo"], headers={"Idempotency-Key": uuid.uuid4().hex})
    session = {"Cookie": begun.headers["set-cookie"].split(";")[0]}
    for page in ("", f"/{erasure}"):
        answer = pages("GET", f"/console/erasures{page}", headers=session)
        assert answer.status_code == 200 and erasure[:12] in answer.text
        places["page of one" if page else "page"] = f"not followed</span> {WHY}" in answer.text
    items = client("GET", "/v1/inbox", people["dpo"]).json()["items"]
    places["inbox"] = [item["text"] for item in items if item["about"] == erasure]
    counted = service.inbox().erasures
    places["open"], places["counted"] = counted[ErasureState.OPEN], counted[ErasureState.NOT_FOLLOWED]
    return places


def test_an_order_that_nobody_follows_is_said_to_be_that(
    service: Service, client: Any, people: Any, make_client: Any, unsigned: str
) -> None:
    """Control: the same order is open where orders are not authenticated."""
    before = said(service, client, people, make_client, unsigned)
    assert before["dpo"] == before["tenant-admin@acme"] == {("open", "")}
    assert (before["open"], before["counted"], before["inbox"]) == (1, 0, [])
    assert not before["page"] and not before["page of one"]
    with believing(service, orders()):
        after = said(service, client, people, make_client, unsigned)
    [(state, why)] = after["dpo"]
    assert state == "not-followed" and why.startswith(WHY) and after["tenant-admin@acme"] == after["dpo"]
    assert (after["open"], after["counted"]) == (0, 1)
    assert after["page"] and after["page of one"]
    assert len(after["inbox"]) == 1 and f"is not followed: {WHY}" in after["inbox"][0]


@pytest.mark.parametrize("deadline_us", [1 << 62, -(1 << 62)])
def test_a_deadline_that_no_answer_holds_ends_no_list(
    service: Service, client: Any, people: Any, deadline_us: int
) -> None:
    """As whoever writes the ledger may set one. Control: the erasure is in the list."""
    erasure = uuid.uuid4().hex
    service.record(ErasureRequested(1, erasure, "acme", "tenant", None, None, deadline_us, "dpo"))
    listed = client("GET", "/v1/erasures?limit=1000", people["dpo"])
    assert listed.status_code == 200, listed.text
    assert erasure in [item["erasure"] for item in listed.json()["items"]]
    assert client("GET", f"/v1/erasures/{erasure}", people["dpo"]).status_code == 200
