"""Every string of a page of a report."""

from __future__ import annotations

from kvcustody.console.report.render.page_model import (
    Block,
    Chart,
    Facts,
    Items,
    Literal,
    Page,
    Paragraph,
    Signatures,
    Table,
)


def strings_of(page: Page) -> list[str]:
    """Every string that a reader of the page sees."""
    found = [page.title, page.subtitle, page.footer, page.watermark]
    found += [text for tile in page.tiles for text in (tile.value, tile.label)]
    for section in page.sections:
        found.append(section.title)
        for block in section.blocks:
            found += _strings(block)
    return found


def _strings(block: Block) -> list[str]:
    match block:
        case Paragraph(text) | Literal(text):
            return [text]
        case Table(headings, rows):
            return [*headings, *(cell for row in rows for cell in row)]
        case Facts(items):
            return [text for pair in items for text in pair]
        case Chart(figure):
            return [figure.title, *(text.text for text in figure.texts), *(name for name, _ in figure.legend)]
        case Items(items):
            return list(items)
        case Signatures(roles):
            return list(roles)
