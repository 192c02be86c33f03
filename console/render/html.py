"""Documents as HTML: one file without scripts or requests, for screens (light and dark), print, and PDF.

1. A template is named by its path in the package, and lies beside the facts that it shows.
2. Everything that a template did not write itself is escaped.
3. The bytes are a function of the template and its values: no clock, no setting.
4. The HTML is well-formed XML, so a reader in any language takes it apart by its elements.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from kvcustody.audit.exports.csv_table import csv_text
from kvcustody.console.render import charts, number_format
from kvcustody.plurals import several

MACROS = "console/render/macros.html"
_LINE = 90  # letters of a command that a line of a printed page holds


class Rendered(NamedTuple):
    """A document's HTML, and the CSV files of its long tables by name."""

    html: str
    files: dict[str, bytes]


@cache
def environment() -> Environment:
    """Return the environment of all documents' templates: filters, macros, charts."""
    templates = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    names = ("count", "percent", "moment", "second", "minute", "duration", "time_text", "size", "share")
    templates.filters |= {name: getattr(number_format, name) for name in (*names, "ppm", "short", "coordinate")}
    templates.filters |= {"pick": _pick, "leaf_hash": _leaf_hash, "whole_words": _whole_words}
    templates.globals |= {
        "table": table,
        "marked": _marked,
        "when": _when,
        "period": _period,
        "length": _length,
        "several": several,
        "columns": charts.columns,
        "bars": charts.rows,
        "period_labels": charts.period_labels,
    }
    module = templates.get_template(MACROS).module
    templates.globals |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return templates


def _source(name: str) -> str | None:
    """Return a template's text, from the folders of its package (rule 1)."""
    package, _, file = name.rpartition("/")
    folders = import_module(f"kvcustody.{package.replace('/', '.')}").__path__
    paths = [path for folder in folders if (path := Path(folder, file)).is_file()]
    return paths[0].read_text(encoding="utf-8") if paths else None


def render_template(name: str, values: Mapping[str, Any]) -> Rendered:
    """Return a document by its template; the value `zone` is a time zone whose times are shown beside UTC."""
    files: dict[str, bytes] = {}
    made = environment().get_template(name).render({"zone": "UTC", **values, FILES: files})
    return Rendered(made, files)


def _marked(is_bad: bool) -> str:
    """Return the CSS class of a row that needs attention, or none."""
    return Markup(' class="marked"') if is_bad else ""


@pass_context
def _when(context: Context, at_us: int, form: str = "second") -> Markup:
    """Return a moment in UTC, with the document's zone beside it; neither breaks between lines."""
    text: str = getattr(number_format, form)(at_us)
    local = number_format.local(at_us, context["zone"]) if at_us else ""
    made = Markup('<span class="time">{}</span>').format(text)
    return made + Markup(' (<span class="time">{}</span>)').format(local) if local else made


@pass_context
def _period(context: Context, since_us: int, until_us: int) -> Markup:
    """Return a period's bounds and length."""
    return _when(context, since_us) + " to " + _when(context, until_us) + f", {_length(context, since_us, until_us)}"


@pass_context
def _length(context: Context, since_us: int, until_us: int) -> str:
    """Return a period's length, in the calendar of UTC or of the document's zone."""
    return number_format.period_length(since_us, until_us, context["zone"])


def _whole_words(text: str) -> Markup:
    """Return a command that breaks between lines only at words, unless a word is longer than a line."""
    whole = Markup('<span class="time">{}</span>')
    parts = re.split(r"(\s+)", text)
    return Markup("").join(whole.format(part) if 1 < len(part.strip()) <= _LINE else part for part in parts)


def _leaf_hash(leaf: str) -> str:
    """Return a leaf's hash (RFC 6962)."""
    return hashlib.sha256(b"\0" + leaf.encode()).hexdigest()


def _pick(rows: Any, *names: str) -> list[tuple[Any, ...]]:
    """Return these fields of each row."""
    return [tuple(getattr(row, name) for name in names) for row in rows]


# Tables of documents: the page shows the first rows, and a CSV file holds all rows of a long table.
#
# Rules of this section:
# 1. A table with a file name shows `shown` rows; where it has more, the file beside the document has every row.
# 2. The page names that file and its SHA-256, so the document's own digest covers it.
# 3. A cell has the same content on the page and in the file; a number has no separators in the file.

ROWS_SHOWN = 300
FILES = "csv_files"  # what a template's values call the files of its tables
_WIDEST_WORD = 26  # letters; a longer one may be divided, so that no column is wider than the page
_CELL = re.compile(r"<td[^>]*>(.*?)</td>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+")


