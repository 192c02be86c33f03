"""A page as PDF, by reportlab (the extra `reports`): the same words and charts as the HTML, set for A4.

1. The bytes are a function of the page alone: no time but the page's own, no random id, our own fonts or standard ones.
2. A section begins a page where little room is left below its heading; what is signed is never parted.
3. It is tagged (`pdf_tags`): headings, paragraphs, lists, tables with their heads, figures with their words.
4. What the standard fonts lack is set in an embedded one (`fonts/`): Latin of every language, Greek, Cyrillic, Armenian
   and Georgian. A character that it lacks too is written as its code point, and never dropped: a section at the end
   names each, and says where the exact text is. Where a page is `addressed` to somebody, it is refused by name instead.
"""

from __future__ import annotations

import io
import itertools
import re
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from kvcustody.console.report.render.charts import WIDTH, Figure
from kvcustody.console.report.render.page_model import (
    Block,
    Chart,
    Facts,
    Items,
    Literal,
    Page,
    Paragraph,
    Section,
    Signatures,
    Table,
    Tile,
)
from kvcustody.console.report.render.pdf_tags import Element, Tags, artifact, ruled, tagged
from kvcustody.errors import ConfigError

INK, SOFT, LINE, TINT, GOOD, BAD = "#1c2126", "#59626b", "#c9ced2", "#f3f4f2", "#176b4d", "#b3261e"
SERIES = {1: "#2a6f97", 2: "#e08e2b", 3: "#8a5a9e", 4: "#b5483a", 5: "#8c979f"}
_MARKS = {"": INK, "good": GOOD, "bad": BAD, "quiet": SOFT}
_GAP = "&nbsp;" * 3
_ROOM = 250  # points that a section wants below its heading; else it begins a page
_FACTS_WHOLE = 12  # so many are not divided between pages
_TABLE_ROOM = 150  # points for a table's lead, its head and two rows


def render_pdf(page: Page, *, addressed: bool = False) -> bytes:
    """The file's bytes; raises `ConfigError` where reportlab is not installed, and as rule 4 says."""
    try:
        if addressed:
            _check_glyphs(page)
        return _Setter().render(_explained(page))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a PDF needs `{error.name}`: install kvcustody with the extra `reports`", missing=error.name
        ) from None


