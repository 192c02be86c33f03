from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def base_file() -> str:
    """A policy that uses every section. Of its tenants `acme` alone has a label, which nothing crosses."""
    return (HERE / "base.yaml").read_text()


@pytest.fixture(scope="session")
def base(base_file) -> str:
    """Return the base policy whose grant, segment and group name the label, so that they open something."""
    text = base_file
    for old, new in (
        ("    reason: joint evaluation\n", "    reason: joint evaluation\n    crosses: [region]\n"),
        ("    tokens: 512\n", "    tokens: 512\n    crosses: [region]\n"),
        ("family: {share: true,", "family: {crosses: [region], share: true,"),
    ):
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


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
