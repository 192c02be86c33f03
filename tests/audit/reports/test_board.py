"""The first page's figures and words; what stands around the tests; a PDF that is tagged and dated as of its ledger."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from kvcustody.audit.evidence.erasure.erasure_state import read_states
from kvcustody.audit.evidence.erasure.requests_and_answers import requests as requests_of
from kvcustody.audit.evidence.processes.work_periods import read_work_periods
from kvcustody.audit.kinds import ErasureCompleted, ErasureRequested
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.given import Response
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sections.board import NOTHING_DUE, threshold_verdict
from kvcustody.audit.reports.sections.board import SECTION as BOARD
from kvcustody.audit.reports.trend import TrendPeriod
from kvcustody.console.render.document_forms import render
from kvcustody.console.render.number_format import second
from kvcustody.times import iso
from standins.audit.one_process import OneProcess, clean
from standins.console.read_page import Facts, Items, Paragraph, Section, Table, page_of, strings_of


@pytest.fixture
def one_process(store: Engine, tmp_path: Path) -> OneProcess:
    return OneProcess(store, tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "due", "verdict"),
    [
        (999_000, 1_000_000, 5, "met"),
        (998_999, 998_999, 5, "missed"),
        (998_999, 999_000, 5, "not known"),
        (0, 0, 0, NOTHING_DUE),
    ],
)
def test_a_share_meets_misses_or_nobody_can_say(low: int, high: int, due: int, verdict: str) -> None:
    assert threshold_verdict(999_000, low, high, due) == verdict


def board(report: Report) -> Section:
    return page_of(report).section("For the board")


def facts_of(report: Report) -> tuple[tuple[str, str], ...]:
    """The figures of the board's page."""
    [facts] = [block.items for block in board(report).blocks if isinstance(block, Facts)]
    return facts


def sentences(report: Report) -> tuple[str, ...]:
    """The sentences of the board's page."""
    [items] = [block.items for block in board(report).blocks if isinstance(block, Items)]
    return items


def decision(report: Report) -> str:
    """What the board is asked."""
    said = [block.text for block in board(report).blocks if isinstance(block, Paragraph)]
    [asked] = [text for text in said if text.startswith("Decision asked: ")]
    return asked.removeprefix("Decision asked: ")


def erased(events: list[Any], *, answered_after: int | None) -> list[Any]:
    """One more erasure, due 5 ms after it was asked for."""
    at = events[-2].at_us
    asked = ErasureRequested(at, "e-1", "tenant-1", "tenant", None, None, at + 5_000, "dpo")
    told = (
        []
        if answered_after is None
        else [ErasureCompleted(at + answered_after, "e-1", "tenant-1", "complete", 0, 0, 0)]
    )
    return [*events[:-1], asked, *told, events[-1]._replace(at_us=at + 9_000)]


@pytest.mark.parametrize(
    ("answered_after", "more_time_us", "on_time", "not_due"),
    [(4_000, 0, 1, 0), (6_000, 0, 0, 0), (None, 0, 0, 0), (None, 9_000, 0, 1), (6_000, 9_000, 1, 0)],
)
def test_an_erasure_is_on_time_by_its_last_answer(
    one_process: OneProcess,
    world: Callable[..., Any],
    answered_after: int | None,
    more_time_us: int,
    on_time: int,
    not_due: int,
) -> None:
    """One that is not due yet is neither on time nor missed, and the page says so."""
    events = erased(clean(world), answered_after=answered_after)
    asked = next(event for event in events if isinstance(event, ErasureRequested))
    events[events.index(asked)] = asked._replace(deadline_us=asked.deadline_us + more_time_us)
    one_process.fill(events)
    report = one_process.report()
    board = report["board"]
    assert (board.erasures, board.erasures_on_time, board.erasures_open) == (1, on_time, not_due)
    said = f"{on_time} of {1 - not_due} that were due or answered; {not_due} not due yet"
    assert ("erasures answered on time", said) in facts_of(report)
    better = report.replace(board=board._replace(erasures_open=1 - not_due))
    assert [*BOARD.problems(better)], "a changed count is found in the file alone"


def test_the_scope_leaves_out_who_was_not_scanned(one_process: OneProcess, world: Callable[..., Any]) -> None:
    one_process.fill(clean(world, scanned=False))
    report = one_process.report()
    assert (report["board"].workers, report["board"].workers_scanned) == (1, 0)
    assert report["board"].tenants == report["board"].tenants_due > 1
    assert ("workers that were scanned and did not die", "0 of 1 at work in the period") in facts_of(report)


