"""Pages stay short and their sentences too: at most 1,500 words a page, at most 25 words a sentence.

`prose_bounds.json` holds what is above either limit today, page by page. A bound may only fall:
`KVCUSTODY_TIGHTEN=1 python -m pytest tests/docs/test_prose.py` lowers each bound to what its page has now.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BOUNDS = Path(__file__).with_name("prose_bounds.json")
WORDS_MAX = 1_500
SENTENCE_WORDS_MAX = 25
LOOKED_UP = ("reference/", "build/adr/")  # read line by line, not from the first to the last
TIGHTEN = "KVCUSTODY_TIGHTEN"
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_APART = re.compile(r"^(\||#|<!--|!\[|</?\w| {4}).*$", re.MULTILINE)  # tables, headings, comments, pictures, HTML, code
_ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+", re.MULTILINE)


def words(page: str) -> int:
    """The words of a page as `wc -w` counts them."""
    return len(page.split())


def sentences(page: str) -> list[str]:
    """The sentences of a page's prose: no code blocks, tables or headings. A list's items end their sentences."""
    prose = _APART.sub("\n", _FENCE.sub("\n", page))
    prose = re.sub(r"`[^`\n]*`", "CODE", prose)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    found = []
    for block in re.split(r"\n\s*\n", _ITEM.sub("\n\n", prose)):
        found += re.split(r"(?<=[.!?:;])[)*\"]*\s+(?=[A-Z*\"(])", " ".join(block.split()))
    return [one for one in found if one.strip()]


def long_sentences(page: str) -> list[str]:
    return [one for one in sentences(page) if len(re.findall(r"\w[\w'’.-]*", one)) > SENTENCE_WORDS_MAX]


def above(found: dict[str, int], bounds: dict[str, int]) -> dict[str, str]:
    """The pages that are above their bound; a page without one has the bound 0."""
    return {page: f"{n} > {bounds.get(page, 0)}" for page, n in found.items() if n > bounds.get(page, 0)}


def tightened(found: dict[str, int], bounds: dict[str, int]) -> dict[str, int]:
    """The bounds, each lowered to what was found. None is added, none is raised."""
    lowered = {page: min(bound, found.get(page, 0)) for page, bound in bounds.items()}
    return {page: bound for page, bound in sorted(lowered.items()) if bound}


def pages() -> dict[str, str]:
    paths = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def long_pages() -> dict[str, int]:
    counts = {
        page: words(text) for page, text in pages().items() if not page.removeprefix("docs/").startswith(LOOKED_UP)
    }
    return {page: count for page, count in counts.items() if count > WORDS_MAX}


def pages_with_long_sentences() -> dict[str, int]:
    counts = {page: len(long_sentences(text)) for page, text in pages().items() if "/build/adr/" not in page}
    return {page: count for page, count in counts.items() if count}


def held(kind: str, counts: dict[str, int]) -> dict[str, str]:
    """What is above its bound; lowers the bounds on the way where it is asked to."""
    bounds = json.loads(BOUNDS.read_text(encoding="utf-8"))
    if os.environ.get(TIGHTEN):
        bounds[kind] = tightened(counts, bounds[kind])
        BOUNDS.write_text(json.dumps(bounds, indent=2) + "\n", encoding="utf-8")
    return above(counts, bounds[kind])


def test_no_page_outgrows_its_bound() -> None:
    assert held("words", long_pages()) == {}


def test_no_page_gains_long_sentences() -> None:
    assert held("long_sentences", pages_with_long_sentences()) == {}


def test_every_bound_is_of_a_page_that_is_there() -> None:
    bounds = json.loads(BOUNDS.read_text(encoding="utf-8"))
    assert [page for kind in bounds.values() for page in kind if not (ROOT / page).exists()] == []


def test_planted_faults_are_found() -> None:
    """The control: a page too long, a sentence too long, and text that is neither."""
    long = "It " + "really " * SENTENCE_WORDS_MAX + "grows."
    assert long_sentences(f"# A {long}\n\n| {long} |\n\n```\n{long}\n```\n\nShort. Also `{long}` short.") == []
    assert long_sentences(f"Short. {long} Short.") == [long]
    assert len(long_sentences(f"- {long}\n- {long}\n- Short\n")) == 2
    assert above({"docs/new.md": 1, "docs/old.md": 4}, {"docs/old.md": 4}) == {"docs/new.md": "1 > 0"}
    assert above({"docs/old.md": 5}, {"docs/old.md": 4}) == {"docs/old.md": "5 > 4"}
    assert words("a b\n c") == 3


def test_a_bound_only_falls() -> None:
    assert tightened({"a": 2, "b": 9, "c": 1}, {"a": 3, "b": 5, "gone": 7}) == {"a": 2, "b": 5}
