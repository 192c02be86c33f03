"""A page as one HTML file: no scripts, no requests, light, dark and print."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvcustody.console.report.blocks import Block, Page

_environment = Environment(
    loader=PackageLoader("kvcustody.console.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render_html(page: Page) -> bytes:
    """The file's bytes; a function of the page alone."""
    text = _environment.get_template("page.html").render(page=page, kind_of=_kind_of, number=_number)
    return text.encode()


def _kind_of(block: Block) -> str:
    return type(block).__name__


def _number(value: float) -> str:
    """A coordinate with one digit after the point, and none where it is whole."""
    return f"{value:.1f}".removesuffix(".0")
