"""Charts in a real browser: legend, tooltip, zoom, hatch, and a page as wide as a telephone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.evidence.counters.judge_hours import judge
from standins.console.web_world import World

PAGES = ("", "deletion", "decisions", "tiers", "routes", "custody", "fleet")
pytestmark = pytest.mark.system("a chart hides data, or a drag does not narrow the page")


@pytest.fixture
def judged(world: World) -> World:
    assert world.service.writer.seal()
    judge(world.service.reader, world.service.engine, now_us=world.service.clock.utc_us())
    return world


def chart(page: Any, title: str) -> Any:
    return page.locator("figure[data-chart]", has_text=title)


def ink(figure: Any) -> str:
    """Return the drawing as it is now."""
    return str(figure.locator("canvas").evaluate("canvas => canvas.toDataURL()"))


def test_a_click_in_the_legend_hides_a_series(judged: World, sign_in: Callable[..., Any]) -> None:
    page = sign_in("auditor")
    page.goto("/console/deletion")
    figure = chart(page, "Units due")
    button, before = figure.get_by_role("button", name="covered", exact=True), ink(figure)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    page.wait_for_function(
        "([canvas, before]) => canvas.toDataURL() !== before", arg=[figure.locator("canvas").element_handle(), before]
    )
    button.click()
    page.wait_for_function(
        "([canvas, before]) => canvas.toDataURL() === before", arg=[figure.locator("canvas").element_handle(), before]
    )


def test_a_tooltip_says_what_the_table_says(judged: World, sign_in: Callable[..., Any]) -> None:
    page = sign_in("auditor")
    page.goto("/console/deletion")
    figure = chart(page, "Units due")
    box = figure.locator(".u-over").bounding_box()
    rows = figure.locator("tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    tip = figure.locator(".tip")
    tip.wait_for(state="visible")
    said = tip.inner_text()
    row = next(row for row in rows if said.startswith(row[0]))
    assert f"covered: {row[1]}" in said or "nothing due" in said


def test_a_drag_narrows_the_page(judged: World, sign_in: Callable[..., Any]) -> None:
    page = sign_in("auditor")
    page.goto("/console/deletion")
    figure = chart(page, "Units due")
    due = page.locator(".tile", has_text="units due").first.locator("b").inner_text()
    figure.scroll_into_view_if_needed()
    box = figure.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + 60, steps=8)
    page.mouse.up()
    page.wait_for_url(re.compile(r"since=.+until="))
    narrowed = page.locator(".tile", has_text="units due").first.locator("b").inner_text()
    assert int(narrowed.replace(",", "")) < int(due.replace(",", ""))
    page.get_by_role("link", name="Back to the last 24 hours").click()
    assert "since" not in page.url


def test_a_drag_narrows_the_overview(judged: World, sign_in: Callable[..., Any]) -> None:
    page = sign_in("auditor")
    figure = chart(page, "Blocks of prompts")
    figure.scroll_into_view_if_needed()
    box = figure.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + 60, steps=8)
    page.mouse.up()
    page.wait_for_url(re.compile(r"/console/\?since=.+until="))
    assert page.get_by_role("heading", name="The chosen period").count() == 1
    assert page.locator(".tile", has_text="requests denied in the chosen period").count() == 1


def test_a_chart_by_name_says_what_its_table_says(judged: World, sign_in: Callable[..., Any]) -> None:
    """Bars that lie across, on a page that refreshes itself: what a click has hidden stays hidden."""
    status = {"blocks.total": 4096.0, "blocks.active": 90.0, "blocks.cached": 1000.0, "running": 3.0}
    judged.service.fleet.heard("worker", judged.worker.incarnation, status=status)
    page = sign_in("operator")
    page.goto("/console/fleet")
    figure = chart(page, "Blocks by worker")
    box = figure.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
    tip = figure.locator(".tip")
    tip.wait_for(state="visible")
    assert tip.locator("b, span").all_inner_texts() == [
        "worker",
        "of running requests: 90",
        "cached: 1,000",
        "neither: 3,006",
    ]
    figure.get_by_role("button", name="cached").click()
    figure.locator("summary").click()
    before = page.locator("#now").element_handle()
    page.wait_for_function("before => !before.isConnected", arg=before)
    figure.locator("canvas").wait_for()
    assert figure.get_by_role("button", name="cached").get_attribute("aria-pressed") == "false"
    assert figure.locator("tbody tr").first.is_visible(), "what was open is open"


def test_no_data_is_hatched_and_is_not_zero(judged: World, sign_in: Callable[..., Any]) -> None:
    page = sign_in("auditor")
    page.goto("/console/deletion")
    figure = chart(page, "Units due")
    empty = figure.locator("tbody tr", has=page.locator('td[data-value=""]'))
    assert empty.count() and "–" in (empty.first.text_content() or "")
    before = ink(figure)
    figure.locator("table").evaluate(
        "table => table.querySelectorAll('td[data-value=\"\"]').forEach(cell => { cell.dataset.value = '0'; })"
    )
    figure.evaluate("figure => figure.querySelector('.plot .uplot').remove()")
    page.evaluate("() => import(document.querySelector('script[src*=\"charts.js\"]').src + '&again')")
    page.wait_for_function("figure => figure.querySelector('.plot .uplot')", arg=figure.element_handle())
    assert ink(figure) != before  # zeros are not hatched


def test_charts_without_scripts_are_tables(judged: World, sign_in: Callable[..., Any]) -> None:
    page = sign_in("auditor", java_script_enabled=False)
    page.goto("/console/deletion")
    figure = chart(page, "Units due")
    figure.locator("summary").click()
    assert figure.locator("tbody tr").first.is_visible() and not figure.locator(".plot").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_of_charts_is_wider_than_the_screen(
    judged: World, sign_in: Callable[..., Any], width: int, theme: str
) -> None:
    page = sign_in("auditor", viewport={"width": width, "height": 900}, color_scheme=theme)
    operator = sign_in("operator", viewport={"width": width, "height": 900}, color_scheme=theme)
    for name in PAGES:
        shown = operator if name in ("routes", "fleet") else page
        shown.goto(f"/console/{name}")
        shown.wait_for_load_state("networkidle")
        wide = shown.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, (name, wide)
        if pictures := os.environ.get("KVCUSTODY_SCREENSHOTS"):
            shown.screenshot(path=str(Path(pictures) / f"{name or 'overview'}-{width}-{theme}.png"), full_page=True)
