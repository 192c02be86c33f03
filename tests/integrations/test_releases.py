"""The table of releases is that of the code, and how a release stands follows from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("newest", ROOT / "tests" / "engines" / "releases" / "newest.py")
assert _spec is not None and _spec.loader is not None
newest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(newest)
BY_NAME = {engine.name: engine for engine in newest.ENGINES}


def test_the_page_has_the_table_of_the_code() -> None:
    assert newest.table() in (ROOT / "docs" / "reference" / "engines" / "releases.md").read_text()


@pytest.mark.parametrize(
    ("name", "version", "stands"),
    [
        ("vLLM", "0.32.0", "tested"),
        ("vLLM", "0.33.0", "tested"),
        ("vLLM", "0.33.1", "accepted"),
        ("vLLM", "0.34.0", "refused"),
        ("vLLM", "0.27.1", "refused"),
        ("SGLang", "0.5.23", "tested"),
        ("SGLang", "0.5.24", "refused"),
        ("transformers", "5.19.0", "accepted"),
        ("transformers", "5.25.0", "refused"),
        ("LMCache", "0.5.7rc2", "tested"),
        ("LMCache", "0.5.7", "accepted"),
        ("LMCache", "0.5.8", "refused"),
        ("[Dynamo](dynamo.md)", "1.6.1", "tested"),
        ("[Dynamo](dynamo.md)", "1.7.0", "accepted"),
        ("[Mooncake](mooncake.md)", "0.3.13.post1", "tested"),
    ],
)
def test_how_a_release_stands(name: str, version: str, stands: str) -> None:
    assert newest.how_it_stands(BY_NAME[name], version) == stands
