"""Names in a PDF: set as people write them, or refused by name."""

from __future__ import annotations

import io

import pytest
from pypdf import PdfReader

from kvcustody.console.report.render import pdf
from kvcustody.console.report.render.page_model import Literal, Page, Paragraph, Section
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


@pytest.mark.parametrize("name", ["李小龙", "สมชาย", "राम", "محمد"])
def test_a_name_that_no_font_has_is_refused_in_a_letter(name: str) -> None:
    """Control: a page that is addressed to nobody has the code points, and drops nothing."""
    with pytest.raises(ConfigError, match=f"cannot print `{name}`"):
        render_pdf(letter(name), addressed=True)
    shown = PdfReader(io.BytesIO(render_pdf(letter(name)))).pages[0].extract_text()
    assert shown.count(f"\\u{ord(name[0]):04x}") >= 5


def test_control_the_standard_fonts_lack_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "_glyphs", frozenset)
    shown = PdfReader(io.BytesIO(render_pdf(letter("Łukasz")))).pages[0].extract_text()
    assert "\\u0141ukasz" in shown
