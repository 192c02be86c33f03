"""A document's HTML read back into its parts: sections, paragraphs, facts, tables, lists, figures.

The HTML is well-formed XML, so a parser that knows nothing of HTML reads it. An element that a document's templates do
not use fails the reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element, fromstring

from kvcustody.audit.reports.model import Report
from kvcustody.console.render.document_forms import rendered

_SVG = "{http://www.w3.org/2000/svg}"


class Paragraph(NamedTuple):
    """Running text, or the heading of a part; `mark` is "", "good", "bad", "quiet" or "heading"."""

    text: str
    mark: str = ""


class Table(NamedTuple):
    """Rows under headings; `bad` are the places of rows that are marked."""

    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    bad: frozenset[int] = frozenset()


class Facts(NamedTuple):
    """Names and what they are."""

    items: tuple[tuple[str, str], ...]


class Literal(NamedTuple):
    """Text as it stands."""

    text: str


class Chart(NamedTuple):
    """A figure: its title, the words in it, the names of its legend."""

    title: str
    texts: tuple[str, ...]
    legend: tuple[str, ...]


class Items(NamedTuple):
    """A list of sentences."""

    items: tuple[str, ...]


Block = Paragraph | Table | Facts | Literal | Chart | Items


class Section(NamedTuple):
    """A section without its number."""

    title: str
    blocks: tuple[Block, ...]


class Tile(NamedTuple):
    """A figure that is read first."""

    value: str
    label: str
    mark: str


class Page(NamedTuple):
    """A whole document; `front` is what stands before the first section."""

    title: str
    subtitle: str
    tiles: tuple[Tile, ...]
    front: tuple[Block, ...]
    sections: tuple[Section, ...]
    footer: str
    watermark: str

    def section(self, title: str) -> Section:
        """The one section of this title."""
        [found] = [section for section in self.sections if section.title == title]
        return found

    def blocks(self) -> Iterator[Block]:
        """The blocks of all sections."""
        for section in self.sections:
            yield from section.blocks


def page_of(report: Report) -> Page:
    """A report's page, as its HTML says it."""
    return read_page(rendered(report).html)


def read_page(html: str) -> Page:
    """The parts of a document's HTML."""
    root = fromstring(html)
    body = root.find("body")
    main = root.find("body/main")
    assert body is not None and main is not None
    sections, front, tiles = [], list[Block](), list[Tile]()
    for element in main:
        if element.tag == "section":
            heading = element.find("h2")
            assert heading is not None
            blocks = tuple(_blocks(child for child in element if child is not heading))
            sections.append(Section(_text(heading).partition(". ")[2], blocks))
        elif element.tag not in ("footer", "nav", "h1"):
            front += _blocks([element])
    for element in main.iter("div"):
        if element.get("class") == "tile":
            value, label = element
            tiles.append(Tile(_text(value), _text(label), value.get("class", "")))
    leads = [_text(element) for element in main.iter("p") if element.get("class") == "lead"]
    marks = [_text(element) for element in body if element.get("class") == "watermark"]
    [title] = [_text(element) for element in main.iter("h1")]
    [footer] = [_text(element) for element in main.iter("footer")]
    return Page(title, "".join(leads), tuple(tiles), tuple(front), tuple(sections), footer, "".join(marks))


def strings_of(page: Page) -> list[str]:
    """Every string that a reader of the page sees."""
    texts = [page.title, page.subtitle, page.footer, page.watermark]
    texts += [text for tile in page.tiles for text in (tile.value, tile.label)]
    for block in page.front:
        texts += _strings(block)
    for section in page.sections:
        texts.append(section.title)
        for block in section.blocks:
            texts += _strings(block)
    return texts


def _strings(block: Block) -> list[str]:
    match block:
        case Paragraph(text) | Literal(text):
            return [text]
        case Table(headings, rows):
            return [*headings, *(cell for row in rows for cell in row)]
        case Facts(items):
            return [text for pair in items for text in pair]
        case Chart(title, texts, legend):
            return [title, *texts, *legend]
        case Items(items):
            return list(items)


def _blocks(elements: Iterator[Element] | Sequence[Element]) -> Iterator[Block]:
    for element in elements:
        kind = element.get("class", "")
        match element.tag:
            case "p":
                yield Paragraph(_text(element), kind)
            case "h3":
                yield Paragraph(_text(element), "heading")
            case "pre":
                yield Literal("".join(element.itertext()))
            case "ul":
                yield Items(tuple(map(_text, element)))
            case "table" if kind.startswith("facts"):
                rows = [tuple(map(_text, row)) for row in element.iter("tr")]
                yield Facts(tuple((name, value) for name, value in rows))
            case "table":
                yield _table(element)
            case "figure":
                yield _figure(element)
            case "div" if kind != "tiles":
                yield from _blocks(list(element))
            case "div" | "h1" | "h2":
                continue
            case other:
                raise AssertionError(f"a document has no element `{other}`")


def _table(element: Element) -> Table:
    headings = tuple(_text(head) for head in element.iter("th"))
    lines = element.findall("tbody/tr")
    rows = []
    for line in lines:
        cells = tuple(map(_text, line))
        if line[0].get("colspan"):
            cells += ("",) * (int(line[0].get("colspan", "1")) - 1)
        assert len(cells) == len(headings), (headings, cells)
        rows.append(cells)
    bad = frozenset(place for place, line in enumerate(lines) if line.get("class") == "marked")
    return Table(headings, rows, bad)


def _figure(element: Element) -> Chart:
    caption = element.find("figcaption")
    assert caption is not None
    texts = tuple(_text(word) for word in element.iter(f"{_SVG}text"))
    legend = tuple(_text(name) for name in caption.findall("span/span"))
    return Chart((caption.text or "").strip(), texts, legend)


def _text(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())
