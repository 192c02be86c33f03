"""The audit explorer: the newest first, what there is and when, exports, a live view that is one read, keys."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from kvcustody.audit.evidence.query.events import EventFilter, every_event
from kvcustody.governance.service.live_reads import PERIOD_US, LiveReads
from kvcustody.times import HOUR_US
from standins.console.web_world import World

Client = Callable[[str], httpx.Client]


def listed(text: str) -> list[tuple[str, int]]:
    """The leaves on a page, in its order."""
    found = re.findall(r"/console/audit/event\?log=([^&\"]+)&amp;idx=(\d+)\">", text)
    return [(log.replace("%2F", "/"), int(idx)) for log, idx in found]


@pytest.fixture
def signed(world: World) -> Client:
    def make(name: str) -> httpx.Client:
        client = httpx.Client(base_url=world.url, follow_redirects=False)
        form = {"key": world.keys[name], "next": "/console/"}
        assert client.post("/console/login", data=form, headers={"origin": world.url}).status_code == 303
        return client

    return make


def recorded(world: World, operation: str) -> int:
    world.service.writer.flush()
    with world.service.reading() as connection:
        rows = list(every_event(connection, EventFilter(kinds=("access",))))
    return sum(row.body["operation"] == operation for row in rows)


def test_the_newest_are_first_and_pages_go_on(world: World, signed: Client) -> None:
    client = signed("auditor")
    with world.service.reading() as connection:
        names = dict(map(tuple, connection.exec_driver_sql("SELECT name, id FROM logs").all()))
        rows = list(every_event(connection, EventFilter(tenant="acme")))
    rows.sort(key=lambda row: (row.at_us, names[row.log], row.idx), reverse=True)
    first = client.get("/console/audit?tenant=acme").text
    assert listed(first) == [(row.log, row.idx) for row in rows[:50]]
    oldest = client.get("/console/audit?tenant=acme&sort=oldest").text
    assert listed(oldest)[0] == (rows[-1].log, rows[-1].idx)
    following = re.search(r'href="(/console/audit\?[^"]*cursor=[^"]+)" rel="next"', first)
    if len(rows) > 50:
        assert following is not None
        second = client.get(following[1].replace("&amp;", "&")).text
        assert listed(second) == [(row.log, row.idx) for row in rows[50:100]]


def test_facets_and_the_total_count_what_there_is(world: World, signed: Client) -> None:
    answer = httpx.get(
        world.url + "/v1/audit/summary?tenant=acme",
        headers={"Authorization": f"Bearer {world.keys['auditor']}"},
    ).json()
    kinds = {
        each["value"]: each["events"]
        for facet in answer["facets"]
        if facet["name"] == "kind"
        for each in facet["values"]
    }
    assert answer["exact"] and answer["total"] == sum(column["events"] for column in answer["columns"])
    assert kinds["residency-opened"] > 0
    page = signed("auditor").get("/console/audit?tenant=acme").text
    assert f'kind=residency-opened">residency-opened</a> <span class="quiet">{kinds["residency-opened"]:,}<' in page
    assert 'aria-label="Events over time"' in page
    for preset in ("15m", "1h", "4h", "24h", "7d", "30d"):
        assert f"last={preset}" in page
    recent = signed("auditor").get("/console/audit?tenant=acme&last=1h")
    assert recent.status_code == 200 and 'aria-current="true">1h' in recent.text
    by_time = re.search(r"by (\d+ )?(second|minute)s?, UTC", recent.text) is not None
    assert by_time == ('aria-label="Events over time"' in recent.text)
    assert signed("auditor").get("/console/audit?last=2y").status_code == 422


def test_a_tenant_counts_and_exports_its_own_alone(world: World, signed: Client) -> None:
    client = signed("tenant-viewer@labs")
    page = client.get("/console/audit").text
    assert "umbra" not in page and "tenant/acme" not in page
    lines = client.get("/console/audit/export/ndjson").text.splitlines()
    assert lines and {orjson.loads(line)["log"] for line in lines} == {"tenant/labs"}
    foreign, absent = (client.get(f"/console/audit/export/csv?tenant={name}") for name in ("acme", "nobody"))
    assert foreign.status_code == absent.status_code == 404


def test_an_export_is_what_is_shown_and_no_cell_is_a_formula(world: World, signed: Client) -> None:
    client = signed("auditor")
    query = "?tenant=acme&kind=residency-opened"
    shown = listed(client.get("/console/audit" + query).text)
    lines = [orjson.loads(line) for line in client.get("/console/audit/export/ndjson" + query).text.splitlines()]
    rows = list(csv.DictReader(io.StringIO(client.get("/console/audit/export/csv" + query).text)))
    assert [(line["log"], line["idx"]) for line in lines[: len(shown)]] == shown != []
    assert [(row["log"], int(row["idx"])) for row in rows] == [(line["log"], line["idx"]) for line in lines]
    with world.service.reading() as connection:
        leaf = next(
            row.leaf for row in every_event(connection, EventFilter(tenant="acme", kinds=("residency-opened",)))
        )
    assert leaf.decode() in {row["leaf"] for row in rows}
    assert client.get("/console/audit/export/parquet").status_code == 404


def test_a_live_view_is_one_read_in_five_minutes(world: World, signed: Client) -> None:
    dpo = signed("dpo")
    before = recorded(world, "consoleAudit")
    for _ in range(4):
        page = dpo.get("/console/audit?live=1&kind=receipt").text
        assert 'data-live="5000"' in page
    assert recorded(world, "consoleAudit") == before + 1
    dpo.get("/console/audit?live=1&kind=decision")  # another filter
    signed("auditor").get("/console/audit?live=1&kind=decision")  # another reader
    assert recorded(world, "consoleAudit") == before + 3
    for _ in range(2):  # and one that is not live is a read each time
        dpo.get("/console/audit?kind=decision")
    assert recorded(world, "consoleAudit") == before + 5


def test_a_live_read_is_new_again_after_its_period() -> None:
    reads = LiveReads()
    asked = ("ann", "consoleAudit", {"kind": "receipt"})
    assert reads.is_new(*asked, now_us=HOUR_US)
    assert not reads.is_new(*asked, now_us=HOUR_US + PERIOD_US - 1)
    assert reads.is_new(*asked, now_us=HOUR_US + PERIOD_US)
    reads.forget(*asked)
    assert reads.is_new(*asked, now_us=HOUR_US + PERIOD_US)


def test_keys_lead_to_the_proof_and_a_view_is_kept(sign_in: Callable[..., Any], tmp_path: Path) -> None:
    page = sign_in("auditor", viewport={"width": 390, "height": 800})
    page.goto("/console/audit?tenant=acme&kind=residency-opened")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390
    page.get_by_text("Saved links").click()
    page.locator("#saved input").fill("openings")
    page.get_by_role("button", name="Save this view").click()
    page.goto("/console/audit")
    page.get_by_text("Saved links").click()
    page.get_by_role("link", name="openings", exact=True).click()
    page.wait_for_url("**/console/audit?tenant=acme&kind=residency-opened")
    page.keyboard.press("j")
    page.keyboard.press("p")
    page.wait_for_url("**#verify")
    page.get_by_text("Verified", exact=True).wait_for()
