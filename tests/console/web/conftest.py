"""A real browser at a real service. Skipped where no Chromium is installed; every page watches for broken markup."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from standins.console.web_world import World, running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("console")
    shutil.copy(migrated, folder / "ledger.db")
    with running(folder) as opened:
        yield opened


@pytest.fixture
def visitor(world: World) -> Iterator[Callable[[str], httpx.Client]]:
    """A client of a person who has signed in, without a browser: `visitor("auditor")`."""
    with ExitStack() as stack:

        def make(name: str) -> httpx.Client:
            made = stack.enter_context(httpx.Client(base_url=world.url, timeout=60))
            assert made.post("/console/login", data={"key": world.keys[name]}).status_code == 303
            return made

        yield make


@pytest.fixture(scope="module")  # not longer: its event loop would meet those of other modules' tests
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    playwright.expect.set_options(timeout=20_000)
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def sign_in(world: World, browser: Any) -> Iterator[Callable[..., Any]]:
    """A page of a person who has signed in: `sign_in("auditor")`; several people may be in at once."""
    contexts: list[Any] = []
    problems: list[str] = []

    def make(name: str, **how: Any) -> Any:
        context = browser.new_context(base_url=world.url, accept_downloads=True, **how)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto("/console/")
        page.get_by_label("API key").fill(world.keys[name])
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/console/")
        return page

    yield make
    for context in contexts:
        context.close()
    assert problems == []