class _Setter:
    """Sets blocks as reportlab's flowables."""

    def __init__(self) -> None:
        from reportlab.lib import colors, pagesizes, styles, units
        from reportlab.platypus import (
            CondPageBreak,
            Flowable,
            KeepTogether,
            LongTable,
            PageBreak,
            Preformatted,
            SimpleDocTemplate,
            Spacer,
        )
        from reportlab.platypus import Paragraph as Text

        self._tags = Tags()
        self._tagged_text, self._long_table, self._keep = tagged(Text), ruled(LongTable), KeepTogether
        self._drawn = tagged(_drawing_class(Flowable))
        self._room, self._break = CondPageBreak, PageBreak
        self._literal, self._document, self._space = tagged(Preformatted), SimpleDocTemplate, Spacer
        self._color: Callable[[str], Any] = colors.HexColor
        self._page_size = pagesizes.A4
        self._margin = 16 * units.mm
        self._width = self._page_size[0] - 2 * self._margin - 12  # a frame's own padding
        self._style = styles.ParagraphStyle
        self._body = self._named(size=8.8, leading=12.2, after=5)
        self._cell, self._number = (
            self._named(size=6.9, leading=8.6),
            self._named(size=6.9, leading=8.6, align=2),
        )
        self._head = self._named(size=6.9, leading=8.6, color=SOFT, bold=True)
        self._head_number = self._named(size=6.9, leading=8.6, color=SOFT, bold=True, align=2)
        self._makers: dict[type, Callable[[Any], list[Any]]] = {
            Paragraph: self._paragraph,
            Literal: self._preformatted,
            Facts: self._facts,
            Items: self._items,
            Signatures: self._signatures,
            Chart: self._chart,
            Table: self._table,
        }

    def render(self, page: Page) -> bytes:
        """The whole document."""
        out = io.BytesIO()
        document = self._document(
            out,
            pagesize=self._page_size,
            leftMargin=self._margin,
            rightMargin=self._margin,
            topMargin=self._margin,
            bottomMargin=self._margin + 6,
            title=page.title,
            author="kvcustody",
            lang="en",
            invariant=1,
        )
        title = self._named(size=17, leading=21, after=3, bold=True)
        flow: list[Any] = [
            self._text(safe(page.title), title, self._tags.root.add("H1")),
            self._text(safe(page.subtitle), self._named(size=9, leading=12.5, after=10, color=SOFT)),
        ]
        if page.tiles:
            flow += self._tiles(page.tiles)
        for number, section in enumerate(page.sections, 1):
            flow += self._section(number, section)
        note = plain(page.footer)

        def decorate(canvas: Any, template: Any) -> None:
            with artifact(canvas):
                canvas.setFont(font_of(note, "Helvetica"), 7)
                canvas.setFillColor(self._color(SOFT))
                canvas.drawString(self._margin, 22, note)
                canvas.setFont("Helvetica", 7)
                canvas.drawRightString(self._page_size[0] - self._margin, 22, f"page {template.page}")
                if page.watermark:
                    self._watermark(canvas, plain(page.watermark))

        canvas_class = _canvas_class(self._tags, page.at_us)
        document.build(flow, onFirstPage=decorate, onLaterPages=decorate, canvasmaker=canvas_class)
        return out.getvalue()

    def _text(self, text: str, style: Any, tag: Element | None = None, **more: Any) -> Any:
        """Running text; a paragraph unless `tag` says what it is."""
        made = self._tagged_text(text, style, **more)
        made.tag = tag or self._tags.root.add("P")
        return made

    def _watermark(self, canvas: Any, text: str) -> None:
        """Across the sheet, faint enough to read through."""
        width, height = self._page_size
        canvas.saveState()
        canvas.translate(width / 2, height / 2)
        canvas.rotate(52)
        canvas.setFont(font_of(text, "Helvetica-Bold"), 34)
        canvas.setFillColor(self._color(BAD), alpha=0.14)
        canvas.drawCentredString(0, 0, text)
        canvas.restoreState()

    def _section(self, number: int, section: Section) -> list[Any]:
        heading = self._text(
            f"{number}. {safe(section.title)}",
            self._named(size=12.5, leading=16, before=13, after=5, bold=True, keep=True),
            self._tags.root.add("H2"),
        )
        flow = [heading]
        for block, following in itertools.zip_longest(section.blocks, section.blocks[1:]):
            leads = isinstance(block, Paragraph) and isinstance(following, Table)
            if leads or isinstance(block, Table):
                flow.append(self._room(_TABLE_ROOM))
            made = self._block(block)
            made[-1].keepWithNext = isinstance(block, Paragraph) and isinstance(following, Facts)
            flow += made
        signed = any(isinstance(block, Signatures) for block in section.blocks)
        if signed:
            return [self._keep(flow)]
        return [self._break() if section.begins_page else self._room(_ROOM), *flow]

    def _block(self, block: Block) -> list[Any]:
        return self._makers[type(block)](block)

    def _paragraph(self, block: Paragraph) -> list[Any]:
        bold = block.mark == "bad"
        return [
            self._text(
                safe(block.text),
                self._named(size=8.8, leading=12.2, after=5, color=_MARKS[block.mark], bold=bold),
            )
        ]

    def _preformatted(self, block: Literal) -> list[Any]:
        text = plain(block.text)
        style = self._style(
            "literal",
            fontName=font_of(text, "Courier"),
            fontSize=7,
            leading=9.2,
            textColor=self._color(INK),
            backColor=self._color(TINT),
            borderPadding=5,
            spaceBefore=6,
            spaceAfter=11,
        )
        made = self._literal(text, style, maxLineLength=116, newLineChars="")
        made.tag = self._tags.root.add("P")
        return [made]

    def _facts(self, block: Facts) -> list[Any]:
        tag, rows = self._tags.root.add("Table"), []
        for name, value in block.items:
            row = tag.add("TR")
            head = self._named(size=8, leading=10.5, color=SOFT)
            rows.append(
                [
                    self._text(safe(name), head, row.add("TH", scope="Row")),
                    self._text(safe(value), self._named(size=8, leading=10.5), row.add("TD")),
                ]
            )
        table = self._long_table(rows, colWidths=[self._width * 0.36, self._width * 0.64])
        whole = [("NOSPLIT", (0, 0), (-1, -1))] if len(rows) <= _FACTS_WHOLE else []
        table.setStyle([("VALIGN", (0, 0), (-1, -1), "TOP"), *whole, *_padding(0, 1.5)])
        return [table, self._space(1, 6)]

    def _items(self, block: Items) -> list[Any]:
        style = self._named(size=8.8, leading=12, after=3, indent=10)
        tag = self._tags.root.add("L")
        return [
            self._text(safe(item), style, tag.add("LI").add("LBody"), bulletText="\u2022")
            for item in block.items
        ]

    def _signatures(self, block: Signatures) -> list[Any]:
        style = self._named(size=8, leading=10, color=SOFT)
        cells = [self._text(f"{safe(role)}: name, date, signature", style) for role in block.roles]
        rows = [cells[place : place + 2] for place in range(0, len(cells), 2)]
        rows[-1] += [""] * (2 - len(rows[-1]))
        table = self._long_table(rows, colWidths=[self._width / 2] * 2, rowHeights=[46] * len(rows))
        line = ("LINEBELOW", (0, 0), (-1, -1), 0.6, self._color(SOFT))
        table.setStyle([("VALIGN", (0, 0), (-1, -1), "TOP"), line, *_padding(0, 4)])
        return [self._space(1, 10), table]

    def _table(self, block: Table) -> list[Any]:
        count = len(block.headings)
        widths = block.widths or _even(count, block.left)
        tag = self._tags.root.add("Table")
        top = tag.add("TR")
        heads = [
            self._text(
                safe(text),
                self._head if place < block.left else self._head_number,
                top.add("TH", scope="Column"),
            )
            for place, text in enumerate(block.headings)
        ]
        rows = []
        for row in block.rows:
            line = tag.add("TR")
            rows.append(
                [
                    self._text(safe(cell), self._cell if place < block.left else self._number, line.add("TD"))
                    for place, cell in enumerate(row)
                ]
            )
        table = self._long_table(
            [heads, *rows], colWidths=[self._width * share for share in widths], repeatRows=1
        )
        marked = [
            ("BACKGROUND", (0, place + 1), (-1, place + 1), self._color("#fbeceb"))
            for place in sorted(block.bad)
        ]
        table.setStyle(
            [
                ("VALIGN", (0, 0), (-1, -1), "TOP"),
                ("VALIGN", (0, 0), (-1, 0), "BOTTOM"),
                ("LINEBELOW", (0, 0), (-1, -1), 0.4, self._color(LINE)),
                *_padding(2.5, 2.2),
                *([("NOSPLIT", (0, -2), (-1, -1))] if len(rows) > 2 else []),  # no last row alone on a page
                *marked,
            ]
        )
        return [table, self._space(1, 9)]

    def _tiles(self, tiles: Sequence[Tile]) -> list[Any]:
        value = {
            mark: self._named(size=14, leading=18, bold=True, color=color) for mark, color in _MARKS.items()
        }
        label = self._named(size=7, leading=8.8, color=SOFT)
        rows = [
            [
                [self._text(safe(tile.value), value[tile.mark]), self._text(safe(tile.label), label)]
                for tile in tiles[place : place + 3]
            ]
            for place in range(0, len(tiles), 3)
        ]
        rows[-1] += [""] * (3 - len(rows[-1]))  # type: ignore[list-item]
        table = self._long_table(rows, colWidths=[self._width / 3] * 3)
        grid = ("GRID", (0, 0), (-1, -1), 0.5, self._color(LINE))
        table.setStyle([("VALIGN", (0, 0), (-1, -1), "TOP"), grid, *_padding(7, 6)])
        return [table, self._space(1, 8)]

    def _chart(self, block: Chart) -> list[Any]:
        figure = block.figure
        caption, drawn = self._caption(figure), self._drawn(draw(figure, self._width))
        words = [figure.title, *(text.text for text in figure.texts), *(name for name, _ in figure.legend)]
        drawn.tag = self._tags.root.add("Figure", alternative=plain("; ".join(words)))
        return [self._keep([caption, drawn])]

    def _caption(self, figure: Figure) -> Any:
        legend = "".join(
            f'{_GAP}<font color="{SERIES[series]}">\u2022</font> <font color="{SOFT}">{safe(name)}</font>'
            for name, series in figure.legend
            if len(figure.legend) > 1
        )
        return self._text(
            f"<b>{safe(figure.title)}</b>{legend}", self._named(size=8, leading=11, before=6, after=3)
        )

    def _named(
        self,
        *,
        size: float,
        leading: float,
        after: float = 0,
        before: float = 0,
        color: str = INK,
        bold: bool = False,
        align: int = 0,
        indent: float = 0,
        keep: bool = False,
    ) -> Any:
        return self._style(
            "set",
            fontName="Helvetica-Bold" if bold else "Helvetica",
            fontSize=size,
            leading=leading,
            spaceAfter=after,
            spaceBefore=before,
            textColor=self._color(color),
            alignment=align,
            leftIndent=indent,
            keepWithNext=keep,
            splitLongWords=1,
            wordWrap="LTR",
        )


