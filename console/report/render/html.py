"""A page as one HTML file: no scripts, no requests, light, dark and print."""

from __future__ import annotations

import re

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from kvcustody.console.report.render.page_model import Block, Page

_environment = Environment(
    loader=PackageLoader("kvcustody.console.report.render", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


_TIME = re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z?")


def render_html(page: Page) -> bytes:
    """The file's bytes; a function of the page alone."""
    names = {"kind_of": _kind_of, "number": _number, "unbroken": _unbroken}
    return _environment.get_template("page.html").render(page=page, **names).encode()


def _kind_of(block: Block) -> str:
    return type(block).__name__


def _unbroken(text: str) -> Markup:
    """Text in which no time is divided between two lines: a browser would do so after a hyphen."""
    return Markup(_TIME.sub(r'<span class="time">\g<0></span>', str(escape(text))))  # noqa: S704 - escaped here


def _number(value: float) -> str:
    """A coordinate with one digit after the point, and none where it is whole."""
    return f"{value:.1f}".removesuffix(".0")
