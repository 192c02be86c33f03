"""Pages and forms of operators and officers at a real service, asked without a browser."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvcustody.audit.evidence.erasure.requests_and_answers import request, requests
from kvcustody.governance.api.models.erasures import ErasureRequest
from kvcustody.governance.erasure.selector import selector_from
from kvcustody.governance.observability.serving_measures import ServingMeasures
from kvcustody.governance.service.access.principal_table import KeySource
from standins.console.page_tables import rows_of
from standins.console.web_world import World

SignIn = Callable[[str], httpx.Client]


@pytest.fixture
def client(visitor: SignIn) -> SignIn:
    return visitor


def _of_worker(person: httpx.Client) -> list[list[str]]:
    return [row for row in rows_of(person.get("/console/health").text, "Workers") if row[0] == "worker"]


def test_the_workers_page_shows_what_a_worker_says_of_itself(world: World, client: SignIn) -> None:
    operator = client("operator")
    [silent] = _of_worker(operator)
    assert silent[3:7] == ["–"] * 4, "control: it has said nothing"
    said = {"blocks.total": 4096.0, "blocks.active": 90.0, "blocks.cached": 1000.0, "running": 3.0}
    status = said | {"overdue": 2.0, "drift": 5.0}
    world.service.fleet.heard("worker", world.worker.incarnation, revision=7, status=status)
    [row] = _of_worker(operator)
    assert row[3:8] == ["3", "1,090 of 4,096", "2", "5", "7"]


def test_the_health_page_shows_how_a_worker_serves(world: World, client: SignIn) -> None:
    operator = client("operator")
    measures = ServingMeasures(16)
    for hit in (0, 0, 512):
        measures.first_token(1000 - hit, hit, 300_000, 200_000)
    measures.began(32, 5_000_000, 40_000)
    status = {"prompt_tokens": 3000.0, "hit_tokens": 750.0, "recomputed": 8.0}
    status |= {"advised_blocks": 96.0, "fragmentation": 0.05}
    world.service.fleet.heard("worker", world.worker.incarnation, status=status | measures.figures())
    [row] = [row for row in rows_of(operator.get("/console/health").text, "Serving") if row[0] == "worker"]
    assert row[1:5] == ["25%", "500 ms", "500 ms", "50 ms"] and row[7:10] == ["8", "96", "5%"]
    world.service.fleet.heard("worker", world.worker.incarnation, status={})
    assert "Serving, since" not in operator.get("/console/health").text


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        ({}, ["nowhere", "–", "–", "–"]),
        (
            {"events_connected.socket": 1.0, "events_told_blocks.socket": 7.0, "events_sent.socket": 3.0},
            ["its own socket", "7", "3", "0"],
        ),
        ({"events_connected.socket": 1.0}, ["its own socket", "–", "0", "0"]),
        (
            {"events_connected.nats": 0.0, "events_told_blocks.nats": 2.0, "events_lost.nats": 5.0},
            ["the stream in NATS away", "2", "0", "5"],
        ),
    ],
)
def test_the_fleet_page_shows_where_workers_tell_of_their_blocks(
    world: World, client: SignIn, events: dict[str, float], shown: list[str]
) -> None:
    said = {"blocks.total": 4096.0, "blocks.active": 90.0, "blocks.cached": 1000.0, "running": 3.0}
    world.service.fleet.heard("worker", world.worker.incarnation, status=said | events)
    page = client("operator").get("/console/fleet").text
    [row] = [row for row in rows_of(page, "Workers") if row[0] == "worker"]
    assert row[3:] == [*shown, "3", "1,090 of 4,096"]
    assert ["worker", "90", "1,000", "3,006"] in rows_of(page, "Blocks by worker")
    assert client("tenant-viewer@acme").get("/console/fleet").status_code == 403


def test_an_operator_asks_a_worker_for_a_scan(world: World, client: SignIn) -> None:
    world.service.fleet.heard("worker", world.worker.incarnation, revision=7, status={"running": 3.0})
    operator, auditor = client("operator"), client("auditor")
    button = re.compile(r'name="csrf" value="(\w+)"><input type="hidden" name="worker" value="worker"')
    assert button.search(auditor.get("/console/health").text) is None, "an auditor looks on"
    [token] = button.findall(operator.get("/console/health").text)
    asked = {"csrf": token, "worker": "worker"}
    for person, form, status in (
        (auditor, asked, 403),
        (operator, {"worker": "worker"}, 403),
        (operator, asked, 303),
    ):
        assert person.post("/console/health/scan", data=form).status_code == status
    assert operator.post("/console/health/scan", data=asked).status_code == 303, "once more, while it waits"
    refused = operator.post("/console/health/scan", data=asked | {"worker": "nobody"})
    assert refused.status_code == 404 and "No scan of nobody:" in refused.text
    assert "Scans of workers" in refused.text, "on the page that has the form"
    page = auditor.get("/console/health").text
    [row] = rows_of(page, "Scans of workers")
    assert row[:3] == ["worker", "waiting", "operator"] and row[5:] == ["–", "–"]
    assert button.search(operator.get("/console/health").text) is None, "what is asked for has no button"
    [order] = world.service.scans.orders.owed("worker")
    world.service.scans.orders.answer("worker", order.order, world.worker.incarnation, scan=None, reason="X")
    [row] = rows_of(operator.get("/console/health").text, "Scans of workers")
    assert row[1] == "failed X"


def test_a_custodian_keeps_a_key_that_its_principal_made(world: World, client: SignIn) -> None:
    """Whoever made it has no button for it, and is refused; a key that stands alone has none either."""
    book, prefix = world.service.principals, world.keys["auditor"].split("_")[1]
    own_prefix = book.issue_key("auditor", days=1, source=KeySource(prefix, None), by="auditor").prefix
    custodian, place = client("key-custodian"), "/console/principals?name=auditor"
    page = custodian.get(place).text
    assert f"Keep {own_prefix}" in page and f"Keep {prefix}" not in page
    form = {**_hidden(page.partition(f"Keep {own_prefix}")[0]), "name": "auditor", "prefix": own_prefix}
    assert client("auditor").post("/console/principals/keep", data=form).status_code == 403
    assert custodian.post("/console/principals/keep", data=form | {"csrf": "0"}).status_code == 403
    assert custodian.post("/console/principals/keep", data=form).status_code == 303
    assert f"Keep {own_prefix}" not in custodian.get(place).text
    assert {key.prefix: key.made_with for key in book.keys("auditor")}[own_prefix] is None


MODEL = "5f" * 32


def _hidden(page: str) -> dict[str, str]:
    """The fields that the last form of a page sends by itself."""
    form = page.rpartition("<form")[2]
    found = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form)
    return {name: html.unescape(value) for name, value in found}


def _preview(person: httpx.Client, **parts: str) -> httpx.Response:
    [token, *_] = re.findall(r'name="csrf" value="(\w+)"', person.get("/console/erasures").text)
    return person.post("/console/erasures/preview", data={"csrf": token, **parts})


def _held(world: World, who: str, **by: str) -> list[dict[str, Any]]:
    """Live residencies as the API lists them."""
    asked = {"Authorization": f"Bearer {world.keys[who]}"}
    items = httpx.get(f"{world.url}/v1/custody/live", params={"limit": 1000}, headers=asked).json()["items"]
    return [item for item in items if all(item[name] == value for name, value in by.items())]


def _asked(world: World) -> int:
    with world.service.reading() as connection:
        return len(requests(connection))


def test_the_form_takes_every_part_of_a_selector(world: World, client: SignIn) -> None:
    form = client("dpo").get("/console/erasures").text.rpartition("<form")[2]
    assert set(re.findall(r'name="(\w+)"', form)) == set(ErasureRequest.model_fields) | {"csrf"}
    own = client("tenant-admin@acme").get("/console/erasures").text.rpartition("<form")[2]
    assert 'name="tenant"' not in own, "the credential says whose"


def test_what_an_erasure_would_cover_is_shown_before_it_is_asked_for(world: World, client: SignIn) -> None:
    officer, before = client("dpo"), _asked(world)
    held = _held(world, "dpo", tenant="acme")
    running = sum(item["running"] for item in held)
    page = _preview(officer, tenant="acme").text
    table = "Live residencies that it would cover"
    assert rows_of(page, table) == [["acme", "internal", str(len(held)), str(running)]] and len(held) > 3
    assert "at most" not in page and "worker" in page
    [subject] = {item["subject"] for item in held[:1]}
    of_one = sum(item["subject"] == subject for item in held)
    [name] = [f"user-{n}" for n in range(5) if subject in world.service.names_of("acme", f"user-{n}")]
    narrow = rows_of(_preview(officer, tenant="acme", subject=name).text, table)
    assert narrow == [["acme", "internal", str(of_one), narrow[0][3]]] and of_one < len(held)
    assert "Nothing live" in _preview(officer, tenant="acme", classification="restricted").text
    wide = _preview(officer, tenant="acme", model=MODEL, key_epoch="3", labels="region=eu").text
    assert f"at most {len(held)} residencies" in wide and "key epoch, labels, model of a residency" in wide
    assert rows_of(_preview(client("tenant-admin@acme")).text, table) == rows_of(page, table)
    assert _preview(client("tenant-admin@acme"), tenant="labs").status_code == 404
    assert _preview(client("auditor"), tenant="acme").status_code == 403
    for wrong in ({"model": "5f"}, {"labels": "region"}, {"labels": "a=b,a=c"}, {"subject": "ada"}, {}):
        assert _preview(officer, **wrong).status_code in (400, 422), wrong
    assert _asked(world) == before, "seeing erases nothing"


def test_a_selector_of_every_part_is_asked_for_once(world: World, client: SignIn) -> None:
    officer = client("dpo")
    parts = {
        "tenant": "acme",
        "subject": "user-1",
        "session": "s-1",
        "classification": "internal",
        "segment": "g",
    }
    parts |= {"model": MODEL, "key_epoch": "3", "labels": "region=eu, purpose=help", "deadline_seconds": "60"}
    form = _hidden(_preview(officer, **parts).text)
    assert officer.post("/console/erasures", data=form | {"sure": "acme"}).status_code == 422, "not its name"
    places = [officer.post("/console/erasures", data=form | {"sure": "s-1"}).headers["location"] for _ in range(2)]
    assert places[0] == places[1], "a double click asks once"
    fresh = _hidden(_preview(officer, **parts).text)  # control: a form opened anew asks anew
    assert officer.post("/console/erasures", data=fresh | {"sure": "s-1"}).headers["location"] != places[0]
    with world.service.reading() as connection:
        asked = request(connection, places[0].rpartition("/")[2])
    selector = selector_from(asked.detail)
    assert (selector.model, selector.key_epoch, selector.segment) == (bytes.fromhex(MODEL), 3, "g")
    assert dict(selector.labels) == {"region": "eu", "purpose": "help"} and selector.classification == "internal"
    assert asked.tenant == "acme" and asked.subject and asked.session and asked.selector == "domain"
    assert asked.deadline_us - asked.at_us == 60_000_000