def _drawing_class(base: Any) -> Any:
    """Flowables that draw one drawing."""

    class Drawn(base):  # type: ignore[misc]
        def __init__(self, drawing: Any) -> None:
            super().__init__()
            self.drawing, self.width, self.height = drawing, drawing.width, drawing.height

        def draw(self) -> None:
            self.drawing.drawOn(self.canv, 0, 0)

    return Drawn


def _canvas_class(tags: Tags, at_us: int) -> Any:
    """Canvases whose documents have this date, and this structure when they are saved."""
    from reportlab.pdfgen.canvas import Canvas

    class Dated(Canvas):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            if at_us:
                stamp = self._doc._timeStamp
                stamp.t = at_us // 1_000_000
                stamp.lt = tuple(time.gmtime(stamp.t))
                stamp.YMDhms = stamp.lt[:6]

        def save(self) -> None:
            tags.write(self)
            super().save()

    return Dated


def _even(count: int, left: int) -> list[float]:
    """Shares of the width where none are given: text columns are twice as wide as numbers."""
    parts = [2.0 if place < left else 1.0 for place in range(count)]
    return [part / sum(parts) for part in parts]


def _padding(across: float, along: float) -> list[tuple[Any, ...]]:
    whole = ((0, 0), (-1, -1))
    sides = {"LEFTPADDING": across, "RIGHTPADDING": across, "TOPPADDING": along, "BOTTOMPADDING": along}
    return [(name, *whole, value) for name, value in sides.items()]


