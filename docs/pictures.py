"""Every page of a running demo's console in a browser, at two widths: what is broken, and pictures of some.

    kvcustody demo fleet --events nats        # prints a link that signs you in, once, within a minute
    python docs/pictures.py LINK              # pictures go to docs/images/fleet

It waits until every page has data, four minutes at most.

It needs Chromium and playwright. Exit status 1 where a page has no heading, raises an error, or is wider than the
window: then it prints which element sticks out.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvcustody.console.web.page_request import PLACES

WIDTHS: Final = (1280, 390)
KEPT: Final = {1280: ("Fleet", "Routes", "Health", "Erasures"), 390: ("Fleet", "Routes")}
_HEIGHT: Final = {1280: 860, 390: 844}
_DATA_SECONDS: Final = 240.0
_FOLDER: Final = Path(__file__).resolve().parent / "images" / "fleet"
_STICKS_OUT: Final = """() => [...document.querySelectorAll("body *")].filter(one => {
  for (let each = one.parentElement; each; each = each.parentElement)
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(each).overflowX)) return false;
  return one.getBoundingClientRect().right > innerWidth + 1;
}).slice(0, 3).map(one => one.outerHTML.slice(0, 120))"""


def wait_for_data(page: Any) -> None:
    """Until no page has an empty part, or `_DATA_SECONDS` are over."""
    until, empty = time.monotonic() + _DATA_SECONDS, [place.path for place in PLACES]
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


def keep(drawn: Path) -> None:
    """The pictures of `KEPT`, in few colours, in `_FOLDER`."""
    from PIL import Image

    _FOLDER.mkdir(parents=True, exist_ok=True)
    for width, names in KEPT.items():
        for name in names:
            file = f"{name.lower()}-{width}.png"
            with Image.open(drawn / file) as picture:
                few = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
                few.save(_FOLDER / file, optimize=True)


def main() -> None:
    """Visit, print what is broken, and keep pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link", metavar="LINK")
    parser.add_argument("--out", type=Path, help="a folder for pictures of every page; none is kept for docs then")
    given = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    drawn = given.out or _FOLDER.with_name("drawn")
    drawn.mkdir(parents=True, exist_ok=True)
    at = urlsplit(given.link)
    with sync_playwright() as begun:
        browser = begun.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(base_url=f"{at.scheme}://{at.netloc}").new_page()
        page.goto(given.link)
        wait_for_data(page)
        problems = [problem for width in WIDTHS for problem in look(page, width, drawn)]
        browser.close()
    if given.out is None:
        keep(drawn)
        shutil.rmtree(drawn)
    for problem in problems:
        print(problem, file=sys.stderr)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
