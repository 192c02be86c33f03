"""Every page, and every answer of the API, says what of the ledger is replayed or generated.

Pages are those of the application's own table: a new one is asked here, and fails until it says so.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcustody.audit.kinds import GENERATED, ResidencyOpened, WorkerStarted, WorkerStopped
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.console.web.app import _PAGES as PAGES
from kvcustody.console.web.rendering import environment
from standins.console.web_world import World, running

pytestmark = pytest.mark.system

SAID = "Demo data: this ledger holds traffic"
PEOPLE = ("auditor", "approver", "operator", "key-custodian", "dpo", "tenant-admin@acme")
WHOLE = {
    "bare.html",
    "base.html",
    "login.html",
    "parts.html",
    "policy_parts.html",
}  # what a page is made of, and pages before the sign-in


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("marked")
    shutil.copy(migrated, folder / "ledger.db")
    with running(folder) as opened:
        opened.release()
        yield opened


def signed_in(world: World, name: str) -> httpx.Client:
    client = httpx.Client(base_url=world.url, timeout=30)
    assert client.post("/console/login", data={"key": world.keys[name]}).status_code == 303
    return client


def generate(world: World) -> str:
    """A replay into the ledger that the service has open; its incarnation."""
    engine, clock = open_store(world.database_url), SystemClock()
    writer = EventWriter(engine, worker="replay", clock=clock, spill_directory=world.folder / "spill")
    now_us = clock.now_us()
    runs: tuple[Any, ...] = ()
    opened = ResidencyOpened(now_us, 1, "acme", None, None, False, "internal", (), runs, ("own",), 1, now_us + 10**9)
    writer.submit(
        [
            WorkerStarted(now_us, "replay", 8, 1, 64, "cpu", "test", origin=GENERATED),
            opened,
            WorkerStopped(now_us + 1, "replay", "end", 0, (0,)),
        ]
    )
    writer.close()
    engine.dispose()
    return writer.incarnation


def pages(world: World) -> dict[str, str]:
    """The text of every page that can be looked at, as the first of the people who may."""
    people = {name: signed_in(world, name) for name in PEOPLE}
    call = httpx.Client(base_url=world.url, headers={"Authorization": f"Bearer {world.keys['dpo']}"}, timeout=30)
    asked = {"tenant": "acme", "subject": "user-1", "deadline_seconds": 60}
    erasure = call.post("/v1/erasures", json=asked, headers={"Idempotency-Key": str(time.time_ns())})
    assert erasure.status_code < 300, erasure.text
    request = {"tenant": "acme", "subject": "user-1", "right": "access", "channel": "mail"}
    case = call.post("/v1/cases", json=request, headers={"Idempotency-Key": str(time.time_ns())})
    assert case.status_code < 300, case.text
    report = httpx.post(
        world.url + "/v1/reports",
        json={"framework": "gdpr"},
        headers={"Authorization": f"Bearer {world.keys['auditor']}", "Idempotency-Key": str(time.time_ns())},
    )
    assert report.status_code < 300, report.text
    job = report.json()["job"]
    until = time.monotonic() + 60
    while people["auditor"].get(f"/v1/jobs/{job}").json()["state"] in ("waiting", "running"):
        assert time.monotonic() < until
        time.sleep(0.1)
    places = {
        "/cases/{case}": f"/cases/{case.json()['case_id']}",
        "/erasures/{erasure}": f"/erasures/{erasure.json()['erasure']}",
        "/erasures/{erasure}/{file}": f"/erasures/{erasure.json()['erasure']}/certificate.html",
        "/policy/{revision}": "/policy/1",
        "/reports/{job}": f"/reports/{job}",
        "/reports/{job}/{file}": f"/reports/{job}/report.html",
        "/audit/export/{form}": "/audit/export/csv",
        "/audit/event": "/audit/event?log=system&idx=0",
        "/custody/subject": "/custody/subject?tenant=acme&subject=user-1",
        "/decisions/rule": "/decisions/rule?id=no-restricted&revision=1",
    }
    texts = {}
    for method, path, _ in PAGES:
        if method != "GET":
            continue
        answers = [client.get("/console" + places.get(path, path)) for client in people.values()]
        right = [answer for answer in answers if answer.status_code == 200]
        assert right, (path, [answer.status_code for answer in answers])
        texts[path] = right[0].text + right[0].headers.get("kvcustody-history", "")  # of a file, beside it
    texts["problem"] = people["auditor"].get("/console/nothing").text
    for client in (*people.values(), call):
        client.close()
    return texts


def test_every_page_says_it_and_none_before(world: World) -> None:
    """Control: no page of the same ledger says it before anything is generated."""
    assert [path for path, text in pages(world).items() if SAID in text] == []
    incarnation = generate(world)
    time.sleep(1.1)  # what is known of processes is a second old at most
    said = pages(world)
    assert [path for path, text in said.items() if SAID not in text] == []
    assert f"replay {incarnation[:12]}" in said["/"]
    with closing(signed_in(world, "auditor")) as client:
        rows = client.get("/console/audit", params={"incarnation": incarnation, "tenant": "acme"}).text
        assert f">{GENERATED}<" in rows
    with closing(signed_in(world, "operator")) as client:
        assert f">{GENERATED}<" in client.get("/console/health").text
        origins = {run["incarnation"]: run["origin"] for run in client.get("/v1/workers").json()["items"]}
        assert origins.pop(incarnation) == GENERATED and set(origins.values()) == {""}
        assert client.get("/v1/health").headers["kvcustody-history"].startswith(SAID)


def test_every_template_is_of_the_page_that_says_it() -> None:
    """What forms answer is made of the same page."""
    for name in environment.list_templates():
        source = environment.loader.get_source(environment, name)[0]  # type: ignore[union-attr]
        if name.rpartition("/")[2] not in WHOLE:
            assert source.startswith('{% extends "base.html" %}'), name
    assert "{{ history }}" in environment.loader.get_source(environment, "base.html")[0]  # type: ignore[union-attr]
