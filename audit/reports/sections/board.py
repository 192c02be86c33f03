"""What a board asks of a report first: its scope, the share beside a threshold, erasures on time, and the trend.

1. A worker is covered where its pools were scanned and its process did not end without saying so. A tenant is covered
   where it has a log under the checkpoint and custody of its was due.
2. The threshold is the reader's: it is met where the least share of the range reaches it, missed where the greatest
   does not, and otherwise nobody can say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcustody.audit.kinds import log_of, tenant_of
from kvcustody.audit.reports.section import PagePart, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.activity import SECTION as ACTIVITY
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.boundary import ReportedLog
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.unscanned import SECTION as UNSCANNED
from kvcustody.audit.reports.trend import TrendPeriod

MET, MISSED, UNKNOWN, NOTHING_DUE = "met", "missed", "not known", "nothing was due"


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


def board_facts(reading: ReportReading) -> BoardFacts:
    """The figures, most of them from what other sections have counted."""
    boundary, unscanned, erasures = reading[BOUNDARY], reading[UNSCANNED], reading[ACTIVITY].erasures
    at_work = [
        worker
        for worker in boundary.workers
        if (life := reading.periods.get(worker.incarnation)) is None
        or (
            life.started_us < reading.until_us
            and (life.ended_us is None or life.ended_us >= reading.since_us)
        )
    ]
    seen = [
        worker
        for worker in at_work
        if not worker.end.startswith("died") and f"{worker.name} {worker.incarnation[:8]}" not in unscanned
    ]
    known = tenants_of(boundary.logs)
    due = {row.tenant for row in reading[COVERAGE].coverage if row.due}
    return BoardFacts(
        len(at_work),
        len(seen),
        len(known | due),
        len(due),
        len(erasures),
        sum(one.is_on_time for one in erasures),
        tuple(reading.trend),
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


def _disagreements(report: ReportFacts) -> Iterator[str]:
    """What the first page says follows from the sections behind it, but for when workers were at work."""
    board, erasures = report[SECTION], report[ACTIVITY].erasures
    if (board.erasures, board.erasures_on_time) != (len(erasures), sum(one.is_on_time for one in erasures)):
        yield "the first page has other erasures than the report"
    due = {row.tenant for row in report[COVERAGE].coverage if row.due}
    if (board.tenants, board.tenants_covered) != (len(due | tenants_of(report[BOUNDARY].logs)), len(due)):
        yield "the first page has other tenants than logs and coverage"
    seen = [one for one in report[BOUNDARY].workers if not one.end.startswith("died")]
    if not 0 <= board.workers_covered <= min(board.workers, len(seen)):
        yield "the first page covers more workers than did not die"
    if not board.workers_covered <= board.workers <= len(report[BOUNDARY].workers):
        yield "the first page has more workers than the boundary"
    if report.asked.tenant is None and board.workers - len(report[UNSCANNED]) > board.workers_covered + len(
        report[BOUNDARY].workers
    ) - len(seen):
        yield "the first page covers fewer workers than were scanned and did not die"
    if board.trend and board.trend[-1] != (
        report.asked.since_us, report.asked.until_us, report[COVERAGE].total.due, report[COVERAGE].total.covered
    ):  # fmt: skip
        yield "the last period of the trend is not the report's own"


SECTION: Section[BoardFacts] = Section(
    "board",
    "For the board",
    board_facts,
    order=10,
    about=(
        "one page: workers and tenants covered; the covered share beside the threshold that its reader asks "
        "for (`--threshold 98`; 99.9 % where nobody says): met, missed, or not known where the range holds "
        "it; three sentences; the first exceptions with owner and date; erasures answered on time; four "
        "periods as long as the report's; the decision that is asked"
    ),
    part=PagePart.FRONT,
    fields={
        "board": "workers and earlier periods of the first page; its other figures follow from other sections"
    },
    disagreements=_disagreements,
)
