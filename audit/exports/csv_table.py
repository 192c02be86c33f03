"""Tables for a spreadsheet: CSV (RFC 4180) in which no cell is a formula.

Names come from tenants and requests. A text that a spreadsheet would run is written behind an apostrophe. Lines end as
the RFC says: `csv` then quotes a cell with either half of a line's end, which would begin a row of its own elsewise.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

_FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # what begins one, in full width too


def disarmed(cell: object) -> object:
    """Return a cell's value; a text that begins like a formula gets a leading apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV, after a header if there is one."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerows([disarmed(cell) for cell in row] for row in rows)
    return text.getvalue()
