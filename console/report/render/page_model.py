"""The parts that a page is made of, whatever it is rendered to; every word a reader sees is in one of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.console.report.render.charts import Figure


class Paragraph(NamedTuple):
    """Running text; `mark` is "", "good", "bad" or "quiet"."""

    text: str
    mark: str = ""


class Table(NamedTuple):
    """Rows under headings. The first `left` columns are text, the rest numbers; `widths` are shares of the page."""

    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    left: int = 1
    widths: tuple[float, ...] = ()
    bad: frozenset[int] = frozenset()  # rows to be marked


class Facts(NamedTuple):
    """Names and what they are."""

    items: Sequence[tuple[str, str]]


class Literal(NamedTuple):
    """Text as it stands: a query, a command, a note."""

    text: str


class Chart(NamedTuple):
    """A figure."""

    figure: Figure


class Items(NamedTuple):
    """A list of sentences."""

    items: Sequence[str]


class Signatures(NamedTuple):
    """Lines to be signed: who, and as what."""

    roles: tuple[str, ...]


Block = Paragraph | Table | Facts | Literal | Chart | Items | Signatures


class Section(NamedTuple):
    """A heading and what stands under it; `begins_page`: nothing stands above it on its sheet."""

    title: str
    blocks: tuple[Block, ...]
    begins_page: bool = False


class Tile(NamedTuple):
    """A figure that is read first; `mark` as in `Paragraph`."""

    value: str
    label: str
    mark: str = ""


class Page(NamedTuple):
    """A whole page; `watermark` stands across every sheet of it, `at_us` is the date of the document (UTC)."""

    title: str
    subtitle: str
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    footer: str
    watermark: str = ""
    at_us: int = 0
