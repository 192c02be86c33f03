"""A section of a report is two files, facts and template; everything made of sections includes an added one."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Connection

from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.framework import NAMES, load_framework
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.section import FOLDER, Section, citations, sections, sections_table
from kvcustody.audit.reports.signing.read_report import report_of
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.verify.documents.document_check import is_unchecked
from kvcustody.audit.verify.documents.report_rules import read_report
from kvcustody.console.render.document_forms import render
from kvcustody.errors import LedgerError
from kvcustody.migrations.upgrade import upgrade
from standins.audit.documents import report_again, verify_report
from standins.audit.ledgers import report_ledger
from standins.console.read_page import Facts, Paragraph, page_of

NEW = '''
"""How many processes the record has, and how many leaves the longest log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY


class Breadth(NamedTuple):
    """The facts."""

    processes: int
    longest: tuple[str, ...]


def breadth(reading: ReportReading) -> Breadth:
    """Of the boundary."""
    boundary = reading[BOUNDARY]
    size = max(log.size for log in boundary.logs)
    return Breadth(len(boundary.workers), tuple(log.name for log in boundary.logs if log.size == size))


def _disagreements(report: ReportFacts) -> Iterator[str]:
    if report[SECTION].processes != len(report[BOUNDARY].workers):
        yield "the breadth has other processes than the boundary"


SECTION: Section[Breadth] = Section(
    "breadth",
    "Breadth of the record",
    breadth,
    order=145,
    about="how many processes there were",
    fields={"breadth": "how broad the record is"},
    cited={"breadth": Citation("Breadth", lambda report: report[SECTION].processes > 0)},
    disagreements=_disagreements,
)
'''
TEMPLATE = """<p>The longest logs: {{ report.breadth.longest | join(", ") }}.</p>
{{ facts([("processes on record", report.breadth.processes | count)]) }}
"""


@pytest.fixture
def ledger(world_class: Any, tmp_path: Path) -> Iterator[tuple[Connection, str]]:
    """A ledger, and the key that its checkpoint verifies with."""
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    key = report_ledger.fill(engine, world_class, tmp_path)
    with engine.connect() as opened:
        yield opened, str(key.verifier)
    engine.dispose()


@pytest.fixture
def connection(ledger: tuple[Connection, str]) -> Connection:
    return ledger[0]


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The new section is among the others."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "breadth.py").write_text(NEW)
    (folder / "breadth.html").write_text(TEMPLATE)
    package = importlib.import_module(FOLDER)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    sections.cache_clear()
    citations.cache_clear()
    yield
    sys.modules.pop(f"{FOLDER}.breadth", None)
    sections.cache_clear()
    citations.cache_clear()


def made(connection: Connection) -> Report:
    size = newest_checkpoint(connection)
    asked = ReportParameters("cc-fdp-rip", size, *period(connection, size, None, None), sample=2)
    return report_ledger.signed(connection, build_report(connection, asked))


def without_signature(report: Report, **changes: Any) -> bytes:
    return report.replace(signature=None, **changes).to_bytes()


@pytest.mark.usefixtures("added")
def test_a_new_section_is_in_everything_that_is_made_of_sections(ledger: tuple[Connection, str]) -> None:
    connection, vkey = ledger
    report, vkeys = made(connection), [vkey]
    data = report.to_bytes()
    body = orjson.loads(data)
    new = next(each for each in sections() if each.name == "breadth")
    assert [each.name for each in sections()].index("breadth") > 0
    assert body["breadth"]["processes"] == len(body["boundary"]["workers"]) == report[new].processes > 1
    assert read_report(data) == report and "breadth" in citations()
    assert "| Breadth of the record | `breadth` | how many processes there were |" in sections_table()

    found = verify_report(data, vkeys)
    assert found.ok and is_unchecked("breadth.processes", found.unchecked)
    assert "how broad the record is" in " ".join(each.why for each in found.unchecked)
    more = report["breadth"]._replace(processes=99)
    assert report.replace(breadth=more).digest() != report.digest()
    said = verify_report(report.replace(breadth=more).to_bytes(), vkeys).problems
    assert "the breadth has other processes than the boundary" in said

    longer = report["breadth"]._replace(longest=("system", "tenant/none"))
    again = report_again(connection, report, vkeys)
    assert verify_report(data, vkeys, source=again).problems == ()
    forged = verify_report(without_signature(report, breadth=longer), vkeys, source=again)
    assert any("`breadth.longest" in problem for problem in forged.problems)


@pytest.mark.system("a new section is missing in print")
@pytest.mark.usefixtures("added")
def test_a_new_section_is_printed_by_its_template(connection: Connection) -> None:
    report = made(connection)
    new = page_of(report).section("Breadth of the record")
    assert new.blocks == (
        Paragraph(f"The longest logs: {', '.join(report['breadth'].longest)}."),
        Facts((("processes on record", str(report["breadth"].processes)),)),
    )
    pypdf = pytest.importorskip("pypdf")
    pages = pypdf.PdfReader(io.BytesIO(render(report, "pdf"))).pages
    shown = " ".join(" ".join(page.extract_text() for page in pages).split())
    assert shown.count("Breadth of the record") == 2, "in the contents, and above it"
    assert new.blocks[0].text in shown


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"breadth": None}, "`report.breadth` is no object"),
        ({"breadth": {"processes": 3}}, "`report.breadth` has no `longest`"),
        ({"breadth": {"processes": "3", "longest": []}}, "`report.breadth.processes` is not of type int"),
        ({"breadth": {"processes": 3, "longest": [3]}}, "not of type str"),
        ({"breath": {}}, "`breath` is no part of a report"),
    ],
)
def test_it_is_read_back_by_its_type_alone(connection: Connection, change: dict[str, Any], said: str) -> None:
    body = orjson.loads(made(connection).to_bytes())
    assert report_of(body)["breadth"].processes == body["breadth"]["processes"], "control"
    with pytest.raises(LedgerError, match=said):
        report_of(body | change)


@pytest.mark.usefixtures("added")
def test_a_report_without_it_is_no_report(connection: Connection) -> None:
    body = orjson.loads(made(connection).to_bytes())
    del body["breadth"]
    with pytest.raises(LedgerError, match="`report` has no `breadth`"):
        report_of(body)


def test_a_report_that_has_more_than_its_sections_is_refused(connection: Connection) -> None:
    """The control of the fixture: where the section is not there, nothing knows it."""
    body = orjson.loads(made(connection).to_bytes())
    assert "breadth" not in body and "breadth" not in citations()
    assert report_of(body).to_json() == body
    with pytest.raises(LedgerError, match="`breadth` is no part of a report"):
        report_of(body | {"breadth": {"processes": 3, "longest": []}})


def test_each_section_says_what_it_is() -> None:
    """Each has its file's name, a place of its own, and the fields that its facts have."""
    every = sections()
    assert len({each.order for each in every}) == len({each.title for each in every}) == len(every) > 20
    fields = [name for each in every for name in each.fields]
    assert len(fields) == len({*fields}), "no field is of two sections"
    for each in every:
        assert sys.modules[f"{FOLDER}.{each.name}"].SECTION is each
        assert isinstance(each, Section) and [*each.types] == [*each.fields]
        has_template = resources.files("kvcustody").joinpath(each.template).is_file()
        assert has_template is (each.part is not None), "templates of other sections print those without a part"


def test_the_library_cites_what_sections_declare() -> None:
    cited = {name for edition in NAMES for control in load_framework(edition).controls for name in control.evidence}
    assert cited <= citations().keys() and len(cited) > 15
