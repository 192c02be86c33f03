"""Every page at the width of a desk and of a telephone: nothing overflows, no word is broken, no text is too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from standins.console.pages_by_role import PAGES
from standins.console.web_world import World

pytestmark = pytest.mark.system
SignIn = Callable[..., Any]
SMALLEST_PX, HEADER_PX = 11, 100
# What a page shows, as its reader sees it; each problem as one line.
LAYOUT = """([smallest, header]) => {
  const problems = [];
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) problems.push(`the page is ${root.scrollWidth} px wide`);
  const above = document.querySelector("main").getBoundingClientRect().top + scrollY;
  if (innerWidth < 500 && above > header) problems.push(`header and menu are ${above} px high`);
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


PLANT = """([text, style]) => {
  if (text === "") { document.querySelector("header").style.height = "300px"; return; }
  const planted = document.createElement("p");
  planted.textContent = text;
  document.body.append(planted);
  Object.assign(planted.style, style);
}"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_width(world: World, sign_in: SignIn, name: str, width: int) -> None:
    world.release()
    page = sign_in(name, viewport={"width": width, "height": 860})
    problems = {}
    for title, path in PAGES[name].items():
        page.goto("/console" + path)
        said = page.evaluate(LAYOUT, [SMALLEST_PX, HEADER_PX])
        if said:
            problems[title] = said[:5]
    assert problems == {}


def test_control_what_does_not_fit_is_said(world: World, sign_in: SignIn) -> None:
    """Each fault is planted into a sound page, and found."""
    page = sign_in("auditor", viewport={"width": 390, "height": 860})
    plants = {  # text, and its style: the page takes no style from markup
        "px wide": ("x", {"width": "900px"}),
        "broken: interoperability": ("interoperability", {"width": "40px", "wordBreak": "break-all"}),
        "9px: small": ("small", {"fontSize": "9px"}),
        "cut: what is cut": ("what is cut", {"width": "20px", "overflow": "hidden", "whiteSpace": "nowrap"}),
        "px high": ("", {}),
    }
    for said, plant in plants.items():
        page.goto("/console/health")
        assert not any(said in each for each in page.evaluate(LAYOUT, [SMALLEST_PX, HEADER_PX])), "control"
        page.evaluate(PLANT, plant)
        shown = page.evaluate(LAYOUT, [SMALLEST_PX, HEADER_PX])
        assert any(said in each for each in shown), (said, shown)