@pass_context
def table(
    context: Context,
    rows: Iterable[Any],
    headings: Sequence[str],
    *,
    left: int = 1,
    file: str = "",
    shown: int = ROWS_SHOWN,
    none: str = "",
    caller: Callable[[Any], Markup],
) -> Markup:
    """Return a table whose rows the template's call block writes, each as `<tr><td>..</td>..</tr>`.

    The first `left` columns are text, the others numbers. `none` stands in the first cell where there is no row.
    """
    every = list(rows)
    lines = [str(caller(row)).strip() for row in (every if file else every[:shown])]
    if not lines:
        lines = [f'<tr><td colspan="{len(headings)}">{escape(none)}</td></tr>'] if none else []
    heads = "".join(
        f'<th scope="col"{"" if place < left else _N}>{escape(text)}</th>' for place, text in enumerate(headings)
    )
    width, widths, is_dense = column_widths(headings, lines[:shown], left)
    columns = "".join(f'<col style="width: {width:.1f}%"/>' for width in widths)
    body = "\n".join(_classed(line, left) for line in lines[:shown])
    html = (
        f'<div class="scroll"><table{_DENSE if is_dense else ""} style="width: {width:.0f}%">\n'
        f"<colgroup>{columns}</colgroup>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
    if len(every) > shown:
        html += _rest(context, len(every), shown, file, headings, lines)
    return Markup(html)  # noqa: S704 - every text in it was escaped


_TIME, _WHOLE = re.compile(r"(?<=>)\d{4}-\d\d-\d\dT[\d:.]+Z?"), r'<span class="time">\g<0></span>'
_N, _DENSE = ' class="n"', ' class="dense"'
_LETTER, _GAP = 0.82, 1.6  # percent of a page's width that a letter and the gap between columns take, at most
_MUCH = 60  # letters of a cell beyond which its length asks for no more width
_NARROWEST, _LOOSE = 45.0, 1.4  # percent of the page; how much wider a table is than its texts
_DENSER = 0.85  # of the letters of a dense table


def column_widths(headings: Sequence[str], lines: Sequence[str], left: int) -> tuple[float, list[float], bool]:
    """Return the table's width in percent of the page, those of its columns in percent of the table, and whether it is
    dense.

    No word is divided where all columns have room for their longest; long texts get what is left. A dense table has
    smaller letters. One with little in it is narrow, so that a row is read across without a gap.
    """
    rows = [[unescape(_TAG.sub("", cell)) for cell in _CELL.findall(line)] for line in lines if "colspan" not in line]
    least, whole = [], []
    for place, heading in enumerate(headings):
        texts = [row[place] for row in rows if place < len(row)]
        words = [word for text in texts for word in (text.split() if place < left else [text])]
        longest = max((len(word) for word in words if place >= left or len(word) <= _WIDEST_WORD), default=1)
        if any(len(word) > _WIDEST_WORD for word in words):
            longest = _WIDEST_WORD
        head = max(len(word) for word in heading.split() or [""]) * 1.1
        least.append(max(longest, head) * _LETTER + _GAP)
        long_text = min(max(map(len, texts), default=0), _MUCH)
        whole.append(max(long_text * _LETTER + _GAP, least[-1]))
    is_dense = sum(least) > 100
    if is_dense:
        least = [width * _DENSER for width in least]
    if sum(whole) <= 100:
        width = min(100.0, max(_NARROWEST, sum(whole) * _LOOSE))
        return width, [each * 100 / sum(whole) for each in whole], is_dense
    spare = 100 - sum(least)
    if spare <= 0:
        return 100.0, [width * 100 / sum(least) for width in least], is_dense
    more = [wide - narrow for wide, narrow in zip(whole, least, strict=True)]
    return (
        100.0,
        [narrow + spare * each / sum(more) for narrow, each in zip(least, more, strict=True)],
        is_dense,
    )


def _classed(line: str, left: int) -> str:
    """Return a row whose numbers and times have classes, and whose cells may break very long words."""
    place = -1

    def cell(found: re.Match[str]) -> str:
        nonlocal place
        place += 1
        text = found[1]
        kind = "n" if place >= left else ""
        if len(text) > _WIDEST_WORD and any(len(word) > _WIDEST_WORD for word in unescape(_TAG.sub(" ", text)).split()):
            kind = f"{kind} long".strip()
        return f'<td class="{kind}">{text}</td>' if kind else f"<td>{text}</td>"

    return line if "colspan" in line else _TIME.sub(_WHOLE, _CELL.sub(cell, line))


def _rest(context: Context, count: int, shown: int, file: str, headings: Sequence[str], lines: Sequence[str]) -> str:
    """Return the note about where the other rows are."""
    if not file:
        return f'<p class="quiet">{count - shown:,} more are in the JSON.</p>'
    rows = [[_plain(cell) for cell in _CELL.findall(line)] for line in lines]
    data = csv_text([headings, *rows]).encode()
    context[FILES][f"{file}.csv"] = data
    digest = hashlib.sha256(data).hexdigest()
    return (
        f'<p class="quiet">The first {shown:,} of {several(count, "row")}. All are in <b>{file}.csv</b>, SHA-256 '
        f'<span class="hash">{digest}</span>.</p>'
    )


def _plain(cell: str) -> str:
    text = unescape(_TAG.sub("", cell)).strip()
    return text.replace(",", "") if _NUMBER.fullmatch(text) else text
