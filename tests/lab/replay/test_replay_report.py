"""Folding events into a report, percentiles, charts and the page."""

from __future__ import annotations

import io
import re
from collections import Counter

import numpy as np
import pytest
from rich.console import Console

from kvcustody.audit.kinds import CustodyEnded, ReceiptRecorded, ResidencyOpened, ResidencyReleased
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.console.replay.command import LATE_BY_LOAD, print_report
from kvcustody.lab.replay.charts import (
    Series,
    StackedBar,
    clock_text,
    histogram,
    stacked_areas,
    stacked_bars,
)
from kvcustody.lab.replay.report import (
    ReplayCoverage,
    ReplayIdentity,
    ReplayReport,
    Sample,
    Spread,
    TenantResult,
    Weighted,
)
from kvcustody.lab.replay.run.observer import ReplayObserver
from kvcustody.lab.replay.summary import duration, percent, render_summary


def run(*blocks: int, generation: int = 1) -> Run:
    return Run(np.array(blocks, dtype=np.int64), generation)


def life(
    observer: ReplayObserver,
    blocks: tuple[int, ...],
    generation: int,
    born: int,
    ended: int,
    wiped: int,
    cause: str,
) -> None:
    """One residency's blocks, from admission to receipt."""
    runs = (run(*blocks, generation=generation),)
    observer.see(
        [
            ResidencyOpened(born, generation, "acme", None, None, False, "internal", (1,), (), (), 1, 0),
            ResidencyReleased(born + 5, generation, "acme", "finished", runs, 0),
            CustodyEnded(ended, "acme", "internal", runs, cause, ended, ended, ended, 1_000_000),
            ReceiptRecorded(
                wiped, 1, 0, "acme", "torch", "cpu", 64, ended, wiped, "full", 1.0, len(blocks), "ok", runs
            ),
        ]
    )


def test_events_become_ages_lags_and_causes() -> None:
    observer = ReplayObserver(16)
    life(observer, (1, 2, 3), 1, born=100, ended=1100, wiped=1150, cause="expired")
    life(observer, (3, 4), 10, born=2000, ended=2500, wiped=2510, cause="pressure")
    assert observer.ended["acme"] == Counter({"expired": 3, "pressure": 2})
    assert observer.age["internal"].spread() == Spread(5, 1000, 1000, 1000)
    assert observer.scrub_lag.spread() == Spread(5, 50, 50, 50)
    assert observer.scrubbed["acme"] == observer.released_blocks == 5
    assert observer.by_level == Counter({"full": 5})
    assert observer.unexplained_blocks == 0


def test_an_age_is_not_guessed_for_another_generation() -> None:
    observer = ReplayObserver(4)
    life(observer, (0,), 1, born=0, ended=10, wiped=11, cause="expired")
    runs = (run(0, generation=7),)
    observer.see([CustodyEnded(99, "acme", "internal", runs, "expired", 99, 99, 99, 1)])
    assert observer.ages.spread().blocks == 1
    observer.see([ReceiptRecorded(99, 1, 0, "acme", "t", "cpu", 1, 99, 99, "full", 1, 1, "ok", (run(2),))])
    assert observer.unexplained_blocks == 1, "a receipt for a block that never ended"


def test_percentiles_are_weighted_nearest_rank() -> None:
    weighted = Weighted()
    for value, weight in ((10, 98), (20, 1), (30, 1)):
        weighted.add(value, weight)
    assert weighted.spread() == Spread(100, 10, 20, 30)
    assert weighted.histogram([10, 25]) == [98, 1, 1]
    assert Weighted().spread() == Spread(0, None, None, None)


def test_charts_draw_what_they_are_given_and_escape_it() -> None:
    bars = stacked_bars("t", [StackedBar("<acme>", (3, 1), "75 %")], (Series("a", "s1"), Series("b", "s2")))
    assert bars.count("<rect") == 2 and "&lt;acme&gt;" in bars and "<acme>" not in bars
    assert histogram("t", [1, 0, 2], ["x", "y", "z"], "u").count("<rect") == 2
    areas = stacked_areas("t", [0, 1, 2], (Series("a", "s1"),), [[1, 2, 3]], "s")
    assert areas.count("<path") == 1
    for nothing in (
        stacked_bars("t", [], ()),
        histogram("t", [0], ["x"], "u"),
        stacked_areas("t", [0], (), [], "s"),
    ):
        assert "no data" in nothing
    assert clock_text(3725) == "1:02:05"


def report(**changes) -> ReplayReport:
    rows = [
        TenantResult("acme", requests=2, input_tokens=100, hit_tokens=40, denials=Counter({"no-<restricted>": 3})),
        TenantResult("globex", requests=1, input_tokens=50, hit_tokens=0),
    ]
    values = {
        "title": "a & b",
        "origin": "generated",
        "settings": {"policy": "<regulated>"},
        "tenants": rows,
        "samples": [Sample(i * 10**6, 1, 2, 0, 0, 0) for i in range(3)],
        "coverage": ReplayCoverage(due=10, in_time=9, late=1, bytes_by_level=(("full", 9),)),
        "identities": [ReplayIdentity("released = scrubbed", 4, 5, "ledger; device")],
        "scrub_lag": Spread(9, 10, 20_000, 3_000_000),
        "retention_age": {"internal": Spread(9, 10, 20, None)},
        "age_histogram": [0, 1],
        "lag_histogram": [2, 3],
        "residue_checked_blocks": 7,
        "residue_bytes": 0,
        "read_tokens": 40,
        "wrong_tokens": 0,
        "drift_blocks": 0,
        "expired_residencies": 3,
        "evicted_blocks": {"pressure": 2},
        "status": {"blocks.total": 100},
        "charged": {},
        "lineages": Counter(),
        "seconds": 1.0,
        "virtual_seconds": 60.0,
    }
    return ReplayReport(**(values | changes))


def test_the_page_is_one_file_without_scripts_or_requests() -> None:
    page = render_summary(report(error=KeyboardInterrupt()))
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page and "url(" not in page and "<link" not in page
    assert "a &amp; b" in page and "&lt;regulated&gt;" in page and "no-&lt;restricted&gt;" in page
    assert "Stopped early: interrupted" in page
    assert page.count("<svg") == 5
    assert re.search(r'class="bad">no<', page), "an identity that does not hold is marked"
    assert "prefers-color-scheme: dark" in page and "@media print" in page


@pytest.mark.parametrize("late", [1, 0])
def test_custody_that_was_late_is_printed_with_its_cause(late: int) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    print_report(report(coverage=ReplayCoverage(due=10, in_time=10 - late, late=late)), console)
    printed = console.export_text()
    assert f"{late} late" in printed and (LATE_BY_LOAD in printed) is bool(late)


def test_totals_and_json_agree_with_the_rows() -> None:
    document = report().as_json()
    assert document["totals"]["input_tokens"] == 150 == sum(row["input_tokens"] for row in document["tenants"])
    assert document["totals"]["denials"] == {"no-<restricted>": 3}
    assert document["coverage"]["share"] == 0.9
    assert document["identities"][0]["holds"] is False
    assert report().totals.prefill_avoided == 40 / 150


def test_units_are_the_ones_a_person_would_use() -> None:
    assert [duration(v) for v in (None, 7, 1500, 2_500_000, 600_000_000, 9_000_000_000)] == [
        "no data",
        "7 µs",
        "1.5 ms",
        "2.5 s",
        "10 min",
        "2.5 h",
    ]
    assert percent(None) == "no data" and percent(0.12345) == "12.35 %"
