"""Coverage of due custody: units and bytes by tenant and classification, over the period, and its timeliness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcustody.audit.evidence.coverage.block_uses import NEVER
from kvcustody.audit.evidence.coverage.custody_units import LifeUnits
from kvcustody.audit.evidence.coverage.summary import CoverageRow, CoverageSummary, add_rows, is_covered
from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section

LAG_LIMITS_US = (1_000, 10_000, 100_000, 250_000, 1_000_000, 5_000_000, 30_000_000, 300_000_000)
_BINS_MAX = 32
_BIN_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 21_600, 86_400, 7 * 86_400, 30 * 86_400, 365 * 86_400)


class Bin(NamedTuple):
    """Units due in one part of the period."""

    start_us: int
    due: int
    covered: int
    uncovered: int


class Lag(NamedTuple):
    """Custodies destroyed within `up_to_us` of their due time (0: beyond any limit)."""

    up_to_us: int
    custodies: int


class Timeliness(NamedTuple):
    """The time from due (or the fence's retirement, if later) to the last receipt."""

    p50_us: int
    p99_us: int
    max_us: int
    lags: tuple[Lag, ...]


class CoverageFacts(NamedTuple):
    """Units by tenant and classification and in total, by part of the period, and the times to destruction."""

    coverage: tuple[CoverageRow, ...]
    total: CoverageRow
    timeline: tuple[Bin, ...]
    timeliness: Timeliness


def coverage_facts(reading: ReportReading) -> CoverageFacts:
    """Return the coverage of the period."""
    found, lives = reading.coverage, reading.lives
    return CoverageFacts(
        found.rows,
        found.total,
        _timeline(lives, reading.since_us, reading.until_us),
        _timeliness(lives, found),
    )


def _timeline(lives: Sequence[LifeUnits], since_us: int, until_us: int) -> tuple[Bin, ...]:
    span = until_us - since_us
    width = next((s for s in _BIN_SECONDS if s * 1_000_000 * _BINS_MAX >= span), _BIN_SECONDS[-1]) * 1_000_000
    due = np.zeros(-(-span // width), np.int64)
    covered = np.zeros_like(due)
    for each in lives:
        units, shards = each.units, each.life.shards or 1
        claimed = each.ends.column("due_boot_us")[units.row]
        offset_us = each.life.offset_us - since_us
        ended = (np.where(units.due < NEVER, units.due, claimed) + offset_us) // width
        overdue = (each.overdue.due + offset_us) // width
        due += np.bincount(np.concatenate((ended, overdue)), minlength=len(due)) * shards
        covered += np.bincount(ended[is_covered(each) == 1], minlength=len(due)) * shards
    starts = range(since_us, until_us, width)
    return tuple(
        Bin(start, each_due, each_covered, each_due - each_covered)
        for start, each_due, each_covered in zip(starts, due.tolist(), covered.tolist(), strict=True)
    )


def _timeliness(lives: Sequence[LifeUnits], found: CoverageSummary) -> Timeliness:
    lags = np.concatenate([np.empty(0, np.int64), *(each.units.lag[each.units.lag >= 0] for each in lives)])
    places = np.searchsorted(np.array(LAG_LIMITS_US), lags, side="left")
    counts = np.bincount(places, minlength=len(LAG_LIMITS_US) + 1).tolist()
    bins = tuple(Lag(limit, count) for limit, count in zip((*LAG_LIMITS_US, 0), counts, strict=True))
    return Timeliness(found.lag_us_p50, found.lag_us_p99, found.lag_us_max, bins)


def _has_times(report: ReportFacts) -> bool:
    return any(lag.custodies for lag in report[SECTION].timeliness.lags)


_VERDICTS = ("in_time", "late", "failed", "missing", "unproven", "overdue")


def _disagreements(report: ReportFacts) -> Iterator[str]:
    if add_rows(report[SECTION].coverage) != report[SECTION].total:
        yield "the total is not the sum of the coverage by tenant and classification"
    for row in report[SECTION].coverage:
        yield from _row_disagreements(row)
    total, bins = report[SECTION].total, report[SECTION].timeline
    if (sum(item.due for item in bins), sum(item.covered for item in bins)) != (total.due, total.covered):
        yield "the parts of the period do not add up to the total"
    if any(item.due != item.covered + item.uncovered for item in bins):
        yield "a part of the period is not covered and uncovered together"
    lags = report[SECTION].timeliness
    if not lags.p50_us <= lags.p99_us <= lags.max_us:
        yield "the times from due to destroyed are out of order"


def _row_disagreements(row: CoverageRow) -> Iterator[str]:
    who = f"`{row.tenant}`, `{row.classification}`"
    if sum(getattr(row, name) for name in _VERDICTS) != row.due:
        yield f"verdicts of {who} do not add up to what was due"
    if not 0 <= row.covered <= row.in_time or row.in_time - row.covered > row.disputed:
        yield f"covered units of {who} are not those in time and not disputed"
    if any(value < 0 for value in row[2:]):
        yield f"a figure of {who} is below zero"


SECTION: Section[CoverageFacts] = Section(
    "coverage",
    "Coverage and timeliness",
    coverage_facts,
    order=80,
    about="units by tenant and classification, bytes by level, charts, time from due to destroyed",
    fields={
        "coverage": "units and bytes by tenant and classification",
        "total": "units and bytes",
        "timeline": "units by part of the period",
        "timeliness": "times from due to destroyed",
    },
    cited={
        "coverage": Citation("Coverage", lambda report: report[SECTION].total.due > 0),
        "timeliness": Citation("Timeliness", _has_times),
    },
    disagreements=_disagreements,
)
