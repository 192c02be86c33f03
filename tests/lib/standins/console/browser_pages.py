"""Pages of a running console in a real browser: what axe finds, what breaks, and a picture of each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from kvcustody.console.web.page_request import Place


def check_in_browser(client: httpx.Client, places: Iterable[Place], name: str = "{place}.png") -> None:
    """Nothing serious for axe, nothing that breaks; with KVCUSTODY_SCREENSHOTS a picture of each, by this name.

    `client` has come in: its cookie is the browser's.
    """
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    pictures, problems = os.environ.get("KVCUSTODY_SCREENSHOTS"), list[str]()
    with playwright.sync_playwright() as begun:
        browser = begun.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(base_url=str(client.base_url), bypass_csp=True)
        context.add_cookies([{"name": "kvcustody", "value": client.cookies["kvcustody"], "url": str(client.base_url)}])
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        for place in places:
            page.goto(place.path)
            assert page.locator("h1").count() == 1 and page.locator("a[aria-current=page]").count() == 1
            found = axe.run(page).response["violations"]
            serious = [one["id"] for one in found if one["impact"] in ("serious", "critical")]
            assert serious == [], (place.path, serious)
            if pictures:
                file = name.format(place=place.name.lower().replace(" ", "-"))
                page.screenshot(path=str(Path(pictures) / file), full_page=False)
        browser.close()
    assert problems == []