def test_the_control_a_pool_that_was_scanned(one_process: OneProcess, world: Callable[..., Any]) -> None:
    one_process.fill(clean(world))
    assert one_process.report()["board"][:2] == (1, 1)


def test_the_trend_is_of_periods_as_long_before_it_and_adds_up(
    one_process: OneProcess, world: Callable[..., Any]
) -> None:
    one_process.fill(clean(world))
    with one_process.store.connect() as connection:
        size = newest_checkpoint(connection)
        since, until = period(connection, size, None, None)
        span = (until - since) // 4
        whole = build_report(connection, ReportParameters("gdpr", size, until - 4 * span, until, sample=0))
        last = build_report(connection, ReportParameters("gdpr", size, until - span, until, sample=0))
        first = build_report(connection, ReportParameters("gdpr", size, since - 9 * span, since, sample=0))
    trend = last["board"].trend
    assert [(one.since_us, one.until_us) for one in trend] == [
        (until - back * span, until - (back - 1) * span) for back in (4, 3, 2, 1)
    ]
    assert sum(one.due for one in trend) == whole["total"].due > 0
    assert sum(one.covered for one in trend) == whole["total"].covered
    assert trend[-1] == TrendPeriod(until - span, until, last["total"].due, last["total"].covered)
    assert len(first["board"].trend) == 1, "what ended before the ledger began is left out"
    assert sentences(first)[0].startswith("Nothing was due") and sentences(first)[2].startswith("No trend")


def test_what_the_board_is_asked_follows_from_what_was_found(
    one_process: OneProcess, world: Callable[..., Any]
) -> None:
    one_process.fill(clean(world, scanned=False))
    report = one_process.report()
    assert report["opinion"].kind == "adverse" and decision(report).startswith("do not rely on these figures")
    qualified = report.replace(opinion=report["opinion"]._replace(kind="qualified"))
    strict, mild = (qualified.replace(asked=report.asked._replace(threshold_ppm=share)) for share in (1_000_000, 0))
    assert "accept the shortfall" in decision(strict)
    assert "name an owner and a date where there is none" in decision(mild)
    with one_process.store.connect() as connection:
        answers = tuple(Response(one.id, "cto", "2026-12-01", "scan", "none") for one in report["opinion"].exceptions)
        owned = build_report(connection, mild.asked, responses=answers)
    owned = owned.replace(opinion=owned["opinion"]._replace(kind="qualified"))
    assert decision(owned) == "none: take note."
    assert len(sentences(owned)) == 3


def test_what_an_auditor_looks_for_is_there(one_process: OneProcess, world: Callable[..., Any]) -> None:
    one_process.fill(clean(world))
    report = one_process.report()
    page = page_of(report)
    titles = [section.title for section in page.sections]
    for title in ("Assertion", "Description of the service", "Sources of the information"):
        assert title in titles
    assert "User-entity controls and subservice organisations" in titles
    assert titles[-3:] == ["Annex: sample", "Annex: identifiers", "Annex: hashes"]
    assert "Nobody is named who answers for this assertion." in strings_of(page)
    named = report.replace(asked=report.asked._replace(preparer="Ada, compliance", threshold_ppm=985_000))
    words = strings_of(page_of(named))
    assert "Ada, compliance" in words and "Nobody is named who answers for this assertion." not in words
    assert "--threshold 98.5 --prepared-by 'Ada, compliance'" in named.rerun()


