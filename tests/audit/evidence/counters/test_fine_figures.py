"""Figures of a short period: what hours have, in narrower cells, with bounded work; and coverage by minute."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine, event

from kvcustody.audit.evidence.counters import fine_figures, judge_hours
from kvcustody.audit.evidence.counters.fine_figures import CELL_US, SPAN_MAX_US, FineCells, FineFigures
from kvcustody.audit.evidence.counters.hourly_coverage import period
from kvcustody.audit.evidence.counters.judge_hours import HourlyJudge
from kvcustody.audit.evidence.counters.read_figures import figures_by_hour, hours_with_leaves
from kvcustody.audit.evidence.coverage.lag_counts import added
from kvcustody.audit.evidence.coverage.summary import add_rows
from kvcustody.audit.project import ATTACHED, BLOCKS, DENIED, EVENTS, WRITTEN
from kvcustody.times import HOUR_US, SECOND_US

MEASURES = (EVENTS, ATTACHED, WRITTEN, BLOCKS, DENIED)


def written(engine: Engine, make_writer: Any, world: Any, held_back: int = 0) -> tuple[Any, list[Any]]:
    """Return a writer that has written a history except for its last events, and these."""
    every = world(3, tenants=3).run(120).events
    first, rest = every[: len(every) - held_back], every[len(every) - held_back :]
    writer = make_writer(engine)
    for start in range(0, len(first), 40):
        writer.submit(first[start : start + 40])
        assert writer.flush()
    return writer, rest


def whole_hours(engine: Engine) -> tuple[int, int]:
    """Return the period of whole hours that holds every leaf, six hours at most."""
    with engine.connect() as connection:
        hours = hours_with_leaves(connection, since_us=0, until_us=1 << 62)
    assert max(hours) + HOUR_US - min(hours) <= SPAN_MAX_US
    return min(hours), max(hours) + HOUR_US


def read(fine: FineFigures, engine: Engine, tenant: str | None = None) -> FineCells | None:
    with engine.connect() as connection:
        return fine.read(connection, *whole_hours(engine), tenant=tenant)


@pytest.mark.parametrize("tenant", [None, "tenant-1"])
def test_cells_add_up_to_hours(any_store: Engine, make_writer: Any, world: Any, tenant: str | None) -> None:
    written(any_store, make_writer, world)
    since_us, until_us = whole_hours(any_store)
    cells = read(FineFigures(), any_store, tenant)
    assert cells is not None
    for scraped in (False, True):
        by_hour, by_cell = Counter[Any](), Counter[Any]()
        with any_store.connect() as connection:
            for figure in figures_by_hour(
                connection, MEASURES, tenant=tenant, since_us=since_us, until_us=until_us, scraped=scraped
            ):
                by_hour[figure._replace(value=0)] += figure.value
        for figure in cells.figures(MEASURES, scraped=scraped):
            assert figure.hour_us % CELL_US == 0
            by_cell[figure._replace(hour_us=figure.hour_us // HOUR_US * HOUR_US, value=0)] += figure.value
        assert by_cell == by_hour
        assert scraped or len({each.hour_us for each in cells.figures(MEASURES)}) > 1, "control: there are several"
    others = {figure.name for figure in cells.figures(MEASURES)} - {f"tenant/{tenant}"}
    assert bool(others) == (tenant is None)


def leaves_read(engine: Engine, call: Any) -> tuple[Any, int]:
    """Return what a call returned, and how many of its statements read leaves."""
    heard = list[str]()

    def hear(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        heard.append(statement)

    event.listen(engine, "before_cursor_execute", hear)
    try:
        return call(), sum("events.leaf" in statement for statement in heard)
    finally:
        event.remove(engine, "before_cursor_execute", hear)


def test_what_was_counted_is_not_read_again(store: Engine, make_writer: Any, world: Any) -> None:
    (writer, rest), fine = written(store, make_writer, world, 10), FineFigures()
    first, reads = leaves_read(store, lambda: read(fine, store))
    again, more = leaves_read(store, lambda: read(fine, store))
    assert reads > 0 and more == 0 and again.slices == first.slices
    writer.submit(rest)
    assert writer.flush()
    later, new = leaves_read(store, lambda: read(fine, store))
    assert 0 < new <= reads and read(FineFigures(), store) == later, "what is new is counted"


@pytest.mark.parametrize("bound", ["LEAVES_MAX", "_COUNTED_MAX"])
def test_many_leaves_are_left_to_hours(
    store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    written(store, make_writer, world)
    assert read(FineFigures(), store) is not None, "control"
    monkeypatch.setattr(fine_figures, bound, 5)
    assert leaves_read(store, lambda: read(FineFigures(), store)) == (None, 0)


def test_what_is_new_is_counted_in_steps(
    store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(store, make_writer, world)
    monkeypatch.setattr(fine_figures, "_SLICE_US", CELL_US)
    whole, fine = read(FineFigures(), store), FineFigures()
    monkeypatch.setattr(fine_figures, "NEW_MAX", 1)
    steps = 0
    while (found := read(fine, store)) is None:
        steps += 1
        assert steps < 100
    assert found == whole and whole is not None and steps == len(whole.slices) - 1


@pytest.mark.parametrize("bound", ["CELL_LEAVES_MAX", "CELLS_SPAN_US"])
def test_more_leaves_or_hours_have_wider_cells(
    store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    written(store, make_writer, world)

    def sums(cells: FineCells | None) -> Counter[Any]:
        assert cells is not None
        every = Counter[Any]()
        for figure in cells.figures(MEASURES):
            assert figure.hour_us % cells.width_us == 0
            every[figure._replace(hour_us=0, value=0)] += figure.value
        return every

    monkeypatch.setattr(fine_figures, "CELLS_SPAN_US", SPAN_MAX_US)
    narrow = read(FineFigures(), store)
    monkeypatch.setattr(fine_figures, bound, 1)
    wide = read(FineFigures(), store)
    assert narrow is not None and wide is not None and narrow.width_us == CELL_US < wide.width_us
    assert sums(wide) == sums(narrow)


def test_what_is_over_is_counted_ahead(store: Engine, make_writer: Any, world: Any) -> None:
    written(store, make_writer, world)
    fine, (_, until_us) = FineFigures(), whole_hours(store)
    with store.connect() as connection:
        fine.keep(connection, until_us)
    _, reads = leaves_read(store, lambda: read(fine, store))
    assert reads == 0


def test_a_long_period_is_left_to_hours(store: Engine, make_writer: Any, world: Any) -> None:
    written(store, make_writer, world)
    since_us, _ = whole_hours(store)
    with store.connect() as connection:
        assert FineFigures().read(connection, since_us, since_us + SPAN_MAX_US + 1) is None
        assert FineFigures().read(connection, since_us, since_us + SPAN_MAX_US) is not None


@pytest.mark.parametrize("steps", [1, 5])
def test_coverage_by_minute_adds_up_to_the_hours(
    store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """However many passes judge it. The history is short: its minutes are of a second."""
    monkeypatch.setattr(judge_hours, "MINUTE_US", SECOND_US)
    played = world(2, tenants=3).run(300)
    writer, judging = make_writer(store), HourlyJudge(store, store)
    size = -(-len(played.events) // steps)
    for start in range(0, len(played.events), size):
        some = played.events[start : start + size]
        writer.submit(some)
        assert writer.flush()
        now_us = writer.offset_us + max(each.at_us for each in some) + 2_000_000
        while judging.judge(now_us=now_us) is None or judging.behind:
            pass
    assert judging.minutes is not None
    state, minutes = judging.minutes
    with store.connect() as connection:
        judged = period(connection, 0, 1 << 62)
    assert state == judged.state and judged.total.due > 20 and len(minutes) > 1
    by_hour: dict[int, list[Any]] = {}
    for at_us, rows in minutes.items():
        assert at_us % SECOND_US == 0
        by_hour.setdefault(at_us // HOUR_US * HOUR_US, []).extend(rows)
    for hour_us, (row, lags) in judged.hours.items():
        assert add_rows([each for _, each, _ in by_hour[hour_us]])[2:] == row[2:]
        assert added([each for _, _, each in by_hour[hour_us]]) == lags
