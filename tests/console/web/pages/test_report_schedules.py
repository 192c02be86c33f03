"""Schedules and what they made, in a browser: made, delivered, shown with the verdict, paused and deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from standins.console.web_world import World
from standins.service.schedules_world import move_back

SignIn = Callable[..., Any]


@pytest.mark.system
def test_a_schedule_is_made_delivers_and_is_shown_with_its_verdict(world: World, sign_in: SignIn) -> None:
    page = sign_in("tenant-admin@acme", viewport={"width": 1280, "height": 860})
    page.goto("/console/reports")
    page.get_by_label("Catalogue").select_option("soc2")
    page.get_by_label("Every").select_option("weekly")
    page.get_by_label("Time zone").fill("Europe/Berlin")
    page.get_by_label("share (folder)").check()
    page.get_by_role("button", name="Schedule it").click()
    table = page.get_by_role("region", name="Schedules of reports")
    expect(table).to_contain_text("Europe/Berlin, 6:00")
    expect(table).to_contain_text("active")
    headers = {"Authorization": f"Bearer {world.keys['tenant-admin@acme']}"}
    [schedule] = httpx.get(f"{world.url}/v1/reports/schedules", headers=headers).json()["items"]
    assert schedule["destinations"] == ["share"] and schedule["tenant"] == "acme"
    move_back(world.service, schedule["schedule"], 7)
    deadline = time.monotonic() + 120
    while True:
        page.goto("/console/reports")
        region = page.get_by_role("region", name="Reports that were made")
        if region.count() and "delivered" in region.inner_text():
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    [report] = httpx.get(f"{world.url}/v1/reports", headers=headers).json()["items"]
    expect(region).to_contain_text(report["opinion"])
    expect(region).to_contain_text(report["digest"][:12])
    expect(region).to_contain_text(report["signed_by"])
    for reason in report["reasons"]:
        expect(region).to_contain_text(reason["cause"])
    [folder] = (world.folder / "share").iterdir()
    assert orjson.loads((folder / "report.json").read_bytes())["asked"]["tenant"] == "acme"
    found = Axe().run(page).response["violations"]
    assert [item["id"] for item in found if item["impact"] in ("serious", "critical")] == []
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= 390")
    region.get_by_role("link", name="soc2").click()
    expect(page.get_by_role("heading", name="Verdict")).to_be_visible()

    page.goto("/console/reports")
    table.get_by_role("button", name="Pause").click()
    expect(table).to_contain_text("paused")
    table.get_by_role("button", name="Resume").click()
    expect(table).to_contain_text("active")
    table.get_by_role("button", name="Delete").click()
    expect(table).to_have_count(0)


@pytest.mark.system
def test_who_reads_only_operations_is_shown_no_verdict(world: World, sign_in: SignIn) -> None:
    page = sign_in("operator")
    page.goto("/console/reports")
    assert page.get_by_role("heading", name="Schedules").count() == 0
    foreign = sign_in("tenant-viewer@labs")
    foreign.goto("/console/reports")
    assert "acme" not in foreign.locator("main").inner_text()
    assert foreign.get_by_label("share (folder)").count() == 0


def test_an_address_in_a_form_reaches_nothing(world: World) -> None:
    """A destination is a name of the settings; a form with another is refused, and a form without the token too."""
    with httpx.Client(base_url=world.url) as client:
        client.post("/console/login", data={"key": world.keys["auditor"]})
        text = client.get("/console/reports").text
        csrf = text.partition('name="csrf" value="')[2].partition('"')[0]
        form = {"framework": "soc2", "every": "weekly", "hour": "6"}
        origin = {"Origin": world.url}
        for name in ("to-http://169.254.169.254/", "to-elsewhere", "to-/tmp"):
            sent = {**form, "csrf": csrf, name: "1"}
            answer = client.post("/console/reports/schedules", data=sent, headers=origin)
            assert answer.status_code == 422, name
        assert client.post("/console/reports/schedules", data=form, headers=origin).status_code == 403
        sent = {**form, "csrf": csrf, "to-share": "1"}
        assert client.post("/console/reports/schedules", data=sent, headers=origin).status_code == 303
