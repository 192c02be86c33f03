"""Counts in sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcustody.plurals import several

PRODUCT = Path(__file__).parent.parent
BARE = re.compile(
    r"\{[^{}\"']+\} (?:more )?(?:gaps|leaves|rows|logs|exceptions|identities|custodies|strata|findings)\b"
)
IN_SENTENCES = ("audit/reports", "audit/verify", "console", "lab")


@pytest.mark.parametrize(
    ("number", "one", "said"),
    [
        (1, "gap", "1 gap"),
        (0, "gap", "0 gaps"),
        (2_000, "leaf", "2,000 leaves"),
        (2, "root leaf", "2 root leaves"),
        (2, "identity", "2 identities"),
        (2, "key", "2 keys"),
        (2, "process", "2 processes"),
        (2, "hash", "2 hashes"),
        (2, "epoch", "2 epochs"),
        (2, "stratum", "2 strata"),
    ],
)
def test_a_count_agrees_with_its_noun(number: int, one: str, said: str) -> None:
    assert several(number, one) == said
    assert several(1, one) == f"1 {one}"


def test_no_sentence_of_a_report_or_a_command_has_one_gaps() -> None:
    """Control: the pattern finds such a sentence."""
    assert BARE.search('f"{report.losses.gaps:,} gaps: records that are not there"')
    bare = [
        f"{file.relative_to(PRODUCT)}: {line.strip()}"
        for folder in IN_SENTENCES
        for file in sorted((PRODUCT / folder).rglob("*.py"))
        for line in file.read_text().splitlines()
        if BARE.search(line) and ('f"' in line or "f'" in line)
    ]
    assert bare == []
