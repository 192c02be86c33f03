"""Names in a PDF: set as people write them, or refused by name; and nothing that the PDF's maker would fetch."""

from __future__ import annotations

import io
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from pypdf import PdfReader

from kvcustody.console.render import pdf
from kvcustody.console.render.html import environment
from kvcustody.console.render.pdf import pdf_of
from kvcustody.console.render.pdf_process import unprintable
from kvcustody.errors import ConfigError

NAMES = (
    *(
        "Łukasz Święćicki",
        "Müller",
        "Nguyễn Thị Ánh",
        "Đorđe Šimić",
        "Jose\u0301",
    ),  # the last: a mark of its own
    *("Юлія Коваленко", "Γιώργος Παπαδόπουλος", "Ղազարյան", "გიორგი"),
    *("李小龙", "山田さくら", "김철수", "สมชาย", "राम", "রহিম", "முருகன்"),
)
RIGHT_TO_LEFT = ("שלום", "محمد")
PAGE = """{% extends "console/render/base.html" %}
{% block title %}{{ name }}{% endblock %}{% block footer %}{{ name }}{% endblock %}
{% block content %}<h1 data-footer="{{ name }}">About {{ name }}</h1><p>To {{ name }}.</p><pre>{{ name }}</pre>
{{ facts([("name", name)]) }}
{% call(one) table([name], ["name"]) %}<tr><td>{{ one }}</td></tr>{% endcall %}
{{ figure(empty) }}{% endblock %}"""


def html_of(name: str) -> str:
    """A document with a name in each of its parts."""
    figure = environment().globals["columns"](name, [], [], [], "", "")
    return environment().from_string(PAGE).render(name=name, empty=figure, at_us=0)


def shown_of(made: bytes) -> str:
    return " ".join(sheet.extract_text() for sheet in PdfReader(io.BytesIO(made)).pages)


@pytest.fixture(scope="module")
def every_name() -> bytes:
    return pdf_of(html_of(" | ".join((*NAMES, *RIGHT_TO_LEFT))))


def test_names_are_printed_as_they_are_written(every_name: bytes) -> None:
    """In a heading, a paragraph, a literal, facts, a table, a figure and the foot of the page."""
    shown = unicodedata.normalize("NFC", "".join(shown_of(every_name).split()))
    for name in NAMES:
        written = unicodedata.normalize("NFC", "".join(name.split()))
        assert shown.count(written) >= 6, name
    for name in RIGHT_TO_LEFT:  # in the order of reading, or of drawing
        assert shown.count(name) + shown.count(name[::-1]) >= 6, name
    assert "\\u" not in shown and "\ufffd" not in shown


def test_each_font_that_a_name_needs_is_embedded(every_name: bytes) -> None:
    fonts = {
        str(font.get_object()["/BaseFont"])
        for page in PdfReader(io.BytesIO(every_name)).pages
        for font in page["/Resources"]["/Font"].values()
    }
    for family in (
        "Noto-Sans",
        "DejaVu-Sans",
        "Droid-Sans-Fallback",
        "Noto-Sans-Devanagari",
        "Noto-Sans-Thai",
    ):
        assert any(family in font for font in fonts), (family, fonts)


def test_a_name_that_no_font_has_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"cannot print `𓀀𓀁`: no font here has U\+13000"):
        pdf_of(html_of("Pharaoh 𓀀𓀁"))


@pytest.mark.parametrize(("word", "code"), [("bell\x07", 7), ("name\ue000", 0xE000), ("\U0010ffff", 0x10FFFF)])
def test_what_no_font_draws_is_found_in_any_word(word: str, code: int) -> None:
    assert unprintable(iter(["plain", *NAMES, word])) == (word, code)
    assert unprintable(iter(["plain", *NAMES, *RIGHT_TO_LEFT, "zero\u200dwidth"])) is None, "control"


ADDRESSES = ("file:///etc/passwd", "data:image/png;base64,iVBORw0KGgo=", "ftp://127.0.0.1/a")
WAYS = (
    '<img src="{}"/>',
    '<link rel="stylesheet" href="{}"/>',
    '<style>p {{ background: url("{}") }}</style>',
    '<style>@font-face {{ font-family: a; src: url("{}") }} p {{ font-family: a }}</style>',
    '<style>@import "{}";</style>',
    '<object data="{}"></object>',
    '<svg xmlns="http://www.w3.org/2000/svg"><image href="{}" width="9" height="9"/></svg>',
)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[str]]]:
    """An address on this machine, and what was asked of it."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}/asked", asked
        made.shutdown()


def test_a_document_that_names_an_address_is_not_made(server: tuple[str, list[str]]) -> None:
    address, asked = server
    for one in (address, *ADDRESSES):
        named = [f"{one}{place}" for place in range(len(WAYS))]
        ways = "".join(way.format(each) for way, each in zip(WAYS, named, strict=True))
        with pytest.raises(ConfigError, match="may not load resources") as refused:
            pdf_of(f"<html lang='en'><title>t</title>{ways}<p>words</p></html>")
        assert {*named} <= {*refused.value.urls}
    assert asked == []


def test_control_the_maker_fetches_where_nothing_refuses(server: tuple[str, list[str]]) -> None:
    address, asked = server
    code = f"from weasyprint import HTML; HTML(string='<img src=\"{address}\">').write_pdf()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert asked == ["/asked"]
    asked.clear()


def test_a_name_that_is_written_as_markup_is_text() -> None:
    name = "<img src=file:///etc/passwd> \"><img src='http://127.0.0.1:9/x'> {{ 7 * 7 }}"
    html = html_of(name)
    assert "<img" not in html and " 49" not in html
    assert "".join(name.split()) in "".join(shown_of(pdf_of(html)).split())


@pytest.mark.system("a PDF differs by the fonts of the machine")
def test_fonts_of_the_system_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another font directory, and another configuration of fontconfig, as a machine with other fonts has them."""
    html = html_of("Łukasz 李")
    before = pdf_of(html)
    (tmp_path / "fonts.conf").write_text("<fontconfig><dir>/usr/share/fonts</dir></fontconfig>")
    monkeypatch.setenv("FONTCONFIG_FILE", str(tmp_path / "fonts.conf"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert pdf_of(html) == before
    monkeypatch.setattr(pdf, "_FONTS", tmp_path / "fonts.conf")
    assert pdf_of(html) != before, "control: the configuration decides"


def test_without_its_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maker = tmp_path / "maker.py"
    maker.write_text('import sys; print(\'{"library": "cannot load libpango"}\', file=sys.stderr); sys.exit(2)')
    monkeypatch.setattr(pdf, "_MAKER", maker)
    with pytest.raises(ConfigError, match=r"libpango-1.0-0 .*HTML and JSON need neither"):
        pdf_of("<html></html>")
    monkeypatch.setattr(pdf, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install kvcustody with the extra `reports`"):
        pdf_of("<html></html>")
