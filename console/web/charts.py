"""The charts of the console's pages: which period, and what the hourly figures say of it.

1. A long period is drawn from hourly figures, a short one from cells of seconds (`fine_figures`), whose work is
   bounded. Transfers and route receipts are rows of the period. So what a chart costs does not grow with the ledger.
2. Who sees all tenants has a series for each; a tenant's own people have their own alone.
3. A stretch in which nothing was recorded is no data, and not zero: an hour, or five minutes of a short period.
4. A period that ends now, as the last day, begins with the first record in it: a young ledger fills its charts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.evidence.counters.fine_figures import CELL_US, FineCells
from kvcustody.audit.evidence.counters.hourly_coverage import PeriodCoverage, judged_state, period
from kvcustody.audit.evidence.counters.judge_hours import MINUTES_US
from kvcustody.audit.evidence.counters.read_figures import HourlyFigure, figures_by_hour, hours_with_leaves
from kvcustody.audit.evidence.coverage.lag_counts import LagCounts, added
from kvcustody.audit.evidence.coverage.summary import CoverageRow, add_rows
from kvcustody.audit.kinds import SYSTEM, tenant_of
from kvcustody.audit.project import ASSIGNED, ATTACHED, BLOCKS, CUSTODY_KINDS, DENIED, GIVEN, WRITTEN, held_blocks
from kvcustody.console.render.time_chart import Buckets, ChartSeries, TimeChart, summed
from kvcustody.console.web.page_request import PageRequest
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.times import DAY_US, HOUR_US, MINUTE_US, moment_us, readable

PERIODS_US = {"1h": HOUR_US, "6h": 6 * HOUR_US, "24h": DAY_US, "7d": 7 * DAY_US, "30d": 30 * DAY_US}
_WORDS = {"1h": "the last hour", "6h": "the last 6 hours", "24h": "the last day", "7d": "the last 7 days"}
_WORDS["30d"] = "the last 30 days"
NO_LEAVES = "nothing recorded"
_LEAST_US = 6 * HOUR_US  # a shorter zoom would leave hourly figures as one block


class PagePeriod(NamedTuple):
    """What a page is about: a named period that ends now, or one that was chosen in a chart (`name` is empty)."""

    name: str
    since_us: int
    until_us: int

    @property
    def words(self) -> str:
        """The period as part of a sentence."""
        return _WORDS.get(self.name, "the chosen period")

    @property
    def chosen(self) -> str:
        """The chosen period in words; empty where it is a named one."""
        return "" if self.name else f"{readable(self.since_us)} to {readable(self.until_us)} UTC"


class Timeline(NamedTuple):
    """The buckets of a page's charts, and where their figures come from.

    `known_us` are the starts of hours or cells of which there is data. `cells` is None where figures are hourly.
    """

    buckets: Buckets
    known_us: Collection[int]
    tenant: str | None
    cells: FineCells | None

    @classmethod
    def of(cls, visit: PageRequest, connection: Connection, chosen: PagePeriod, tenant: str | None) -> Timeline:
        """Return the timeline of a period in one tenant's log, or in all logs (rules 1 and 4)."""
        since_us, until_us = chosen.since_us, chosen.until_us
        hours = hours_with_leaves(connection, tenant=tenant, since_us=since_us, until_us=until_us)
        if chosen.name and hours:
            since_us = max(since_us, min(hours))
        hour_end_us = -(-until_us // HOUR_US) * HOUR_US  # custody is counted back from there
        cells = visit.service.figures.fine.read(connection, since_us, hour_end_us, tenant=tenant)
        if cells is None:
            short_us = max(0, _LEAST_US - (until_us - since_us))
            since_us -= short_us // 2 // HOUR_US * HOUR_US
            until_us = max(until_us, since_us + _LEAST_US) if short_us else until_us
            if short_us:
                hours = hours_with_leaves(connection, tenant=tenant, since_us=since_us, until_us=until_us)
            return cls(Buckets.of(since_us, until_us, least_us=HOUR_US), hours, tenant, None)
        if chosen.name and cells.starts_us:
            since_us = max(since_us, cells.starts_us[0])
        return cls(Buckets.of(since_us, until_us, least_us=cells.width_us), cells.starts_us, tenant, cells)

    @property
    def since_us(self) -> int:
        """When the first bucket begins."""
        return self.buckets.starts_us[0]

    @property
    def until_us(self) -> int:
        """When the last bucket ends."""
        return self.buckets.starts_us[-1] + self.buckets.width_us

    def for_rows(self, chosen: PagePeriod) -> Buckets:
        """Return buckets for rows that have a moment each: from where these begin, as narrow as it permits."""
        return Buckets.of(max(chosen.since_us, self.since_us), chosen.until_us, least_us=CELL_US)

    def figures(
        self, connection: Connection, measures: Sequence[str], kinds: Sequence[str] | None = None, scraped: bool = False
    ) -> Iterator[HourlyFigure]:
        """Yield the figures of the buckets, by hour or cell."""
        if self.cells is not None:
            return self.cells.figures(measures, kinds, scraped=scraped)
        inside: dict[str, Any] = {"tenant": self.tenant, "since_us": self.since_us, "until_us": self.until_us}
        return figures_by_hour(connection, measures, kinds, **inside, scraped=scraped)

    def chart(self, title: str, shape: str, series: tuple[ChartSeries, ...]) -> TimeChart:
        """Return a chart of counts over these buckets."""
        return TimeChart(title, "count", shape, self.buckets, series, NO_LEAVES)

    def summed(
        self, sums: Iterable[tuple[str, int, int]], colours: Mapping[str, int] | None = None
    ) -> tuple[ChartSeries, ...]:
        """Return series over these buckets from (name, moment, value)."""
        return summed(self.buckets, sums, self.known_us, colours=colours)


def period_of(visit: PageRequest) -> PagePeriod:
    """Return the period that a page's address names: `since` and `until`, or `period`; otherwise the last day."""
    now_us = visit.service.clock.utc_us()
    since_us, until_us = (_moment_us(visit, name) for name in ("since", "until"))
    if since_us is not None:
        until_us = now_us if until_us is None else until_us
        if since_us >= until_us:
            raise ProblemError("invalid", "`since` must be before `until`")
        return PagePeriod("", since_us, until_us)
    name = visit.text("period") or "24h"
    name = name if name in PERIODS_US else "24h"
    until_us = now_us if until_us is None else until_us
    return PagePeriod(name, max(0, until_us - PERIODS_US[name]), until_us)


def _moment_us(visit: PageRequest, name: str) -> int | None:
    text = visit.text(name)
    if text is None:
        return None
    try:
        return int(text) if text.isascii() and text.isdecimal() else moment_us(text)
    except ValueError:
        raise ProblemError("invalid", f"`{name}` is not a time; write 2026-01-31T12:00") from None


def denied(connection: Connection, times: Timeline) -> TimeChart:
    """Return denied requests by whoever asked."""
    figures = times.figures(connection, (DENIED,), scraped=True)
    sums = ((tenant_of(figure.name), figure.hour_us, figure.value) for figure in figures)
    return times.chart("Denied requests, by who asked", "bars", times.summed(sums))


def hits(connection: Connection, times: Timeline) -> TimeChart:
    """Return the blocks that requests found, whose prefill was avoided, and those that were computed."""
    names = {ATTACHED: "found: prefill avoided", WRITTEN: "computed"}
    figures = times.figures(connection, tuple(names), CUSTODY_KINDS)
    sums = ((names[figure.measure], figure.hour_us, figure.value) for figure in figures)
    colours = {name: place for place, name in enumerate(names.values(), 1)}
    return times.chart("Blocks of prompts, found and computed", "bars", times.summed(sums, colours))


def avoided(connection: Connection, times: Timeline) -> TimeChart:
    """Return the blocks whose prefill was avoided, by the tenant whose requests found them."""
    figures = times.figures(connection, (ATTACHED,), CUSTODY_KINDS)
    sums = ((tenant_of(figure.name), figure.hour_us, figure.value) for figure in figures if figure.name != SYSTEM)
    return times.chart("Prefill avoided: blocks found, by tenant", "bars", times.summed(sums))


def custody(connection: Connection, times: Timeline, held_now: Mapping[str, int]) -> TimeChart:
    """Return the blocks in custody at the end of each bucket, given what is held now by tenant."""
    changes: dict[str, dict[int, int]] = {}
    for figure in _changes(connection, times):
        if figure.name != SYSTEM:
            of_tenant = changes.setdefault(tenant_of(figure.name), {})
            at_us = times.buckets.start_of(figure.hour_us)
            change = held_blocks({(figure.kind, figure.measure): figure.value})
            of_tenant[at_us] = of_tenant.get(at_us, 0) + change
    sums = (
        each
        for name, held in held_now.items()
        for each in _counted_back(name, held, changes.get(name, {}), times.buckets)
    )
    return times.chart("Blocks in custody, by tenant", "lines", times.summed(sums))


def _changes(connection: Connection, times: Timeline) -> Iterator[HourlyFigure]:
    """Yield what changed custody from the first bucket up to now: cells, and whole hours behind them."""
    measures, later_us = (ATTACHED, WRITTEN, ASSIGNED, GIVEN, BLOCKS), times.since_us
    if times.cells is not None:
        later_us = -(-times.until_us // HOUR_US) * HOUR_US
        yield from times.cells.figures(measures, CUSTODY_KINDS)
    inside: dict[str, Any] = {"tenant": times.tenant, "since_us": later_us, "until_us": 1 << 62}
    yield from figures_by_hour(connection, measures, CUSTODY_KINDS, **inside)


def _counted_back(name: str, held: int, changes: Mapping[int, int], buckets: Buckets) -> Iterable[tuple[str, int, int]]:
    last_us = buckets.starts_us[-1]
    held -= sum(change for at_us, change in changes.items() if at_us > last_us)
    for start_us in reversed(buckets.starts_us):
        yield name, start_us, held
        held -= changes.get(start_us, 0)


class CoverageOverTime(NamedTuple):
    """Coverage of a period by when custody was due: by minute (`width_us`) where the period is short, else by hour."""

    judged: PeriodCoverage
    width_us: int
    times: Timeline

    @classmethod
    def of(cls, visit: PageRequest, connection: Connection, chosen: PagePeriod, times: Timeline) -> CoverageOverTime:
        """Return the coverage of a period: by minute where this process judges (`FigureKeeper.coverage_by_minute`)."""
        span = chosen.since_us, chosen.until_us
        if times.cells is not None and times.since_us >= visit.service.clock.utc_us() - MINUTES_US:
            minutes = visit.service.figures.coverage_by_minute(judged_state(connection), *span, tenant=times.tenant)
            if minutes is not None:
                return cls(minutes, MINUTE_US, times)
        return cls(period(connection, *span, tenant=times.tenant), HOUR_US, times)

    def charts(self) -> tuple[TimeChart, TimeChart]:
        """Return units due, covered and not; and how long overwriting took, p50 and p99."""
        buckets = Buckets.of(self.times.since_us, self.times.until_us, least_us=self.width_us)
        rows: dict[int, list[CoverageRow]] = {}
        lags: dict[int, list[LagCounts]] = {}
        for at_us, (row, of_time) in self.judged.hours.items():
            rows.setdefault(buckets.start_of(at_us), []).append(row)
            lags.setdefault(buckets.start_of(at_us), []).append(of_time)
        totals = [add_rows(rows[start]) if start in rows else None for start in buckets.starts_us]
        counts = [added(lags[start]) if start in lags else None for start in buckets.starts_us]
        covered = ChartSeries("covered", [row and row.covered for row in totals], 1)
        rest = ChartSeries("due and not covered", [row and row.due - row.covered for row in totals], 4)
        took = tuple(
            ChartSeries(f"p{percent}", [lag.percentile(percent) if lag and lag.counts else None for lag in counts], at)
            for percent, at in ((50, 1), (99, 2))
        )
        due = "Units due for deletion, by when they were due"
        return (
            TimeChart(due, "count", "bars", buckets, (covered, rest), "nothing due"),
            TimeChart("From due to overwritten", "duration", "lines", buckets, took, "nothing overwritten"),
        )


def from_rows(
    buckets: Buckets,
    title: str,
    unit: str,
    names: Iterable[str],
    sums: Collection[tuple[str, int, int]],
) -> TimeChart:
    """Return a chart of sums, each (name, start of bucket, value)."""
    colours = {name: place for place, name in enumerate(names, 1)}
    series = summed(buckets, sums, {at_us for _, at_us, _ in sums}, colours=colours)
    return TimeChart(title, unit, "bars" if unit == "count" else "lines", buckets, series, NO_LEAVES)
