"""Every page at the width of a desk and of a telephone, light and dark.

Nothing overflows, no word is broken, no text is too small or too faint, and no tile stands alone in a last row. With
KVCUSTODY_SCREENSHOTS there is a picture of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from standins.console.pages_by_role import PAGES
from standins.console.web_world import World

pytestmark = pytest.mark.system
SignIn = Callable[..., Any]
SMALLEST_PX, HEADER_PX = 11, 100
SCREENSHOTS = os.environ.get("KVCUSTODY_SCREENSHOTS")
# What a page shows, as its reader sees it; each problem as one line.
LAYOUT = """([smallest, header]) => {
  const problems = [];
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) problems.push(`the page is ${root.scrollWidth} px wide`);
  const above = document.querySelector("main").getBoundingClientRect().top + scrollY;
  if (innerWidth < 500 && above > header) problems.push(`header and menu are ${above} px high`);
  for (const grid of innerWidth < 1000 ? [] : document.querySelectorAll(".tiles")) {
    const rows = new Map();
    for (const tile of grid.children) {
      const top = Math.round(tile.getBoundingClientRect().top);
      rows.set(top, (rows.get(top) ?? 0) + 1);
    }
    const last = grid.lastElementChild.textContent.trim().slice(0, 40);
    if (rows.size > 1 && [...rows.values()].at(-1) === 1) problems.push(`alone in its row: ${last}`);
  }
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const holder = node.parentElement, style = getComputedStyle(holder);
    if (!node.data.trim() || !holder.checkVisibility() || holder.closest("svg, script, style")) continue;
    if (holder.getBoundingClientRect().width < 2) continue;  // for screen readers alone
    if (parseFloat(style.fontSize) < smallest) problems.push(`${style.fontSize}: ${node.data.trim().slice(0, 40)}`);
    for (const word of node.data.matchAll(/[A-Za-z]{4,20}/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map(({ top }) => Math.round(top / 4)));
      if (tops.size > 1) problems.push(`broken: ${word[0]} in <${holder.tagName}> ${node.data.trim().slice(0, 40)}`);
    }
    if (style.overflow === "hidden" && holder.scrollWidth > holder.clientWidth + 1 && !holder.closest('[title]'))
      problems.push(`cut: ${node.data.trim().slice(0, 60)}`);
  }
  return problems;
}"""


ALONE = """() => {
  const grid = document.querySelector(".tiles");
  grid.style.gridTemplateColumns = `repeat(${grid.children.length - 1}, 1fr)`;
}"""
PLANT = """([text, style]) => {
  if (text === "") { document.querySelector("header").style.height = "300px"; return; }
  const planted = document.createElement("p");
  planted.textContent = text;
  document.body.append(planted);
  Object.assign(planted.style, style);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_width(world: World, sign_in: SignIn, name: str, width: int, scheme: str) -> None:
    world.release()
    page = sign_in(name, viewport={"width": width, "height": 860}, color_scheme=scheme)
    problems = {}
    for title, path in PAGES[name].items():
        page.goto("/console" + path)
        said = page.evaluate(LAYOUT, [SMALLEST_PX, HEADER_PX]) + faint(page)
        if said:
            problems[title] = said[:5]
        if SCREENSHOTS is not None:
            page.screenshot(path=Path(SCREENSHOTS) / f"{title}-{width}-{scheme}.png", full_page=True)
    assert problems == {}


def faint(page: Any) -> list[str]:
    """Every text whose contrast is below WCAG's AA, by axe."""
    found = Axe().run(page, options={"runOnly": ["color-contrast"]}).response["violations"]
    return [f"faint: {node['html'][:80]}" for item in found for node in item["nodes"]]


def test_control_what_does_not_fit_is_said(world: World, sign_in: SignIn) -> None:
    """Each fault is planted into a sound page, and found."""
    page = sign_in("auditor", viewport={"width": 390, "height": 860})
    plants = {  # text, and its style: the page takes no style from markup
        "px wide": ("x", {"width": "900px"}),
        "broken: interoperability": ("interoperability", {"width": "40px", "wordBreak": "break-all"}),
        "9px: small": ("small", {"fontSize": "9px"}),
        "cut: what is cut": ("what is cut", {"width": "20px", "overflow": "hidden", "whiteSpace": "nowrap"}),
        "faint: ": ("nearly white", {"color": "#777", "backgroundColor": "#888"}),
        "px high": ("", {}),
    }
    for said, plant in plants.items():
        page.goto("/console/health")
        assert not any(said in each for each in page.evaluate(LAYOUT, [SMALLEST_PX, HEADER_PX])), "control"
        page.evaluate(PLANT, plant)
        shown = page.evaluate(LAYOUT, [SMALLEST_PX, HEADER_PX]) + faint(page)
        assert any(said in each for each in shown), (said, shown)


def test_control_a_tile_alone_is_said(world: World, sign_in: SignIn) -> None:
    page = sign_in("operator", viewport={"width": 1280, "height": 860})
    page.goto("/console/health")
    assert not any("alone" in each for each in page.evaluate(LAYOUT, [SMALLEST_PX, HEADER_PX])), "control"
    page.evaluate(ALONE)
    assert any("alone in its row" in each for each in page.evaluate(LAYOUT, [SMALLEST_PX, HEADER_PX]))
