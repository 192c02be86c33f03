"""Tables for a spreadsheet: no cell is a formula, and one writer makes them all."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from kvcustody.audit.exports.csv_table import csv_text

PRODUCT = Path(__file__).resolve().parents[3]
ROOMS = ("allocator", "audit", "console", "governance", "integrations", "lab", "policies", "src/kvcustody")


@pytest.mark.parametrize("begins", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_what_begins_as_a_formula_does_is_a_text(begins: str) -> None:
    rows = list(
        csv.reader(io.StringIO(csv_text([("tenant", "blocks"), (f"{begins}cmd|' /C calc'!A0", -3)]), newline=""))
    )
    assert rows == [["tenant", "blocks"], [f"'{begins}cmd|' /C calc'!A0", "-3"]]


def test_a_line_end_in_a_name_begins_no_row() -> None:
    """Control: `csv` with lines that end by a line feed leaves a carriage return bare."""
    name = "acme\r=cmd()"
    assert list(csv.reader(io.StringIO(csv_text([(name, 1)]), newline=""))) == [[name, "1"]]
    bare = io.StringIO(newline="")
    csv.writer(bare, lineterminator="\n").writerow([name])
    assert '"' not in bare.getvalue() and "\r=cmd()" in bare.getvalue()


def test_what_is_read_again_is_what_was_written() -> None:
    """Numbers, quotes, line breaks and names in other scripts stay as they are."""
    cells = ["Łukasz", 'a "quoted" name', "two\nlines", "a,b", ""]
    assert list(csv.reader(io.StringIO(csv_text([cells]), newline=""))) == [cells]


def test_nobody_writes_csv_by_hand() -> None:
    writers = {
        str(path.relative_to(PRODUCT))
        for room in ROOMS
        for path in (PRODUCT / room).rglob("*.py")
        if any(f"csv.{name}(" in path.read_text() for name in ("writer", "DictWriter"))
    }
    assert writers == {"audit/exports/csv_table.py"}
