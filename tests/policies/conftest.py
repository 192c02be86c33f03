from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def base() -> str:
    """A policy that uses every section (tests edit its text)."""
    return (HERE / "base.yaml").read_text()


@pytest.fixture
def compiled(base):
    """Compile the base policy with pairs of (old, new) text replaced."""

    def build(*edits, revision=1, revoked=frozenset()):
        text = base
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new, 1)
        return compile_policy(load_policy(text, name="p.yaml"), revision=revision, revoked=revoked)

    return build
