"""What stands on several pages has one source in code: releases of engines, what was never run, and counts of things.

Pages of measurements and decisions are left out: each is of the release that it was made with.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcustody.audit.reports.framework import NAMES
from kvcustody.governance.orphans.finding import CLASSES
from kvcustody.testkit.conformance.mutants import native, reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OF_THEIR_TIME = ("docs/build/adr/", "docs/reference/measurements/", "docs/concepts/policy/forecast.md")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*sorted(DOCS.rglob("*.md")), ROOT / "README.md")
    if not path.relative_to(ROOT).as_posix().startswith(OF_THEIR_TIME)
}
_spec = importlib.util.spec_from_file_location("newest", ROOT / "tests" / "engines" / "releases" / "newest.py")
assert _spec is not None and _spec.loader is not None
newest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(newest)
ENGINES = {re.sub(r"\[(\w+)\].*", r"\1", engine.name): engine for engine in newest.ENGINES}
_RELEASE = re.compile(
    rf"\b({'|'.join(ENGINES)})(?:'s)? (?:releases? )?(\d+\.\d+(?:\.\d+)?(?:\.?(?:rc|post)\d+)?)"
    r"(?:\s?(?:–|-|to|up to)\s?(\d+\.\d+(?:\.\d+)?))?"
)
_RANGE = re.compile(r"`>=(\d[\d.]*),<(\d[\d.]*)`")


def stands(engine: str, version: str) -> bool:
    """Whether a release, or one of a line such as 0.32, is accepted at start or was tested."""
    one = ENGINES[engine]
    if version in one.tested or any(each.startswith(f"{version}.") for each in one.tested):
        return True
    numbers = newest.numbers(version)
    return bool(one.beyond and one.first[: len(numbers)] <= numbers < one.beyond)


def whole_range(engine: str, first: str, last: str) -> bool:
    """Whether `first` to `last` is all that is accepted, and no more."""
    one = ENGINES[engine]
    low, high = newest.numbers(first), newest.numbers(last)
    return bool(low == one.first[: len(low)] and (*high[:-1], high[-1] + 1) == one.beyond[: len(high)])


def wrong_releases(text: str) -> Iterator[str]:
    """Each mention of a release that the code does not accept, or of a range that is not the code's."""
    for engine, first, last in _RELEASE.findall(text):
        if not (whole_range(engine, first, last) if last else stands(engine, first)):
            yield f"{engine} {first}{f' to {last}' if last else ''}"
    accepted = {(one.first, one.beyond) for one in ENGINES.values()}
    for first, beyond in _RANGE.findall(text):
        if (newest.numbers(first), newest.numbers(beyond)) not in accepted:
            yield f">={first},<{beyond}"


@pytest.mark.parametrize("page", PAGES)
def test_releases_are_those_that_the_code_accepts(page: str) -> None:
    assert list(wrong_releases(PAGES[page])) == []


def test_a_wrong_release_is_found() -> None:
    """The control: a release that is refused, a range that ends too early, and bounds of nobody."""
    planted = "vLLM 0.28–0.32, vLLM 0.27.1, SGLang 0.5.24, transformers 5.19–5.24, vLLM 0.28 to 0.33, `>=5.19,<5.26`"
    assert list(wrong_releases(planted)) == ["vLLM 0.28 to 0.32", "vLLM 0.27.1", "SGLang 0.5.24", ">=5.19,<5.26"]


def test_a_mention_is_found_on_the_pages() -> None:
    """Else the test above passes because it reads nothing."""
    mentions = [found for text in PAGES.values() for found in _RELEASE.findall(text)]
    assert len(mentions) >= 10 and {engine for engine, _, _ in mentions} >= {
        "vLLM",
        "SGLang",
        "transformers",
        "LMCache",
    }


# -- what was never run ---------------------------------------------------------------------------------------------


def without_the_claim(claim: str, pages: dict[str, str], named: tuple[str, ...]) -> list[str]:
    """The pages that must say it, and do not."""
    return [page for page in named if claim not in " ".join(pages[page].split()).lower()]


NEVER_RUN = {
    "never run on tensorrt-llm": (
        "README.md",
        "docs/reference/engines/tensorrt-llm.md",
        "docs/reference/engines/releases.md",
    ),
    "never run": ("docs/how-to/storage/key-services.md", "docs/how-to/operate/install.md", "docs/index.md"),
}


@pytest.mark.parametrize("claim", NEVER_RUN)
def test_pages_say_what_was_never_run(claim: str) -> None:
    assert "TensorRT-LLM" not in ENGINES, "it has a suite now: its pages may stop saying that it was never run"
    assert without_the_claim(claim, PAGES, NEVER_RUN[claim]) == []


def test_vllm_was_not_run_on_a_gpu() -> None:
    """Once a kept run of a device has vLLM's stage, the page has to say so."""
    kept = (ROOT / "benchmarks" / "results").glob("gpu-*.json")
    ran = any(json.loads(one.read_text())["stages"].get("vllm_engine", {}).get("status") == "PASS" for one in kept)
    page = "docs/reference/engines/vllm.md"
    assert (without_the_claim("not tested on a gpu", PAGES, (page,)) == []) is not ran


def test_a_claim_that_is_gone_is_found() -> None:
    assert without_the_claim("never run", {"a": "It was\nnever run.", "b": "It runs."}, ("a", "b")) == ["b"]


# -- counts ---------------------------------------------------------------------------------------------------------

WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *(
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
        "twenty",
    ),
)


def _attacks() -> int:
    claims = (DOCS / "reference" / "security" / "claims.md").read_text(encoding="utf-8")
    return len(set(re.findall(r"^\| ([A-Z]\d+) \|", claims, re.MULTILINE)))


COUNTS: dict[str, Callable[[], int]] = {
    r"gdpr` and ([\w-]+) others": lambda: len(NAMES) - 1,
    r"\b([\w-]+) frameworks\b": lambda: len(NAMES),
    r"\b([\w-]+) classes of (?:orphans|findings)\b": lambda: len(CLASSES),
    r"\b(\d+) attacks\b": _attacks,
    r"\b(\d+) of \d+ on an engine with an allocator": lambda: len(reference.MUTANTS),
    r"\b(\d+) of \d+ on ours": lambda: len(native.MUTANTS),
    r"\b([\w-]+) policies to start from": lambda: len(list((ROOT / "policies" / "library").glob("*.yaml"))),
    r"\b([\w-]+) shelves\b": lambda: len({one.relative_to(DOCS).parts[0] for one in DOCS.rglob("*/*.md")}),
}


def wrong_counts(text: str) -> Iterator[str]:
    """Each count that is not the code's; words that are no number say nothing."""
    for pattern, count in COUNTS.items():
        for said in re.findall(pattern, text):
            number = int(said) if said.isdigit() else WORDS.index(said.lower()) if said.lower() in WORDS else None
            if number is not None and number != count():
                yield f"{pattern}: {said}, and it is {count()}"


@pytest.mark.parametrize("page", PAGES)
def test_counts_are_those_of_the_code(page: str) -> None:
    assert list(wrong_counts(" ".join(PAGES[page].split()))) == []


def test_a_wrong_count_is_found() -> None:
    planted = "`gdpr` and three others; 7 attacks; several frameworks; two classes of orphans; six shelves"
    assert len(list(wrong_counts(planted))) == 4
