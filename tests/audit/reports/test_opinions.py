"""The qualifications on a report's first page; replayed history; the window of signatures; ages beside limits."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from kvcustody.audit.kinds import (
    CustodyEnded,
    ErasureCompleted,
    ErasureRequested,
    GapRecorded,
    ReceiptRecorded,
    ResidencyOpened,
    WorkerDied,
    WorkerStopped,
)
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.erasure.certificate import CERTIFICATE
from kvcustody.audit.reports.framework import NAMES, load_framework
from kvcustody.audit.reports.given import read_responses
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.sections.opinion import QualifyingException, opinion_of
from kvcustody.console.render.document_forms import WATERMARK, render, render_all
from kvcustody.errors import ConfigError
from standins.audit.documents import verify_report
from standins.audit.one_process import KEY, OneProcess, clean
from standins.console.read_page import Items, Paragraph, page_of


@pytest.fixture
def one_process(store: Engine, tmp_path: Path) -> OneProcess:
    return OneProcess(store, tmp_path)


def ids(report: Report) -> list[str]:
    return [item.id.partition(":")[0] for item in report["opinion"].exceptions]


def test_what_is_in_order_is_unqualified(one_process: OneProcess, world: Callable[..., Any]) -> None:
    one_process.fill(clean(world))
    report = one_process.report()
    late = report["total"].due - report["total"].covered
    assert ids(report) == (["uncovered"] if late else []), report["opinion"]
    if not late:
        assert (
            report["opinion"].kind == "unqualified" and report["opinion"].low_ppm == report["opinion"].high_ppm == 10**6
        )
        assert page_of(report).tiles[0].value == "unqualified"
        assert [row.beyond_limit for row in report["storage"]] != []


def qualified_by(one_process: OneProcess, events: list[Any]) -> Report:
    one_process.fill(events)
    report = one_process.report()
    page = page_of(report)
    assert report["opinion"].kind in ("qualified", "adverse") and page.tiles[0].mark == "bad"
    assert [section.title for section in page.sections[:2]] == ["For the board", "Opinion"]
    return report


def test_a_process_that_was_killed_leaves_a_range(one_process: OneProcess, world: Callable[..., Any]) -> None:
    """Its open custody is unproven: neither covered nor not, at both ends of the range."""
    dead = [event for event in clean(world) if not isinstance(event, WorkerStopped)]
    at = dead[-1].at_us
    ends = [event for event in dead if isinstance(event, CustodyEnded)][-3:]
    dead = [event for event in dead if event not in ends]
    dead += [event._replace(at_us=at, cause="unproven: process death") for event in ends]
    dead.append(WorkerDied(at + 9, "worker-1", "d" * 32, "killed", 0, 3))
    report = qualified_by(one_process, dead)
    opinion = report["opinion"]
    assert {"death", "uncovered"} <= set(ids(report))
    assert opinion.unknown == report["total"].unproven > 0 and opinion.low_ppm < opinion.high_ppm
    assert opinion.low_ppm == report["total"].covered * 10**6 // report["total"].due
    tile = page_of(report).tiles[1].value
    assert "–" in tile and tile.endswith(" %")


def test_an_erasure_without_an_answer(one_process: OneProcess, world: Callable[..., Any]) -> None:
    events = clean(world)
    at = events[-2].at_us
    asked = ErasureRequested(at, "e-1", "tenant-1", "tenant", None, None, at + 5, "dpo")
    report = qualified_by(one_process, [*events[:-1], asked, events[-1]])
    assert ids(report)[-1] == "erasure"
    assert "missed" in report["opinion"].exceptions[-1].cause
    assert "not answered by worker-1" in report["opinion"].exceptions[-1].cause


def test_the_control_an_erasure_that_was_answered(one_process: OneProcess, world: Callable[..., Any]) -> None:
    events = clean(world)
    at = events[-2].at_us
    asked = ErasureRequested(at, "e-1", "tenant-1", "tenant", None, None, at + 5, "dpo")
    told = ErasureCompleted(at + 1, "e-1", "tenant-1", "complete", 0, 0, 0)
    one_process.fill([*events[:-1], asked, told, events[-1]])
    assert "erasure" not in ids(one_process.report())


@pytest.mark.parametrize("trouble", ["unscanned", "gap", "identity"])
def test_a_pool_unscanned_a_gap_and_an_identity(
    one_process: OneProcess, world: Callable[..., Any], trouble: str
) -> None:
    events = clean(world, scanned=trouble != "unscanned")
    if trouble == "gap":
        events.insert(-1, GapRecorded(events[-1].at_us, "disk full", 9_000, 9_009))
    if trouble == "identity":
        gone = next(e for e in events if isinstance(e, ResidencyOpened) and e.written)
        events.remove(gone)
    report = qualified_by(one_process, events)
    assert trouble in ids(report)
    if trouble == "identity":
        assert report["opinion"].unknown > 0, "what a counter handed out and no leaf lists"


def test_an_opinion_that_was_made_better_is_found_in_the_file_alone(
    one_process: OneProcess, world: Callable[..., Any]
) -> None:
    report = qualified_by(one_process, [*clean(world, scanned=False)])
    better = report.replace(opinion=report["opinion"]._replace(kind="unqualified", exceptions=()))
    found = verify_report(better.to_bytes(), [str(KEY.verifier)])
    assert any(problem.startswith("Opinion: the facts are not those") for problem in found.problems)
    found = verify_report(report.to_bytes(), [str(KEY.verifier)])
    assert not any("pinion" in problem for problem in found.problems), "control"


def test_an_adverse_opinion_where_most_is_not_covered(one_process: OneProcess, world: Callable[..., Any]) -> None:
    report = qualified_by(one_process, [e for e in clean(world) if not isinstance(e, ReceiptRecorded)])
    assert report["opinion"].kind == "adverse" and report["opinion"].high_ppm < 900_000


ANSWER = """[[response]]
id = "unscanned"
owner = "olive"
date = "2026-12-01"
response = "scans run daily from then on"
"""


def test_the_opinion_says_who_gives_it_and_what_makes_it_adverse(
    one_process: OneProcess, world: Callable[..., Any]
) -> None:
    one_process.fill(clean(world))
    report = one_process.report()
    opinion = report["opinion"]
    exceptions = (
        QualifyingException("uncovered", True, 9, "much is late", *("",) * 5),
        QualifyingException("unscanned", False, 1, "a pool was not scanned", *("",) * 5),
    )
    worse = report.replace(opinion=opinion._replace(kind="adverse", exceptions=exceptions))
    blocks = page_of(worse).section("Opinion").blocks
    lists = [block.items for block in blocks if isinstance(block, Items)]
    assert lists[0] == ("much is late",), "the exceptions that make it adverse, and no others"
    assert [item.partition(":")[0] for item in lists[1]] == [
        "Unqualified",
        "Qualified",
        "Adverse",
        "Adverse too",
    ]
    assert any("not of an auditor" in block.text for block in blocks if isinstance(block, Paragraph))
    better = page_of(report.replace(opinion=opinion._replace(kind="unqualified", exceptions=())))
    lists = [block.items for block in better.section("Opinion").blocks if isinstance(block, Items)]
    assert len(lists) == 1, "control: the rules alone"


def test_people_answer_for_exceptions(one_process: OneProcess, world: Callable[..., Any]) -> None:
    one_process.fill(clean(world, scanned=False))
    answered = one_process.report(responses=read_responses(ANSWER))
    one = next(item for item in answered["opinion"].exceptions if item.id == "unscanned")
    assert (one.owner, one.date, one.compensating_control) == ("olive", "2026-12-01", "not given")
    silent = next(item for item in one_process.report()["opinion"].exceptions if item.id == "unscanned")
    assert silent.owner == silent.response == "not given" and silent.risk == one.risk
    assert answered["opinion"].kind == one_process.report()["opinion"].kind, "an answer changes no opinion"
    assert "--responses" in answered.rerun() and opinion_of(answered) == answered["opinion"]
    for wrong in ('[[response]]\nowner = "olive"', "[[response]]\nid = 5", "answers = 1", "[["):
        with pytest.raises(ConfigError):
            read_responses(wrong)


@pytest.mark.parametrize(
    "origin",
    [pytest.param("replayed", marks=pytest.mark.system("a page of a replayed report is not marked")), ""],
)
def test_replayed_history_is_marked_on_every_page_and_cites_no_clock(
    one_process: OneProcess, world: Callable[..., Any], origin: str
) -> None:
    events = clean(world)
    one_process.fill([events[0]._replace(origin=origin), *events[1:]])
    report = one_process.report()
    files = render_all(report, ["html", "oscal"])
    if origin:  # the PDF is of this HTML
        pypdf = pytest.importorskip("pypdf")
        pages = pypdf.PdfReader(io.BytesIO(render_all(report, ["pdf"])["report.pdf"])).pages
        assert len(pages) > 3 and all(WATERMARK in page.extract_text() for page in pages)
    assert (f'class="watermark" aria-hidden="true">{WATERMARK}' in files["report.html"].decode()) is bool(origin)
    oscal = json.loads(files["oscal.json"])["assessment-results"]
    cited = {
        prop["value"]
        for item in oscal["results"][0]["observations"]
        for prop in item["props"]
        if prop["name"] == "control-id"
    }
    assert ("au-8" in cited) is not bool(origin)
    assert any(item["control"] == "AU-8" for item in json.loads(report.to_bytes())["statements"]) is not bool(origin)
    assert ("history" in ids(report)) is bool(origin)
    assert (report["window"].longest_us == 0) is bool(origin), "its leaves state times of their own"


def test_every_control_about_a_clock_says_so() -> None:
    for name in NAMES:
        for control in load_framework(name).controls:
            words = f"{control.title} {control.supports}".lower()
            assert control.clock or "clock" not in words, control.id


def test_the_longest_window_is_that_of_the_leaf_that_waited_longest(
    one_process: OneProcess, world: Callable[..., Any]
) -> None:
    events = clean(world)
    one_process.fill(events)
    with one_process.store.connect() as connection:
        [signed] = connection.exec_driver_sql("SELECT at_us FROM signed_checkpoints").scalars()
        first = connection.exec_driver_sql("SELECT min(at_us) FROM events").scalar()
    window = one_process.report()["window"]
    assert window.longest_us == signed - first and window.signed_us == signed and window.at_us == first
    later = world(9).run(20).events
    one_process.fill([event._replace(at_us=event.at_us + 10**9) for event in later[:1]], "e" * 32)
    assert one_process.report()["window"] == window, "what is signed sooner is no longest"


def test_ages_are_beside_the_limits_that_leaves_record(one_process: OneProcess, world: Callable[..., Any]) -> None:
    events = clean(world)
    one_process.fill(events)
    report = one_process.report()
    [row] = report["storage"]
    assert row.classification == "internal" and row.custodies == row.by_deadline
    assert row.custodies == report["population"].custodies - row.overdue and row.unaged == 0
    assert row.absolute_us_min == row.absolute_us_max == 8_000_000
    assert row.within_us_min == row.within_us_max == 1_000_000
    opened = {e.residency: e.at_us for e in events if isinstance(e, ResidencyOpened)}
    oldest = max(e.ended_us for e in events if isinstance(e, CustodyEnded)) - min(opened.values())
    assert 0 < row.age_us_p50 <= row.age_us_p99 <= row.age_us_max <= oldest
    late = sum(
        len(run.blocks)
        for e in events
        if isinstance(e, CustodyEnded) and 0 < e.ceiling_us + e.scrub_within_us < e.ended_us
        for run in e.runs
    )
    assert row.beyond_limit == late


def certificate(outcome: str, waiting: list[str]) -> Document:
    """As much of one as its page shows, with nothing left over in what was answered."""
    asked = dict.fromkeys(("subject", "session", "tenant"), "") | {"selector": "tenant", "detail": ""}
    asked |= {"commitment": "00", "actor": "dpo", "at_us": 1, "deadline_us": 2}
    counts = dict.fromkeys(
        ("units", "destroyed", "bytes", "receipts", "reread_blocks", "reread_nonzero", "unproven"), 0
    )
    figures = counts | {"kept": {}, "by_level": {}, "tiers": {}}
    body = {"erasure": "e-1", "outcome": outcome, "waiting": waiting, "unreachable": [], "request": asked}
    body |= {"figures": figures, "population": {"residencies": 0}, "workers": [], "leaves": [], "limits": []}
    body |= {"ledger": {"checkpoint_size": 1, "heads": {}}}
    return Document(CERTIFICATE, body | {"holds": [], "marked": [], "monitored": [], "issued_us": 1}, 1)


def test_a_certificate_without_an_answer_never_says_that_nothing_remains() -> None:
    page = render(certificate("partial", ["worker-2"]), "html").decode()
    assert "nothing remains" not in page and "no answer from worker-2" in page and "unknown" in page
    assert "nothing remains" not in render(certificate("partial", []), "html").decode()
    assert "nothing remains" in render(certificate("complete", []), "html").decode(), "control"
