"""A report as somebody hands it out: its cover, times of a zone, short names with an annex, long tables in files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.kinds import ErasureRequested
from kvcustody.audit.reports.model import Report
from kvcustody.console.main import app
from kvcustody.console.render import pdf
from kvcustody.console.render.document_forms import render_all, rendered
from kvcustody.console.report.check_files import compare_files
from standins.audit.one_process import OneProcess, clean
from standins.console.read_page import Facts, Literal, Page, Table, page_of, read_page, strings_of

UUID = "d0c5" + "1234567890abcdef" * 2
ERASURE = "feedfacefeedfacefeedfacefeedface"


@pytest.fixture
def report(store: Engine, tmp_path: Path, world: Callable[..., Any]) -> Report:
    made, events = OneProcess(store, tmp_path), clean(world)
    at = events[-2].at_us
    asked = ErasureRequested(at, ERASURE, "tenant-1", "tenant", None, None, at + 5, "dpo")
    made.fill([*events[:-1], asked, events[-1]], UUID[:32])
    return made.report(sample=4)


def cover(page: Page) -> dict[str, str]:
    """What the first page says."""
    return dict(next(block for block in page.front if isinstance(block, Facts)).items)


def test_the_cover_says_whose_it_is_of_what_and_when(report: Report) -> None:
    asked = report.asked._replace(preparer="Example AG, Ada Lovelace")
    page = page_of(report.replace(asked=asked))
    said = cover(page)
    assert said["Organisation"] == "Example AG, Ada Lovelace" and said["Opinion"] == report["opinion"].kind
    assert cover(page_of(report))["Organisation"] == "not stated"
    assert said["Scope"] == "all tenants of log ledger.example/kvcustody"
    own = page_of(report.replace(asked=asked._replace(tenant="acme")))
    assert cover(own)["Scope"] == "tenant acme" and "tenant acme" in own.subtitle


def test_outsiders_find_its_words_explained(report: Report) -> None:
    [_, words] = [dict(block.items) for block in page_of(report).front if isinstance(block, Facts)]
    explained = {word for name in words for word in name.split(", ")}
    assert {
        "leaf",
        "custody",
        "unit",
        "incarnation",
        "fence",
        "checkpoint",
        "receipt",
        "witness",
    } <= explained


def test_times_of_a_zone_stand_beside_utc(report: Report) -> None:
    berlin = report.replace(asked=report.asked._replace(zone="Europe/Berlin"))
    said = cover(page_of(berlin))
    assert said["Period"].count("CET)") == 2 and said["Period"].count("Z (") == 2
    assert "CET" not in " ".join(strings_of(page_of(report))), "control: UTC alone"
    assert "--zone Europe/Berlin" in berlin.rerun() and "--zone" not in report.rerun()
    assert berlin.digest() != report.digest() and rendered(berlin) == rendered(berlin)
    [command] = [
        block.text
        for block in page_of(berlin).section("Sign-off and re-run").blocks
        if isinstance(block, Literal)
    ]
    assert "--zone Europe/Berlin" in command


@pytest.mark.parametrize(
    ("zone", "said"), [("Europe/Bonn", "is not known here"), ("US/Eastern", "America/New_York")]
)
def test_a_zone_that_is_none_is_refused(tmp_path: Path, report: Report, zone: str, said: str) -> None:
    ledger = str(tmp_path / "ledger.db")
    words = ["report", "make", "--framework", "soc2", "--ledger", ledger, "--format", "json", "--zone", zone]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code != 0 and said in " ".join(done.output.split())


def test_where_no_pdf_can_be_made_the_other_forms_are(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report["total"].due > 0
    ledger, out = str(tmp_path / "ledger.db"), tmp_path / "out"
    monkeypatch.setattr(pdf, "find_spec", lambda name: None)
    words = ["report", "make", "--framework", "soc2", "--ledger", ledger, "--sample", "1", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0 and "extra `reports`" in " ".join(f"{done.output}{done.exception}".split())
    assert sorted(file.name for file in out.iterdir()) == ["oscal.json", "report.html", "report.json"]


def test_names_are_short_in_the_text_and_whole_in_the_annex(report: Report) -> None:
    page = page_of(report)
    [annex] = [block for block in page.section("Annex: identifiers").blocks if isinstance(block, Table)]
    whole = {row[2] for row in annex.rows}
    assert {UUID[:32], ERASURE} <= whole
    text = " ".join(
        text
        for section in page.sections
        if not section.title.startswith("Annex")
        for text in strings_of(page._replace(sections=(section,)))
    )
    for name in (UUID[:32], ERASURE):
        assert name[:8] in text
    assert UUID[:32] not in text


def test_a_long_table_is_in_a_file_beside_the_page_and_compared(report: Report, tmp_path: Path) -> None:
    [row, *_] = report["coverage"]
    many = tuple(row._replace(tenant=f"tenant-{place:03}", due=place) for place in range(1, 401))
    long = report.replace(coverage=many)
    files = render_all(long, ["html", "json"])
    assert sorted(files) == ["coverage.csv", "report.html", "report.json"]
    assert sorted(render_all(report, ["html", "json"])) == ["report.html", "report.json"], "control"
    [head, *rows] = csv.reader(io.StringIO(files["coverage.csv"].decode(), newline=""))
    assert head[:3] == ["tenant", "classification", "due"]
    assert [row[2] for row in rows[:-1]] == [str(place) for place in range(1, 401)] and rows[-1][0] == "all"
    tables = [
        block for block in read_page(files["report.html"].decode()).blocks() if isinstance(block, Table)
    ]
    [shown] = [table for table in tables if table.headings[:3] == ("tenant", "classification", "due")]
    assert len(shown.rows) == 300

    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert compare_files(tmp_path, long.document())[:2] == (
        ("coverage.csv", "report.html", "report.json"),
        [],
    )
    (tmp_path / "coverage.csv").write_bytes(files["coverage.csv"].replace(b"tenant-399", b"tenant-000"))
    [wrong] = compare_files(tmp_path, long.document()).problems
    assert wrong.startswith("`coverage.csv` is not what the signed report gives")
    (tmp_path / "coverage.csv").unlink()
    [absent] = compare_files(tmp_path, long.document()).problems
    assert absent.startswith("`coverage.csv` is not there")
