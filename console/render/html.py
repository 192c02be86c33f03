"""Documents as HTML: one file without scripts or requests, for screens (light and dark), print, and the PDF's maker.

1. A template is named by its path in the package, and lies beside the facts that it shows.
2. Everything that a template did not write itself is escaped.
3. The bytes are a function of the template and its values: no clock, no setting.
4. The HTML is well-formed XML, so a reader in any language takes it apart by its elements.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from kvcustody.console.render import charts, number_format
from kvcustody.console.render.tables import FILES, table
from kvcustody.plurals import several

MACROS = "console/render/macros.html"
_LINE = 90  # letters of a command that a line of a printed page holds


class Rendered(NamedTuple):
    """A document's HTML, and the CSV files of its long tables by name."""

    html: str
    files: dict[str, bytes]


@cache
def environment() -> Environment:
    """The environment of every document's templates: filters, macros, charts."""
    made = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    names = ("count", "percent", "moment", "second", "minute", "duration", "time_text", "size", "share")
    made.filters |= {name: getattr(number_format, name) for name in (*names, "ppm", "short", "coordinate")}
    made.filters |= {"pick": _pick, "leaf_hash": _leaf_hash, "whole_words": _whole_words}
    made.globals |= {
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
    module = made.get_template(MACROS).module
    made.globals |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return made


def _source(name: str) -> str | None:
    """The text of a template, from the folders of its package (rule 1)."""
    package, _, file = name.rpartition("/")
    folders = import_module(f"kvcustody.{package.replace('/', '.')}").__path__
    paths = [path for folder in folders if (path := Path(folder, file)).is_file()]
    return paths[0].read_text(encoding="utf-8") if paths else None


def render_template(name: str, values: Mapping[str, Any]) -> Rendered:
    """A document by its template; `zone` among the values is the zone whose times stand beside UTC."""
    files: dict[str, bytes] = {}
    made = environment().get_template(name).render({"zone": "UTC", **values, FILES: files})
    return Rendered(made, files)


def _marked(is_bad: bool) -> str:
    """The class of a row that is to be looked at, where it is."""
    return Markup(' class="marked"') if is_bad else ""


@pass_context
def _when(context: Context, at_us: int, form: str = "second") -> Markup:
    """A moment in UTC, with that of the document's zone beside it, neither divided between lines."""
    text: str = getattr(number_format, form)(at_us)
    local = number_format.local(at_us, context["zone"]) if at_us else ""
    made = Markup('<span class="time">{}</span>').format(text)
    return made + Markup(' (<span class="time">{}</span>)').format(local) if local else made


@pass_context
def _period(context: Context, since_us: int, until_us: int) -> Markup:
    """A period's bounds and its length."""
    return _when(context, since_us) + " to " + _when(context, until_us) + f", {_length(context, since_us, until_us)}"


@pass_context
def _length(context: Context, since_us: int, until_us: int) -> str:
    """The length of a period, in the calendar of UTC or of the document's zone."""
    return number_format.period_length(since_us, until_us, context["zone"])


def _whole_words(text: str) -> Markup:
    """A command in which no line ends within a word, unless the word is longer than a line."""
    whole = Markup('<span class="time">{}</span>')
    parts = re.split(r"(\s+)", text)
    return Markup("").join(whole.format(part) if 1 < len(part.strip()) <= _LINE else part for part in parts)


def _leaf_hash(leaf: str) -> str:
    """The hash of a leaf (RFC 6962)."""
    return hashlib.sha256(b"\0" + leaf.encode()).hexdigest()


def _pick(rows: Any, *names: str) -> list[tuple[Any, ...]]:
    """The fields of these names, of each row."""
    return [tuple(getattr(row, name) for name in names) for row in rows]
