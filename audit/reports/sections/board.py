"""What a board asks of a report first: its scope, the share beside a threshold, erasures on time, and the trend.

1. A worker is covered where its pools were scanned and its process did not end without saying so. A tenant is covered
   where it has a log under the checkpoint and custody of its was due.
2. The threshold is the reader's: it is met where the least share of the range reaches it, missed where the greatest
   does not, and otherwise nobody can say.
3. The trend is of periods as long as the report's, one after the other, the last being its own. One that ended before
   the ledger began is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.audit.evidence.coverage.custody_units import LifeUnits
from kvcustody.audit.evidence.coverage.summary import CoverageRow, periods_of
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod
from kvcustody.audit.kinds import log_of, tenant_of
from kvcustody.audit.reports.activity import ReportedErasure
from kvcustody.audit.reports.system_boundary import ReportedLog, ReportedWorker

PERIODS = 4
THRESHOLD_PPM = 999_000
MET, MISSED, UNKNOWN, NOTHING_DUE = "met", "missed", "not known", "nothing was due"


class TrendPeriod(NamedTuple):
    """One period's units: due, and covered."""

    since_us: int
    until_us: int
    due: int
    covered: int


class BoardFacts(NamedTuple):
    """The figures of the first page.

    `workers` were at work in the period, `tenants` have a log; erasures were asked for in the period, and those on time
    were answered complete by everybody before they were due.
    """

    workers: int
    workers_covered: int
    tenants: int
    tenants_covered: int
    erasures: int
    erasures_on_time: int
    trend: tuple[TrendPeriod, ...]


NO_FACTS = BoardFacts(0, 0, 0, 0, 0, 0, ())


def board_facts(
    bounds: tuple[int, int],
    *,
    trend: Sequence[TrendPeriod],
    rows: Sequence[CoverageRow],
    logs: Sequence[ReportedLog],
    workers: Sequence[ReportedWorker],
    periods: dict[str, WorkPeriod],
    unscanned: Sequence[str],
    erasures: Sequence[ReportedErasure],
) -> BoardFacts:
    """The figures, most of them from what other sections have counted."""
    since_us, until_us = bounds
    at_work = [
        worker
        for worker in workers
        if (life := periods.get(worker.incarnation)) is None
        or (life.started_us < until_us and (life.ended_us is None or life.ended_us >= since_us))
    ]
    seen = [
        worker
        for worker in at_work
        if not worker.end.startswith("died") and f"{worker.name} {worker.incarnation[:8]}" not in unscanned
    ]
    known = tenants_of(logs)
    due = {row.tenant for row in rows if row.due}
    return BoardFacts(
        len(at_work),
        len(seen),
        len(known | due),
        len(due),
        len(erasures),
        sum(one.is_on_time for one in erasures),
        tuple(trend),
    )


def tenants_of(logs: Sequence[ReportedLog]) -> set[str]:
    """The tenants that have a log of their own."""
    return {tenant_of(log.name) for log in logs if log.name.startswith(log_of(""))}


def threshold_verdict(threshold_ppm: int, low_ppm: int, high_ppm: int, due: int) -> str:
    """Rule 2."""
    if not due:
        return NOTHING_DUE
    if low_ppm >= threshold_ppm:
        return MET
    return MISSED if high_ppm < threshold_ppm else UNKNOWN


def trend_start_us(since_us: int, until_us: int, first_us: int) -> int:
    """When the earliest period of the trend begins (rule 3); `first_us`: when the ledger did."""
    span = until_us - since_us
    periods = min(PERIODS - 1, max(0, -(-(since_us - first_us) // span)))
    return since_us - periods * span


def trend_of(lives: Sequence[LifeUnits], start_us: int, since_us: int, until_us: int) -> list[TrendPeriod]:
    """The trend from units that were read from its start on, oldest first."""
    span = until_us - since_us
    found = periods_of(lives, start_us, until_us, span)
    return [TrendPeriod(start, start + span, row.due, row.covered) for start, row in found]
