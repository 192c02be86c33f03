"""Names in a PDF: set as people write them, or refused by name."""

from __future__ import annotations

import io
import unicodedata

import pytest
from pypdf import PdfReader

from kvcustody.console.report.render import pdf
from kvcustody.console.report.render.charts import without_values
from kvcustody.console.report.render.page_model import (
    Chart,
    Facts,
    Items,
    Literal,
    Page,
    Paragraph,
    Section,
    Table,
    Tile,
)
from kvcustody.console.report.render.pdf import render_pdf
from kvcustody.errors import ConfigError

NAMES = [
    "Łukasz Święćicki",
    "Müller",
    "Nguyễn Thị Ánh",
    "Đorđe Šimić",
    "Юлія Коваленко",
    "Γιώργος Παπαδόπουλος",
    "Ղազարյան",
    "გიორგი",
    "Jose\u0301",  # a mark of its own
]


def letter(text: str) -> Page:
    blocks = (Paragraph(f"To {text}."), Literal(text))
    return Page(f"About {text}", text, (), (Section(text, blocks),), text)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_printed_as_it_is_written(name: str) -> None:
    made = render_pdf(letter(name), addressed=True)
    shown = PdfReader(io.BytesIO(made)).pages[0].extract_text()
    assert "\\u" not in shown
    composed = name.replace("e\u0301", "é")
    assert shown.replace("\n", " ").count(composed) >= 5, shown
    assert render_pdf(letter(name), addressed=True) == made


FOREIGN = {
    "李小龙": "\\u5c0f: CJK UNIFIED IDEOGRAPH-5C0F",
    "สมชาย": "\\u0e2a: THAI CHARACTER SO SUA",
    "राम": "\\u0930: DEVANAGARI LETTER RA",
    "محمد": "\\u0645: ARABIC LETTER MEEM",
}
EXPLAINED = "Characters that this PDF cannot draw"


def shown_of(page: Page) -> str:
    read = PdfReader(io.BytesIO(render_pdf(page)))
    return " ".join(sheet.extract_text() for sheet in read.pages).replace("\n", " ")


@pytest.mark.parametrize("name", FOREIGN)
def test_a_name_that_no_font_has_is_refused_in_a_letter(name: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot print `{name}`"):
        render_pdf(letter(name), addressed=True)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_report_explains_every_code_point(name: str) -> None:
    """Control: a page whose characters all have a glyph explains nothing."""
    shown = shown_of(letter(name))
    assert shown.count(f"\\u{ord(name[0]):04x}") >= 5, "nothing is dropped"
    assert EXPLAINED in shown and FOREIGN[name] in shown and "JSON" in shown
    assert EXPLAINED not in shown_of(letter("Łukasz"))


def test_every_part_of_a_page_is_looked_at() -> None:
    """In tables, facts, lists, tiles and figures too; a page of very many scripts names the first of them."""
    table = Table(("", "n"), (("acme", "李"),), left=1)
    figure = without_values("a chart of 龙", "nothing")
    blocks = (table, Facts((("tenant", "小"),)), Items(("ส",)), Chart(figure))
    shown = shown_of(Page("t", "s", (Tile("र", "label"),), (Section("all", blocks),), "م"))
    for character in "李小龙สरم":
        assert f"\\u{ord(character):04x}: {unicodedata.name(character)}" in shown
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 100)))
    assert "and 40 more" in shown_of(letter(many))


def test_control_the_standard_fonts_lack_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "_glyphs", frozenset)
    shown = PdfReader(io.BytesIO(render_pdf(letter("Łukasz")))).pages[0].extract_text()
    assert "\\u0141ukasz" in shown
