"""Every page, light and dark: no serious finding of axe, usable by keyboard; with KVCUSTODY_SCREENSHOTS, pictures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from standins.console.pages_by_role import PAGES
from standins.console.web_world import World, policy_source, write_draft

pytestmark = pytest.mark.system

SCREENSHOTS = os.environ.get("KVCUSTODY_SCREENSHOTS")
SERIOUS = ("serious", "critical")
SignIn = Callable[..., Any]


@pytest.mark.parametrize(("name", "scheme"), [(name, scheme) for name in PAGES for scheme in ("light", "dark")])
def test_no_serious_finding_of_axe(world: World, sign_in: SignIn, name: str, scheme: str) -> None:
    world.release()
    page = sign_in(name, color_scheme=scheme, viewport={"width": 1280, "height": 860})
    for title, path in PAGES[name].items():
        page.goto("/console" + path)
        _check(page, f"{title} {scheme}")
        if title == "audit":
            _picture(page, "explorer", scheme)
            page.locator("tbody a").first.click()
            page.get_by_role("button", name="Verify in this browser").click()
            page.locator("#verify-result strong").wait_for()
            _check(page, f"event {scheme}")
            page.locator("#verify-result").scroll_into_view_if_needed()
            _picture(page, "event", scheme)
            continue
        if title == "draft":
            _editor(page, scheme)
            page.get_by_role("button", name="Check").click()
            page.locator("#checked").wait_for()
            _check(page, f"checked {scheme}")
            page.locator("#checked").evaluate("element => element.scrollIntoView()")
            _picture(page, "draft-checked", scheme)
            continue
        _picture(page, title, scheme)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_sign_in_page(world: World, browser: Any, scheme: str) -> None:
    context = browser.new_context(base_url=world.url, color_scheme=scheme, viewport={"width": 1280, "height": 860})
    page = context.new_page()
    page.goto("/console/login")
    _check(page, f"sign-in {scheme}")
    context.close()


def test_by_keyboard_and_with_the_switch(sign_in: SignIn) -> None:
    page = sign_in("auditor", color_scheme="light")
    page.goto("/console/audit")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Switch between light and dark").press("Enter")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.reload()
    assert light != dark == page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_nothing_is_loaded_from_elsewhere(world: World, sign_in: SignIn) -> None:
    page = sign_in("auditor", viewport={"width": 390, "height": 800})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in ("/", "/audit", "/deletion"):
        page.goto("/console" + path)
        assert page.evaluate("document.documentElement.scrollWidth <= 390"), path  # a telephone scrolls one way only
    assert asked and all(url.startswith(world.url) for url in asked)


def _check(page: Any, what: str) -> None:
    """Everything in light; in dark the colours, for the rest is the same."""
    options = {"runOnly": ["color-contrast"]} if what.endswith("dark") else None
    found = Axe().run(page, options=options).response["violations"]
    serious = [(item["id"], item["nodes"][0]["html"][:200]) for item in found if item["impact"] in SERIOUS]
    assert serious == [], what


def _editor(page: Any, scheme: str) -> None:
    """A picture of the editor with a problem and what is offered; then the sound text again."""
    sound = policy_source()
    shown = sound[sound.index("schema:") :].replace("scope: session", "scope: sessions", 1)
    write_draft(page, shown)
    page.locator(".says").wait_for()
    page.keyboard.press("Control+Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.keyboard.press("Control+Space")
    page.get_by_role("listbox").wait_for()
    line = shown[: shown.index("sessions")].count("\n") + 2  # one more than before
    page.locator("#editor-status", has_text=f"Line {line}:").wait_for()
    _picture(page, "draft", scheme)
    page.keyboard.press("Escape")
    write_draft(page, sound)


def _picture(page: Any, title: str, scheme: str) -> None:
    if SCREENSHOTS is not None and (scheme == "light" or title == "overview"):
        page.screenshot(path=Path(SCREENSHOTS) / f"{title}-{scheme}.png", animations="disabled")
