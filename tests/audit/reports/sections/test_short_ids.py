"""Ids of processes in a report's text: short, and different from one another."""

from __future__ import annotations

import pytest

from kvcustody.audit.reports.short_ids import short_ids

ONE = "d0c51234567890abcdef1234567890ab"


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([ONE], ["d0c51234"]),
        ([ONE, "e" + ONE[1:]], ["d0c51234", "e0c51234"]),
        ([ONE, ONE[:8] + "f" + ONE[9:]], ["d0c512345", "d0c51234f"]),
        ([ONE, ONE[:14] + "f" + ONE[15:]], ["d0c51234567890a", "d0c51234567890f"]),
        ([ONE, ONE[:15] + "f" + ONE[16:]], ["567890ab", "567890ab"]),
        (["0" * 31 + "1", "0" * 31 + "2"], ["00000001", "00000002"]),
    ],
)
def test_the_shortest_beginning_that_tells_all_apart_else_the_last_letters(ids: list[str], shown: list[str]) -> None:
    assert [short_ids(ids)(each) for each in ids] == shown
