"""The process that makes a PDF: HTML on stdin, the PDF on stdout (`pdf.pdf_of` starts it).

What it refuses is one JSON object on the last line of its errors: `library`, `urls`, or `word` with `code`. It imports
nothing of kvcustody, so it starts in the time that WeasyPrint takes.
"""

from __future__ import annotations

import ctypes.util
import json
import logging
import sys
import unicodedata
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

FONTS = Path(__file__).parent / "fonts"
FIRST = ("NotoSans-Regular.ttf", "DejaVuSans.ttf")  # fonts that have most of what is written
UNSEEN = {"style", "title", "script"}
VARIATIONS = frozenset(map(chr, range(0xFE00, 0xFE10)))  # they choose a form of the character before them


def refuse(**told: Any) -> NoReturn:
    """End with a refusal."""
    sys.stderr.write(json.dumps(told) + "\n")
    raise SystemExit(2)


def unprintable(words: Iterator[str]) -> tuple[str, int] | None:
    """Return the first word with a character that no font here has, and its code point."""
    from fontTools.ttLib import TTFont

    left: dict[str, str] = {}
    for word in words:
        for character in word:
            if unicodedata.category(character) != "Cf" and character not in VARIATIONS:
                left.setdefault(character, word)
    for name in sorted((each.name for each in FONTS.glob("*.ttf")), key=lambda name: (name not in FIRST, name)):
        if not left:
            break
        for code in TTFont(FONTS / name, lazy=True).getBestCmap():
            left.pop(chr(code), None)
    return next(((word, ord(character)) for character, word in left.items()), None)


def words_of(element: Any) -> Iterator[str]:
    """Yield every printed word, in composed form."""
    for each in element.iter():
        if each.tag not in UNSEEN and each.text:
            yield from unicodedata.normalize("NFC", each.text).split()
        if each.tail:
            yield from unicodedata.normalize("NFC", each.tail).split()


def makers() -> str:
    """Return the programs whose versions decide the bytes; a comment in the PDF's last line states them."""
    parts = [f"WeasyPrint {version('weasyprint')}", f"fontTools {version('fonttools')}"]
    for name, library, function in (
        ("Pango", "pango-1.0", "pango_version_string"),
        ("HarfBuzz", "harfbuzz", "hb_version_string"),
    ):
        found = getattr(ctypes.CDLL(ctypes.util.find_library(library)), function)
        found.restype = ctypes.c_char_p
        parts.append(f"{name} {found().decode()}")
    return ", ".join(parts)


def main() -> None:
    """Read HTML, write a PDF."""
    try:
        from weasyprint import HTML
        from weasyprint.pdf import fonts
        from weasyprint.urls import URLFetcher
    except OSError as problem:
        refuse(library=str(problem).split("\n", 1)[0])
    fonts.harfbuzz_subset = None  # fontTools cuts fonts down everywhere, so bytes do not depend on a further library
    refused: list[str] = []

    class Nothing(URLFetcher):  # type: ignore[misc]
        def fetch(self, url: str, headers: Any = None) -> NoReturn:
            refused.append(url)
            raise ValueError(url)

    logging.getLogger("weasyprint").setLevel(logging.CRITICAL)
    document = HTML(string=sys.stdin.buffer.read().decode(), url_fetcher=Nothing(), encoding="utf-8")
    if (found := unprintable(words_of(document.etree_element))) is not None:
        refuse(word=found[0], code=found[1])
    made = document.write_pdf(pdf_tags=True)
    if refused:
        refuse(urls=refused)
    sys.stdout.buffer.write(made.rstrip() + b"\n% " + makers().encode() + b"\n")


if __name__ == "__main__":
    main()
