"""Sentences of reports that used to be false, each in a case that refutes its old wording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.evidence.coverage.summary import CoverageRow, CoverageSummary
from kvcustody.audit.kinds import CustodyEnded, PolicyActivated, ReleaseStep, ResidencyOpened, WorkerStarted
from kvcustody.audit.reports.framework import EVIDENCE_PRESENT
from kvcustody.audit.reports.model import Report
from kvcustody.console.coverage import command as coverage_command
from kvcustody.console.main import app
from kvcustody.console.render.number_format import share
from standins.audit.one_process import OneProcess, clean
from standins.console.read_page import Table, page_of, strings_of

SECOND_US = 1_000_000


@pytest.fixture
def one_process(store: Engine, tmp_path: Path) -> OneProcess:
    return OneProcess(store, tmp_path)


def text_of(report: Report) -> str:
    return "\n".join(strings_of(page_of(report)))


def table(report: Report, first_heading: str) -> Table:
    """The one table whose first column has this heading."""
    [found] = [
        block for block in page_of(report).blocks() if isinstance(block, Table) and block.headings[0] == first_heading
    ]
    return found


def test_a_rule_that_forbids_permits_nothing(one_process: OneProcess, world: Callable[..., Any]) -> None:
    """A residency names every rule that decided it, a forbid too: it opened without reuse."""
    forbidden = ("no-restricted",)
    one_process.fill([e._replace(reasons=forbidden) if isinstance(e, ResidencyOpened) else e for e in clean(world)])
    report = one_process.report()
    assert [item.rules for item in report["decided"].residencies] == ["no-restricted"]
    assert "permitted by" not in text_of(report) and "permitted them" not in text_of(report)


def test_the_report_says_how_many_strata_have_a_draw(one_process: OneProcess, world: Callable[..., Any]) -> None:
    one_process.fill(clean(world))
    report = one_process.report(sample=2)
    strata = {item[:4] for item in report["sampling"].strata}
    drawn = {
        (item.custody.tier, item.custody.tenant, item.custody.classification, item.custody.cause)
        for item in report["sample"]
    }
    assert len(drawn) < len(strata), "void: fewer draws than strata"
    [cell] = [row[3] for row in table(report, "information").rows if row[0] == "sample"]
    assert cell == f"{len(drawn)} of {len(strata)} strata with a draw"
    assert "each stratum" not in text_of(report) and "Each gets one draw" not in text_of(report)


def test_a_device_is_a_device_and_nobodys_name(one_process: OneProcess, world: Callable[..., Any]) -> None:
    one_process.fill(clean(world))
    services = table(one_process.report(), "service")
    assert "whose" not in services.headings
    assert services.rows[0][:2] == ("the engine and its host", "devices: cpu")


@pytest.mark.parametrize(("beyond_us", "is_beyond"), [(1, False), (SECOND_US, False), (SECOND_US + 1, True)])
def test_custody_whose_ceiling_was_just_narrowed_is_within_its_limit(
    one_process: OneProcess, world: Callable[..., Any], beyond_us: int, is_beyond: bool
) -> None:
    """A narrowing puts the ceiling before the end that it causes: the end has `scrub.within` (a second) for it."""
    cut = [e._replace(ceiling_us=e.ended_us - beyond_us) if isinstance(e, CustodyEnded) else e for e in clean(world)]
    one_process.fill(cut)
    report = one_process.report()
    [row] = report["storage"]
    assert row.within_us_max == SECOND_US
    assert row.beyond_limit == (row.custodies if is_beyond else 0)
    assert "past ceiling and scrub.within" in text_of(report)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_change_is_evidenced_by_who_proposed_and_approved_it(
    one_process: OneProcess, world: Callable[..., Any], is_recorded: bool
) -> None:
    events = clean(world)
    at = events[-1].at_us
    digest = "sha256:" + "cd" * 32
    activated = PolicyActivated(at, 1, "regulated-saas", "shared", digest, "governor")
    steps = [
        ReleaseStep(at + number, number, action, 1, digest, "ab" * 32, actor)
        for number, (action, actor) in enumerate((("propose", "ada"), ("approve", "ben")), 1)
    ]
    one_process.fill([*events[:-1], activated, *(steps if is_recorded else []), events[-1]._replace(at_us=at + 9)])
    report = one_process.report("soc2")
    [status] = [one for one in report["statuses"] if one.control == "CC8.1"]
    [left_out] = [
        line for line in strings_of(page_of(report)) if line.startswith("Nothing is on record") and "reuse" in line
    ]
    assert ("steps of the policy's release" in left_out) is not is_recorded
    if is_recorded:
        rows = table(report, "step of the policy's release").rows
        assert status.status == EVIDENCE_PRESENT and "release" in status.sections
        assert [row[:3] for row in rows] == [("propose", "1", "ada"), ("approve", "1", "ben")]
    else:
        assert status.status == "none in the period"
        assert "step of the policy's release" not in strings_of(page_of(report)), "a table of nothing"


def test_the_command_and_the_report_round_a_share_alike(
    one_process: OneProcess, world: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """99.946 %: rounded to the nearest it would be 99.95, and more than was covered."""
    one_process.fill(clean(world))
    row = CoverageRow("acme", "internal", due=100_000, covered=99_946)
    coverage_command._units_and_bytes(CoverageSummary((row,), 0, 0, 0))
    printed = capsys.readouterr().out
    opinion = one_process.report()["opinion"]._replace(low_ppm=999_460, high_ppm=999_460, unknown=0)
    assert share(opinion.low_ppm, opinion.high_ppm, opinion.unknown) == "99.94 %"
    assert "99.94" in printed and "99.95" not in printed


def test_no_exceptions_are_counted_beside_a_qualified_opinion(one_process: OneProcess, tmp_path: Path) -> None:
    """Nothing is uncovered, for nothing was due; the opinion is qualified by that, and by a pool without a scan."""
    one_process.fill([WorkerStarted(1, "worker-1", 64, 1, 4096, "cpu", "test")])
    report = one_process.report()
    assert report["opinion"].kind == "qualified" and report["total"].due == 0
    assert "0 exceptions" not in text_of(report) and "that are exceptions" not in text_of(report)
    words = [
        "report",
        "make",
        "--framework",
        "soc2",
        "--ledger",
        str(tmp_path / "ledger.db"),
        "--format",
        "json",
    ]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    said, exceptions = " ".join(done.output.split()), len(report["opinion"].exceptions)
    assert "the opinion is qualified" in said and exceptions == 2
    assert f"0 are not covered; {exceptions} exceptions in the opinion" in said and "0 exceptions" not in said