@pytest.mark.system("a part of the PDF has no tag")
def test_the_pdf_is_tagged_throughout(one_process: OneProcess, world: Callable[..., Any]) -> None:
    """Its structure names every mark on every page; what is drawn outside of a mark is no text."""
    pypdf = pytest.importorskip("pypdf")
    one_process.fill(clean(world))
    report = one_process.report()
    reader = pypdf.PdfReader(io.BytesIO(render(report, "pdf")))
    catalog = reader.trailer["/Root"]
    assert catalog["/MarkInfo"]["/Marked"] and catalog["/Lang"] == "en"
    roles = Counter[str]()
    read = Counter[tuple[int, int]]()
    sheets = {page.indirect_reference.idnum: number for number, page in enumerate(reader.pages)}

    def walk(element: Any, page: Any) -> None:
        roles[element["/S"]] += 1
        page = element.raw_get("/Pg") if "/Pg" in element else page
        if element["/S"] == "/Figure":
            assert len(element["/Alt"]) > 10
        parts = element.get("/K", [])
        for each in parts if isinstance(parts, list) else [parts]:
            part = each.get_object()
            if isinstance(part, int):
                read[sheets[page.idnum], part] += 1
            elif part.get("/Type") == "/MCR":
                read[sheets[part.raw_get("/Pg").idnum], part["/MCID"]] += 1
            elif "/S" in part:
                walk(part, page)

    root = catalog["/StructTreeRoot"]["/K"]
    for element in root if isinstance(root, list) else [root]:
        walk(element.get_object(), None)
    sections = page_of(report).sections
    assert roles["/H1"] == 1 and roles["/H2"] == len(sections) + 2, "with the contents and the terms"
    assert roles["/Table"] > 10 and roles["/TH"] > 20 and roles["/Figure"] >= 3 and roles["/LBody"] > 5
    assert max(read.values()) == 1, "no mark is read twice"
    for number, page in enumerate(reader.pages):
        code = page.get_contents().get_data().decode("latin-1")
        marks = [int(mark) for mark in re.findall(r"/MCID (\d+)", code)]
        told = {mark for sheet, mark in read if sheet == number}
        assert {*marks} - told == {*marks[-2:]} and told < {*marks}, "all but the foot of the page"
        assert not any(word in _outside(code) for word in (" Tj", " TJ")), (number, _outside(code)[:200])


def _outside(code: str) -> str:
    """What is drawn in no mark."""
    depth, kept = 0, []
    for line in code.replace("EMC", "\nEMC\n").replace("BDC", "BDC\n").replace("BMC", "BMC\n").splitlines():
        if line.rstrip().endswith(("BDC", "BMC")):
            depth += 1
        elif line.strip() == "EMC":
            depth -= 1
        elif not depth:
            kept.append(line)
    return "\n".join(kept)


def test_a_trend_costs_no_further_reading_of_the_ledger(one_process: OneProcess, world: Callable[..., Any]) -> None:
    """The last quarter, with three periods before it, reads the rows of custody as often as the whole does."""
    one_process.fill(clean(world))
    queries: list[str] = []

    def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "custody_ends" in statement or "FROM residencies" in statement:
            queries.append(statement)

    event.listen(one_process.store, "before_cursor_execute", executed)
    with one_process.store.connect() as connection:
        size = newest_checkpoint(connection)
        since, until = period(connection, size, None, None)
        whole = ReportParameters("gdpr", size, since, until, recount=False, sample=0)
        build_report(connection, whole)
        of_whole = len(queries)
        quarter = whole._replace(since_us=until - (until - since) // 4)
        report = build_report(connection, quarter)
    assert len(report["board"].trend) == 4
    assert len(queries) - of_whole == of_whole > 0


@pytest.mark.parametrize(
    ("answered_after", "asked_before", "state", "is_exception"),
    [
        (4_000, 0, "complete", False),
        (6_000, 0, "late", True),
        (None, 0, "missed", True),
        (None, 9_000, "open", False),
    ],
)
def test_what_is_late_is_an_exception_with_its_deadline_and_what_is_not_due_yet_is_none(
    one_process: OneProcess,
    world: Callable[..., Any],
    answered_after: int | None,
    asked_before: int,
    state: str,
    is_exception: bool,
) -> None:
    """One word in the report and in what pages, the API and metrics use (`read_states`)."""
    events = erased(clean(world), answered_after=answered_after)
    asked = next(event for event in events if isinstance(event, ErasureRequested))
    events[events.index(asked)] = asked = asked._replace(deadline_us=asked.deadline_us + asked_before)
    one_process.fill(events)
    report = one_process.report()
    (erasure,) = report["activity"].erasures
    late_exceptions = [each for each in report["opinion"].exceptions if each.id == "erasure:e-1"]
    assert erasure.state == state and bool(late_exceptions) is is_exception
    with one_process.store.connect() as connection:
        request = requests_of(connection)[0].asked
        now_us = report["boundary"].checkpoint.at_us
        assert read_states(connection, [request], now_us, read_work_periods(connection)) == {request: state}
    if is_exception:
        due, answered = second(erasure.due_us), second(erasure.completed_us) or "not answered"
        assert iso(erasure.due_us) in late_exceptions[0].cause and state in late_exceptions[0].cause
        assert "nobody knows" not in late_exceptions[0].risk
        activity = next(part for part in page_of(report).sections if part.title.startswith("Erasures"))
        rows = [row for block in activity.blocks if isinstance(block, Table) for row in block.rows]
        (row,) = [row for row in rows if row[0] == "e-1"]
        assert row[5] == due and row[7] == state and (answered in row[6] or row[6].startswith("not by"))
