"""A report for readers outside: its cover, time zones, short names with an annex, long tables in files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.kinds import ErasureRequested
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sections.losses import GapsAndSpills, SpillPeriod
from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.main import app
from kvcustody.console.render import pdf
from kvcustody.console.render.document_forms import render_all, rendered
from kvcustody.console.report.command import compare_files
from kvcustody.migrations.upgrade import upgrade
from standins.audit.ledgers import report_ledger, tiered_ledger
from standins.audit.one_process import OneProcess, clean
from standins.console.read_page import Facts, Literal, Page, Table, page_of, read_page, strings_of

PLAIN_WORDS = """
a accurate action age and answered are arrived asked asks at before by bytes called cause choice class compensating
complete control deadline death decided decision deleted device do drawn duplicates effect end event exceptions finding
first for found from full hit how identifier idx in information is it its kept key kind left length limit meaning
median member moving name not nothing number of oldest on open opening other outcome owner parameters past period
predicted profile promises prompt question read received recomputing record recorded release released remaining request
response result reused revision rfc right risk says section selector service share show side software source started
state status step tenant that the their these they through to token took treated under unknown unlinked verification
weakest what when whether why with within worker wrong
"""

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
    asked = report.asked._replace(preparer="Ada Lovelace, platform", organisation="Example AG")
    page = page_of(report.replace(asked=asked))
    fields = cover(page)
    assert fields["Organisation"] == "Example AG" and fields["Opinion"] == report["opinion"].kind
    assert fields["Prepared by"] == "Ada Lovelace, platform"
    bounds = " to ".join(part[:20] for part in fields["Period"].split(" to "))
    assert page.footer.startswith(f"Example AG, {bounds}. ")
    unnamed_house = page_of(report.replace(asked=asked._replace(organisation="")))
    assert unnamed_house.footer.startswith(f"Ada Lovelace, platform, {bounds}. ")
    unnamed = cover(page_of(report))
    assert unnamed["Organisation"] == unnamed["Prepared by"] == "not stated"
    assert "--organisation 'Example AG'" in report.replace(asked=asked).rerun()
    assert "--organisation" not in report.rerun()
    assert fields["Scope"] == "all tenants of log ledger.example/kvcustody"
    own = page_of(report.replace(asked=asked._replace(tenant="acme")))
    assert cover(own)["Scope"] == "tenant acme" and "tenant acme" in own.subtitle


def test_outsiders_find_its_words_explained(report: Report) -> None:
    explained = words_of(page_of(report))
    assert {"leaf", "custody", "unit", "incarnation", "fence", "checkpoint", "receipt", "hold"} <= set(explained)
    assert not any(", " in name for name in explained), "one word an entry"
    assert max(len(sentence.split()) for said in explained.values() for sentence in said.split(". ")) <= 25


@pytest.mark.parametrize("fill", [report_ledger.fill, tiered_ledger.fill])
@pytest.mark.parametrize("framework", ["soc2", "gdpr"])
def test_every_word_over_a_column_is_a_term_or_a_plain_word(
    world_class: Any, tmp_path: Path, fill: Callable[..., Any], framework: str
) -> None:
    """Control: a heading of another word is found."""
    engine = open_store(tmp_path / "words.db")
    upgrade(engine)
    fill(engine, world_class, tmp_path)
    with engine.connect() as connection:
        size = newest_checkpoint(connection)
        asked = ReportParameters(framework, size, *period(connection, size, None, None), sample=2)
        page = page_of(build_report(connection, asked))
    engine.dispose()
    terms = words_of(page)
    headings = {heading for block in page.blocks() if isinstance(block, Table) for heading in block.headings}
    assert len(headings) > 60
    assert {heading: left for heading in headings if (left := unexplained(heading, terms))} == {}
    assert unexplained("scrub backlog of a unit", terms) == {"backlog"}


def words_of(page: Page) -> dict[str, str]:
    """The terms that the second page explains."""
    [_, *parts] = [block for block in page.front if isinstance(block, Facts)]
    return {name: said for part in parts for name, said in part.items}


def unexplained(heading: str, terms: Iterable[str]) -> set[str]:
    """The words of a heading that are neither terms nor plain words; a plural counts as its singular."""
    left = heading.lower().replace("'s ", " ")
    known = (*terms, *PLAIN_WORDS.split())
    for term in sorted(known, key=len, reverse=True):
        plurals = {"y": f"{term[:-1]}ies", "f": f"{term[:-1]}ves"}
        for form in (plurals.get(term[-1], f"{term}s"), term):
            left = re.sub(rf"(?<![\w-]){re.escape(form)}(?![\w-])", " ", left)
    return set(re.findall(r"[^\W\d]+", left))


def test_times_of_a_zone_stand_beside_utc(report: Report) -> None:
    berlin = report.replace(asked=report.asked._replace(zone="Europe/Berlin"))
    said = cover(page_of(berlin))
    assert said["Period"].count("CET)") == 2 and said["Period"].count("Z (") == 2
    assert re.search(r":(\d\d)Z \(\S+ \d\d:\d\d:\1 CET\)", said["Period"]), "to the second, as UTC"
    assert "CET" not in " ".join(strings_of(page_of(report))), "control: UTC alone"
    assert "--zone Europe/Berlin" in berlin.rerun() and "--zone" not in report.rerun()
    assert berlin.digest() != report.digest() and rendered(berlin) == rendered(berlin)
    command = next(
        block.text for block in page_of(berlin).section("Sign-off and re-run").blocks if isinstance(block, Literal)
    )
    assert "--zone Europe/Berlin" in command


@pytest.mark.parametrize(("zone", "said"), [("Europe/Bonn", "is not known here"), ("US/Eastern", "America/New_York")])
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


def test_ids_of_processes_differ_in_the_text(report: Report) -> None:
    [worker, *_] = report["boundary"].workers
    twin = worker._replace(incarnation=UUID[:9] + "f" + UUID[10:32])
    two = report.replace(boundary=report["boundary"]._replace(workers=(worker, twin)))
    shown = [
        row[1]
        for block in page_of(two).section("System boundary").blocks
        if isinstance(block, Table) and block.headings[:2] == ("worker", "incarnation")
        for row in block.rows
    ]
    assert shown == [UUID[:10], UUID[:9] + "f"]


def test_what_became_of_a_spill_is_said(report: Report) -> None:
    started = SpillPeriod(UUID[:32], 1_700_000_001_000_000, "spill-started", "away, from sequence 9 on", 0)
    ended = started._replace(ended_us=1_700_000_009_000_000)
    said = [
        " ".join(strings_of(page_of(report.replace(losses=GapsAndSpills(0, 1, (), (spill,))))))
        for spill in (started, ended)
    ]
    assert "not on record: it may last" in said[0] and "read back 2023" not in said[0]
    assert "ended, and was read back 2023-11-14T22:13:29Z" in said[1] and "it may last" not in said[1]


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
    tables = [block for block in read_page(files["report.html"].decode()).blocks() if isinstance(block, Table)]
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