def draw(figure: Figure, width: float) -> Any:
    """A figure as reportlab's drawing, `width` points wide."""
    from reportlab.graphics.shapes import Drawing, Line, Rect, String
    from reportlab.lib.colors import HexColor

    scale = width / WIDTH
    drawing = Drawing(width, figure.height * scale + 8)
    top = figure.height * scale + 4
    for x1, y1, x2, y2 in figure.lines:
        line = Line(x1 * scale, top - y1 * scale, x2 * scale, top - y2 * scale)
        line.strokeColor, line.strokeWidth = HexColor(LINE), 0.5
        drawing.add(line)
    for bar in figure.bars:
        low = top - (bar.y + bar.height) * scale
        rect = Rect(bar.x * scale, low, bar.width * scale, bar.height * scale)
        rect.fillColor, rect.strokeColor = HexColor(SERIES[bar.series]), None
        drawing.add(rect)
    for word in figure.texts:
        said = plain(word.text)
        text = String(word.x * scale, top - word.y * scale, said, textAnchor=word.anchor)
        text.fontName, text.fontSize, text.fillColor = font_of(said, "Helvetica"), 6.6, HexColor(SOFT)
        drawing.add(text)
    return drawing


_FONT = "DejaVuSans"
_FONT_FILE = Path(__file__).parent / "fonts" / "DejaVuSans.ttf"
_REPLACED = {"≤": "<=", "≥": ">=", "−": "-"}  # what the standard fonts lack and we write ourselves
_EXPLAINED_MAX = 60
_EXPLANATION = (
    "No font of this PDF has the characters below. Each stands in the text as its code point, as shown here. "
    "The exact text is in the JSON and HTML forms of this document."
)
_WORD = re.compile(r"\S+")


