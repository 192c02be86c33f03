"""The charts of the console's pages: which period, and what the hourly figures say of it.

1. Hourly figures are read, and rows of transfers and route receipts of the period: what a chart costs does not grow
   with the ledger.
2. Who sees all tenants has a series for each; a tenant's own people have their own alone.
3. An hour in which nothing was recorded is no data, and not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.evidence.counters.hourly_coverage import PeriodCoverage
from kvcustody.audit.evidence.counters.read_figures import figures_by_hour, hours_with_leaves
from kvcustody.audit.evidence.coverage.lag_counts import added
from kvcustody.audit.evidence.coverage.summary import add_rows
from kvcustody.audit.kinds import SYSTEM, tenant_of
from kvcustody.audit.project import ASSIGNED, ATTACHED, BLOCKS, CUSTODY_KINDS, DENIED, GIVEN, WRITTEN, held_blocks
from kvcustody.console.render.time_chart import Buckets, ChartSeries, TimeChart, summed
from kvcustody.console.web.page_request import PageRequest
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.times import DAY_US, HOUR_US, moment_us, readable

PERIODS_US = {"24h": DAY_US, "7d": 7 * DAY_US, "30d": 30 * DAY_US}
NO_LEAVES = "nothing recorded"
_LEAST_US = 6 * HOUR_US  # a shorter zoom would leave hourly figures as one block


class PagePeriod(NamedTuple):
    """What a page is about: a named period that ends now, or one that was chosen in a chart (`name` is empty)."""

    name: str
    since_us: int
    until_us: int

    @property
    def chosen(self) -> str:
        """The chosen period in words; empty where it is a named one."""
        return "" if self.name else f"{readable(self.since_us)} to {readable(self.until_us)} UTC"

    def hourly(self) -> Buckets:
        """Return buckets for hourly figures: of an hour at least, over six hours at least."""
        short_us = max(0, _LEAST_US - (self.until_us - self.since_us))
        since_us = self.since_us - short_us // 2 // HOUR_US * HOUR_US
        until_us = max(self.until_us, since_us + _LEAST_US) if short_us else self.until_us
        return Buckets.of(since_us, until_us, least_us=HOUR_US)


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


def denied(connection: Connection, period: PagePeriod, tenant: str | None) -> TimeChart:
    """Return denied requests by whoever asked."""
    buckets = period.hourly()
    inside = _inside(buckets, tenant)
    figures = figures_by_hour(connection, (DENIED,), **inside, scraped=True)
    sums = ((tenant_of(figure.name), figure.hour_us, figure.value) for figure in figures)
    return TimeChart(
        "Denied requests, by who asked", "count", "bars", buckets,
        summed(buckets, sums, hours_with_leaves(connection, **inside)), NO_LEAVES,
    )  # fmt: skip


def hits(connection: Connection, period: PagePeriod, tenant: str | None) -> TimeChart:
    """Return the blocks that requests found, whose prefill was avoided, and those that were computed."""
    buckets = period.hourly()
    inside = _inside(buckets, tenant)
    names = {ATTACHED: "found: prefill avoided", WRITTEN: "computed"}
    figures = figures_by_hour(connection, tuple(names), CUSTODY_KINDS, **inside)
    sums = ((names[figure.measure], figure.hour_us, figure.value) for figure in figures)
    colours = {name: place for place, name in enumerate(names.values(), 1)}
    known = hours_with_leaves(connection, **inside)
    series = summed(buckets, sums, known, colours=colours)
    return TimeChart("Blocks of prompts, found and computed", "count", "bars", buckets, series, NO_LEAVES)


def custody(connection: Connection, period: PagePeriod, held_now: Mapping[str, int], tenant: str | None) -> TimeChart:
    """Return the blocks in custody at the end of each bucket, given what is held now by tenant."""
    buckets = period.hourly()
    inside = _inside(buckets, tenant) | {"until_us": 1 << 62}  # up to now, from where it is counted back
    measures = (ATTACHED, WRITTEN, ASSIGNED, GIVEN, BLOCKS)
    changes: dict[str, dict[int, int]] = {}
    for one in figures_by_hour(connection, measures, CUSTODY_KINDS, **inside):
        if one.name != SYSTEM:
            of_tenant = changes.setdefault(tenant_of(one.name), {})
            at_us = buckets.start_of(one.hour_us)
            of_tenant[at_us] = of_tenant.get(at_us, 0) + held_blocks({(one.kind, one.measure): one.value})
    known = hours_with_leaves(connection, **_inside(buckets, tenant))
    sums = (
        each for name, held in held_now.items() for each in _counted_back(name, held, changes.get(name, {}), buckets)
    )
    return TimeChart("Blocks in custody, by tenant", "count", "lines", buckets, summed(buckets, sums, known), NO_LEAVES)


def _counted_back(name: str, held: int, changes: Mapping[int, int], buckets: Buckets) -> Iterable[tuple[str, int, int]]:
    last_us = buckets.starts_us[-1]
    held -= sum(change for at_us, change in changes.items() if at_us > last_us)
    for start_us in reversed(buckets.starts_us):
        yield name, start_us, held
        held -= changes.get(start_us, 0)


def coverage(judged: PeriodCoverage, period: PagePeriod) -> tuple[TimeChart, TimeChart]:
    """Return units due by when they were due, covered and not; and how long overwriting took, p50 and p99."""
    buckets = period.hourly()
    rows: dict[int, list[Any]] = {}
    lags: dict[int, list[Any]] = {}
    for hour_us, (row, of_hour) in judged.hours.items():
        rows.setdefault(buckets.start_of(hour_us), []).append(row)
        lags.setdefault(buckets.start_of(hour_us), []).append(of_hour)
    totals = [add_rows(rows[start]) if start in rows else None for start in buckets.starts_us]
    counts = [added(lags[start]) if start in lags else None for start in buckets.starts_us]
    covered = ChartSeries("covered", [row and row.covered for row in totals], 1)
    rest = ChartSeries("due and not covered", [row and row.due - row.covered for row in totals], 4)
    times = tuple(
        ChartSeries(f"p{percent}", [lag.percentile(percent) if lag and lag.counts else None for lag in counts], colour)
        for percent, colour in ((50, 1), (99, 2))
    )
    return (
        TimeChart(
            "Units due for deletion, by when they were due", "count", "bars", buckets, (covered, rest), "nothing due"
        ),
        TimeChart("From due to overwritten", "duration", "lines", buckets, times, "nothing overwritten"),
    )


def from_rows(
    period: PagePeriod,
    title: str,
    unit: str,
    names: Iterable[str],
    read: Callable[[Buckets], Iterable[tuple[str, int, int]]],
) -> TimeChart:
    """Return a chart of rows that have a moment each; `read` gives (name, start of bucket, value) for each bucket."""
    buckets = Buckets.of(period.since_us, period.until_us)
    sums = list(read(buckets))
    colours = {name: place for place, name in enumerate(names, 1)}
    series = summed(buckets, sums, {at_us for _, at_us, _ in sums}, colours=colours)
    return TimeChart(title, unit, "bars" if unit == "count" else "lines", buckets, series, NO_LEAVES)


def _inside(buckets: Buckets, tenant: str | None) -> dict[str, Any]:
    return {"tenant": tenant, "since_us": buckets.starts_us[0], "until_us": buckets.starts_us[-1] + buckets.width_us}
