"""Every page of a running demo's console in a browser, at two widths: what is broken, and the documentation's pictures.

    kvcustody demo fleet --events nats        # or `kvcustody up`: prints a link that signs you in, within a minute
    python docs/pictures.py LINK              # pictures of the fleet go to docs/images/fleet
    python docs/pictures.py LINK --of up      # pictures of the console's pages go to docs/images
    python docs/pictures.py URL --of up --key FOLDER/keys/you.key     # later: the link works for a minute

It waits until every page has data, four minutes at most; of `up`, run it for some minutes before.

It needs Chromium and playwright. Exit status 1 where a page has no heading, raises an error, or is wider than the
window: then it prints which element sticks out.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvcustody.console.web.page_request import PLACES
from kvcustody.policies import library

WIDTHS: Final = (1280, 390)
KEPT: Final = {1280: ("Fleet", "Routes", "Health", "Erasures"), 390: ("Fleet", "Routes")}
_HEIGHT: Final = {1280: 860, 390: 844}
_DATA_SECONDS: Final = 240.0
_IMAGES: Final = Path(__file__).resolve().parent / "images"
_COLOURS: Final = 256
_TALL: Final = {"overview": 1150, "deletion": 1000}
_EMPTY_WITH_UP: Final = ("/console/fleet", "/console/routes", "/console/health")  # there are no doors, nor routers
_STICKS_OUT: Final = """() => [...document.querySelectorAll("body *")].filter(one => {
  for (let each = one.parentElement; each; each = each.parentElement)
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(each).overflowX)) return false;
  return one.getBoundingClientRect().right > innerWidth + 1;
}).slice(0, 3).map(one => one.outerHTML.slice(0, 120))"""


def wait_for_data(page: Any, without: tuple[str, ...] = ()) -> None:
    """Until no page except these has an empty part, or `_DATA_SECONDS` are over."""
    until, empty = time.monotonic() + _DATA_SECONDS, [one.path for one in PLACES if one.path not in without]
    while empty and time.monotonic() < until:
        time.sleep(2.0)
        empty = [path for path in empty if 'class="empty"' in page.request.get(path).text()]


def look(page: Any, width: int, out: Path | None) -> list[str]:
    """Visit every page at one width; what is broken."""
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
    page.set_viewport_size({"width": width, "height": _HEIGHT[width]})
    for place in PLACES:
        page.goto(place.path)
        if page.locator("h1").count() != 1:
            problems.append(f"{place.path} at {width}: no heading")
        wide = page.evaluate("() => document.documentElement.scrollWidth")
        if wide > width:
            problems.append(f"{place.path} at {width}: {wide} wide: {page.evaluate(_STICKS_OUT)}")
        empty = page.locator(".empty").count()
        print(f"{place.path} at {width}: {'nothing in ' + str(empty) + ' parts' if empty else 'has data'}")
        if out is not None:
            if width == min(WIDTHS):  # below the navigation, which is all that fits
                page.evaluate("() => document.querySelector('main h2, main .tiles')?.scrollIntoView()")
            name = f"{place.name.lower().replace(' ', '-')}-{width}.png"
            page.screenshot(path=str(out / name), full_page=False)
    return problems


def keep(drawn: Path, names: Iterable[str], folder: Path) -> None:
    """Keep these pictures in a folder, in few colours."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with Image.open(drawn / name) as picture:
            few = picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
            few.save(folder / name, optimize=True)


def fleet(page: Any, drawn: Path) -> None:
    """Keep the pictures of a fleet's pages, of those that `look` drew."""
    keep(drawn, [f"{name.lower()}-{width}.png" for width, names in KEPT.items() for name in names], _IMAGES / "fleet")


def console(page: Any, drawn: Path) -> None:
    """Draw and keep the pictures of the console's pages, each as the page that shows it says."""
    for name, draw in _CONSOLE.items():
        page.set_viewport_size({"width": 1280, "height": _TALL.get(name, _HEIGHT[1280])})
        draw(page)
        page.screenshot(path=str(drawn / f"console-{name}.png"), full_page=False)
    keep(drawn, [f"console-{name}.png" for name in _CONSOLE], _IMAGES)


def _page(path: str) -> Callable[[Any], None]:
    def draw(page: Any) -> None:
        page.goto(f"/console{path}")
        page.locator("figure canvas").first.wait_for()

    return draw


def _verified_event(page: Any) -> None:
    page.goto("/console/audit?kind=receipt&tenant=acme&sort=oldest")  # an old one is under a signed checkpoint
    page.locator("tbody a[href*='/audit/event']").first.click()
    page.get_by_role("button", name="Verify in this browser").click()
    page.locator("#verify-result .good, #verify-result.good").first.wait_for()


def _write(page: Any, text: str) -> None:
    page.get_by_role("textbox", name="Document", exact=True).focus()
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    page.keyboard.insert_text(text)


def _without_comments(source: str) -> str:
    return "".join(line for line in source.splitlines(keepends=True) if not line.startswith("#"))


def _draft_with_a_problem(page: Any) -> None:
    page.goto("/console/policy/draft")
    page.locator("#editor-status").wait_for(state="attached")
    source = _without_comments(library.source("regulated-saas"))
    _write(page, source.replace("scope: session", "scope: sessions").replace("description:", "\ndescription:", 1))
    page.locator(".cm-lintRange-error, .wrong").first.wait_for()
    page.keyboard.press("Control+Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Control+Space")
    page.locator("[role=option]").first.wait_for()


def _checked_draft(page: Any) -> None:
    page.goto("/console/policy/draft")
    page.locator("#editor-status").wait_for(state="attached")
    source = page.evaluate("() => document.getElementById('source').value")
    _write(page, source.replace("scope: session,", "scope: subject,", 1))
    page.get_by_role("button", name="Check").click()
    page.locator("#checked").wait_for()
    page.evaluate("() => document.getElementById('checked').scrollIntoView()")


_CONSOLE: Final[dict[str, Callable[[Any], None]]] = {
    "overview": _page("/"),
    "deletion": _page("/deletion"),
    "explorer": _page("/audit?tenant=acme"),
    "event": _verified_event,
    "draft": _draft_with_a_problem,
    "draft-checked": _checked_draft,
}


def main() -> None:
    """Visit, print what is broken, and keep pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link", metavar="LINK")
    parser.add_argument("--of", choices=("fleet", "up"), default="fleet", help="what the link is of (default: fleet)")
    parser.add_argument("--key", type=Path, help="a file with an API key, where LINK is the console's address")
    parser.add_argument("--out", type=Path, help="a folder for pictures of every page; none is kept for docs then")
    given = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    drawn = given.out or _IMAGES / "drawn"
    drawn.mkdir(parents=True, exist_ok=True)
    at = urlsplit(given.link)
    with sync_playwright() as begun:
        browser = begun.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(base_url=f"{at.scheme}://{at.netloc}").new_page()
        page.goto(given.link)
        if given.key is not None:
            page.get_by_label("API key").fill(given.key.read_text().strip())
            page.get_by_role("button", name="Sign in").click()
            page.wait_for_url("**/console/")
        wait_for_data(page, _EMPTY_WITH_UP if given.of == "up" else ())
        problems = [problem for width in WIDTHS for problem in look(page, width, drawn)]
        if given.out is None:
            (console if given.of == "up" else fleet)(page, drawn)
            shutil.rmtree(drawn)
        browser.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
