"""Tables of documents: long ones in a file beside the document, widths in which no word is divided."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from typing import Any

import pytest

from kvcustody.console.render.html import ROWS_SHOWN, Rendered, column_widths, environment

DOCUMENT = """<html><body><main>{% call(row) table(rows, headings, left=1, file=file, shown=shown, none="nothing") %}
<tr{{ marked(row[1] < 0) }}><td>{{ row[0] }}</td><td>{{ row[1] | count }}</td></tr>
{% endcall %}</main></body></html>"""


def made(rows: Sequence[Any], *, file: str = "figures", shown: int = 3) -> Rendered:
    files: dict[str, bytes] = {}
    values = {"rows": rows, "headings": ["name", "figure"], "file": file, "shown": shown}
    return Rendered(environment().from_string(DOCUMENT).render(csv_files=files, **values), files)


ROWS = [("acme", 1_234_567), ("<b>", 2), ("=1+1", -3), ("a, b", 4)]


def test_a_long_table_is_whole_in_a_file_that_the_page_names_with_its_digest() -> None:
    page = made(ROWS)
    [(name, data)] = page.files.items()
    assert name == "figures.csv" and f"<b>{name}</b>" in page.html
    assert hashlib.sha256(data).hexdigest() in page.html
    assert "The first 3 of 4 rows." in page.html and "a, b" not in page.html
    rows = list(csv.reader(io.StringIO(data.decode(), newline="")))
    assert rows == [["name", "figure"], ["acme", "1234567"], ["<b>", "2"], ["'=1+1", "'-3"], ["a, b", "4"]]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_short_table_has_no_file(count: int) -> None:
    page = made(ROWS[:count])
    assert page.files == {} and page.html.count("<tr") == 1 + max(1, count)
    assert ("nothing</td>" in page.html) is (count == 0)


def test_without_a_file_the_page_says_where_the_rest_is() -> None:
    page = made(ROWS, file="")
    assert page.files == {} and "1 more are in the JSON." in page.html


def test_what_a_row_says_is_escaped_and_a_bad_one_is_marked() -> None:
    page = made(ROWS)
    assert "&lt;b&gt;" in page.html and '<tr class="marked"><td>=1+1</td>' in page.html
    assert '<td class="n">1,234,567</td>' in page.html
    assert ROWS_SHOWN == 300


def row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def test_every_column_has_room_for_its_longest_word() -> None:
    """Of seven columns of a page with 122 letters; where they have more, letters are smaller."""
    words = (
        "identifier",
        "2026-11-30T22:13:45Z",
        "2026-11-30T22:13:45Z",
        "a sentence of some words " * 4,
        "4,096",
    )
    width, columns, is_dense = column_widths(["a"] * 5, [row(*words)], 4)
    assert width == 100 and round(sum(columns)) == 100 and not is_dense
    for share, cell in zip(columns, words, strict=True):
        assert share >= 0.82 * max(map(len, cell.split())), cell
    assert columns[3] == max(columns), "what is left goes to the long text"
    width, columns, is_dense = column_widths(["a"] * 9, [row(*["2026-11-30T22:13"] * 9)], 9)
    assert width == 100 and round(sum(columns)) == 100 and is_dense


def test_a_table_with_little_in_it_is_narrow() -> None:
    width, columns, _ = column_widths(["event", "leaves"], [row("receipt", "7")], 1)
    assert width == 45 and round(sum(columns)) == 100


def test_a_word_that_no_page_holds_may_be_divided() -> None:
    page = made([("x" * 40, 1)])
    assert f'<td class="long">{"x" * 40}</td>' in page.html
    assert 'class="long"' not in made([("x " * 40, 1)]).html, "control"
