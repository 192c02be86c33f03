"""kvcustody is on no package index: no page tells a reader to install it from one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_INSTALLS = re.compile(r"\bpip3? install (?P<what>[^\n`#]*)")
_FROM_AN_INDEX = re.compile(r"(?<![\w./-])kvcustody(-testkit)?(?![\w.-]*\.whl)(\[[^]]*\])?(?=$|[\s'\",;]|[=<>~])")


def claims(text: str) -> list[str]:
    """The commands that ask an index for kvcustody."""
    return [found[0].strip() for found in _INSTALLS.finditer(text) if _FROM_AN_INDEX.search(found["what"])]


def test_no_page_installs_kvcustody_from_an_index() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
    pages += (ROOT / "audit" / "reports" / "sections").glob("*.html")
    assert len(pages) > 80
    texts = {page: page.read_text(encoding="utf-8") for page in pages if page.suffix in {".md", ".py", ".html"}}
    assert {page.relative_to(ROOT).as_posix(): claims(text) for page, text in texts.items() if claims(text)} == {}


@pytest.mark.parametrize(
    ("line", "is_claim"),
    [
        ("pip install kvcustody", True),
        ("pip install 'kvcustody[all]'", True),
        ("pip install pyzmq kvcustody==0.1.0", True),
        ("pip install kvcustody-testkit", True),
        ("pip install './kvcustody[all]'", False),
        ("pip install ./kvcustody ./kvcustody/packaging/testkit", False),
        ("pip install 'dist/kvcustody-0.1.0-py3-none-any.whl[service]'", False),
        ("pip install vllm", False),
    ],
)
def test_a_claim_is_seen(line: str, is_claim: bool) -> None:
    assert bool(claims(line)) is is_claim