@cache
def _glyphs() -> frozenset[str]:
    """The characters of the embedded font, which reportlab then knows by its name."""
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont

    font = TTFont(_FONT, str(_FONT_FILE))
    pdfmetrics.registerFont(font)
    return frozenset(map(chr, font.face.charToGlyph))


def _is_standard(text: str) -> bool:
    return text.encode("cp1252", "ignore").decode("cp1252") == text


def plain(text: str) -> str:
    """Text in what our fonts have (rule 4)."""
    text = unicodedata.normalize("NFC", text)
    for ours, theirs in _REPLACED.items():
        text = text.replace(ours, theirs)
    if _is_standard(text):
        return text
    known = _glyphs()
    return "".join(
        each if each in known or _is_standard(each) else each.encode("ascii", "backslashreplace").decode()
        for each in text
    )


def font_of(text: str, standard: str) -> str:
    """The font for a text that `plain` gave: the standard one where it has every character."""
    return standard if _is_standard(text) else _FONT


def safe(text: str) -> str:
    """The same as reportlab's markup: words that the standard fonts lack are in the embedded one."""
    return _WORD.sub(lambda word: _marked_up(word[0]), plain(text))


def _marked_up(word: str) -> str:
    return escape(word) if _is_standard(word) else f'<font name="{_FONT}">{escape(word)}</font>'


def _missing(word: str) -> list[str]:
    """The characters of a word that no font here has."""
    return [each for each in word if not (_is_standard(each) or each in _glyphs() or each in _REPLACED)]


def _unprintable(page: Page) -> dict[str, list[str]]:
    """The words of a page that have characters which no font here has, in their order, with these."""
    texts = (unicodedata.normalize("NFC", text) for text in _texts(page))
    words = dict.fromkeys(word for text in texts if not _is_standard(text) for word in text.split())
    return {word: missing for word in words if (missing := _missing(word))}


def _texts(part: Any) -> Iterator[str]:
    """Every text of a page, or of a part of one."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple | list):
        for inner in part:
            yield from _texts(inner)


def _explained(page: Page) -> Page:
    """A page with a section at its end that explains every code point on it (rule 4)."""
    lacking = dict.fromkeys(character for missing in _unprintable(page).values() for character in missing)
    if not lacking:
        return page
    listed = [f"{plain(each)}: {unicodedata.name(each, 'without a name')}" for each in lacking]
    more = len(listed) - _EXPLAINED_MAX
    items = (*listed[:_EXPLAINED_MAX], *([f"and {more} more"] if more > 0 else ()))
    explained = Section("Characters that this PDF cannot draw", (Paragraph(_EXPLANATION), Items(items)))
    return page._replace(sections=(*page.sections, explained))


def _check_glyphs(page: Page) -> None:
    """Raise `ConfigError` for the first word of an addressed page that no font here can print."""
    for word, missing in _unprintable(page).items():
        raise ConfigError(
            f"a PDF cannot print `{word}`: no font here has U+{ord(missing[0]):04X}; write the letter as text or HTML",
            word=word,
        )
