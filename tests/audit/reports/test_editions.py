"""A report binds to a tree size: equal at equal size; growth is no exception; a new edition lists what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine

from kvcustody.audit.kinds import (
    CustodyEnded,
    ErasureCompleted,
    ErasureRequested,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.reports.build_report import build_report, period
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from standins.audit.one_process import OneProcess

GROWTH = "+ growth"


@pytest.fixture
def one_process(store: Engine, tmp_path: Path) -> OneProcess:
    return OneProcess(store, tmp_path)


def blocks(first: int, count: int) -> tuple[Run, ...]:
    return (Run(np.arange(first, first + count, dtype=np.int64), first + 1),)


def opened(residency: int, first: int, count: int, at: int) -> ResidencyOpened:
    written = blocks(first, count)
    return ResidencyOpened(
        at, residency, "acme", None, None, False, "internal", (1,), (), ("own",), 1, 9 * 10**6, written
    )


START = WorkerStarted(1, "worker-1", 64, 1, 4096, "cpu", "test")
RUNNING = [START, opened(1, 0, 2, 100), opened(2, 5, 2, 200)]  # the first grew by blocks 2 to 4 between


def balance(report: Report) -> Any:
    return next(one for one in report["population"].balances if GROWTH in one.name)


def identities(report: Report) -> list[str]:
    return [one.id for one in report["opinion"].exceptions if one.id.startswith("identity")]


def test_what_running_requests_grew_by_is_a_term_and_no_exception(one_process: OneProcess) -> None:
    one_process.fill(RUNNING)
    report = one_process.report()
    assert balance(report).holds and balance(report).left == 7, "three of them are listed by no leaf yet"
    assert identities(report) == []
    one_process.fill([ResidencyReleased(300, 1, "acme", "finish", blocks(2, 3), 0)], first=4)
    assert balance(one_process.report()).holds and balance(one_process.report()).left == 7


@pytest.mark.parametrize("lost", ["growth of a request that has ended", "an opening before all that run"])
def test_the_control_what_nobody_can_list_any_more_is_an_exception(one_process: OneProcess, lost: str) -> None:
    if lost.startswith("growth"):
        one_process.fill([*RUNNING, ResidencyReleased(300, 1, "acme", "finish", (), 0)])
    else:
        one_process.fill([START, opened(2, 5, 2, 200)])
    report = one_process.report()
    assert not balance(report).holds and len(identities(report)) == 1


@pytest.mark.parametrize("lost_leaves", [1, 0])
def test_a_leaf_lost_while_requests_run_is_no_growth(one_process: OneProcess, lost_leaves: int) -> None:
    """It lies behind the first block of the oldest request that runs. The control: no sequence is missing."""
    one_process.fill(RUNNING)
    one_process.fill([opened(4, 9, 1, 260)], first=4 + lost_leaves)
    report = one_process.report()
    assert balance(report).holds is not bool(lost_leaves)
    assert len(identities(report)) == lost_leaves


def test_an_edition_lists_what_came_later_about_the_period(one_process: OneProcess, store: Engine) -> None:
    asked = ErasureRequested(250, "e-1", "acme", "tenant", None, None, 400, "dpo")
    one_process.fill([*RUNNING, asked])
    with store.connect() as connection:
        first = one_process.report().asked.checkpoint
        bounds = period(connection, first, None, None)
        again = [build_report(connection, ReportParameters("soc2", first, *bounds, sample=0)) for _ in range(2)]
    assert again[0].to_bytes() == again[1].to_bytes() and again[0]["changes"] == ()
    ended = [
        ResidencyReleased(300, 1, "acme", "finish", blocks(2, 3), 0),
        CustodyEnded(310, "acme", "internal", blocks(0, 5), "finished", 300, 300, 300, 1_000),
        ErasureCompleted(500, "e-1", "acme", "complete", 1, 5, 0),
    ]
    one_process.fill(ended, first=5)
    with store.connect() as connection:
        asked_again = ReportParameters("soc2", first, *bounds, sample=0)
        assert build_report(connection, asked_again).to_bytes() == again[0].to_bytes(), "as of the same size"
        edition = build_report(
            connection, asked_again._replace(checkpoint=one_process.report().asked.checkpoint, extends=first)
        )
        plain = build_report(connection, asked_again._replace(checkpoint=edition.asked.checkpoint))
    changed = {one.figure: (one.before, one.after) for one in edition["changes"]}
    assert changed["erasures late"] == (0, 1) and changed["leaves of the period"] == (4, 7)
    for verdict in ("due", "covered", "late", "missing"):
        before, after = getattr(again[0]["total"], verdict), getattr(plain["total"], verdict)
        assert changed.get(f"units {verdict}", (before, before)) == (before, after), verdict
