"""The first questions of a board: scope, covered share against a threshold, erasures on time, and the trend.

1. A worker was scanned where a scan for orphans looked at its pools in the period, and its process did not die.
2. An erasure is on time, not due yet, or neither, as it stands at the report's checkpoint.
3. The threshold is the reader's: it is met where the least share of the range reaches it, missed where the greatest
   does not, and otherwise nobody can say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvcustody.audit.evidence.erasure.erasure_state import ErasureState
from kvcustody.audit.kinds import log_of, tenant_of
from kvcustody.audit.reports.section import PagePart, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.activity import SECTION as ACTIVITY
from kvcustody.audit.reports.sections.activity import ReportedErasure
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.boundary import ReportedLog
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.unscanned import SECTION as UNSCANNED
from kvcustody.audit.reports.trend import TrendPeriod

MET, MISSED, UNKNOWN, NOTHING_DUE = "met", "missed", "not known", "nothing was due"


class BoardFacts(NamedTuple):
    """The figures of the first page.

    `workers` were at work in the period; `tenants` have a log or units due, `tenants_due` have units due. Erasures were
    asked for in the period: those on time were answered complete by everybody before they were due, those open are
    not due yet.
    """

    workers: int
    workers_scanned: int
    tenants: int
    tenants_due: int
    erasures: int
    erasures_on_time: int
    erasures_open: int
    trend: tuple[TrendPeriod, ...]


def board_facts(reading: ReportReading) -> BoardFacts:
    """Return the figures, most of them counted by other sections."""
    boundary, unscanned, erasures = reading[BOUNDARY], reading[UNSCANNED], reading[ACTIVITY].erasures
    at_work = [
        worker
        for worker in boundary.workers
        if (life := reading.periods.get(worker.incarnation)) is None
        or (life.started_us < reading.until_us and (life.ended_us is None or life.ended_us >= reading.since_us))
    ]
    seen = [
        worker
        for worker in at_work
        if not worker.end.startswith("died") and reading.name_of(worker.name, worker.incarnation) not in unscanned
    ]
    known = tenants_of(boundary.logs)
    due = {row.tenant for row in reading[COVERAGE].coverage if row.due}
    return BoardFacts(
        len(at_work),
        len(seen),
        len(known | due),
        len(due),
        len(erasures),
        *_standing(erasures),
        tuple(reading.trend),
    )


def _standing(erasures: Iterable[ReportedErasure]) -> tuple[int, int]:
    """Return how many were on time, and how many are not due yet."""
    states = [each.state for each in erasures]
    return states.count(ErasureState.COMPLETE), states.count(ErasureState.OPEN)


def tenants_of(logs: Sequence[ReportedLog]) -> set[str]:
    """Return the tenants with a log of their own."""
    return {tenant_of(log.name) for log in logs if log.name.startswith(log_of(""))}


def threshold_verdict(threshold_ppm: int, low_ppm: int, high_ppm: int, due: int) -> str:
    """Return the verdict of rule 3."""
    if not due:
        return NOTHING_DUE
    if low_ppm >= threshold_ppm:
        return MET
    return MISSED if high_ppm < threshold_ppm else UNKNOWN


def _disagreements(report: ReportFacts) -> Iterator[str]:
    """What the first page says follows from the sections behind it, but for when workers were at work."""
    board, erasures = report[SECTION], report[ACTIVITY].erasures
    if (board.erasures, board.erasures_on_time, board.erasures_open) != (len(erasures), *_standing(erasures)):
        yield "the first page has other erasures than the report"
    due = {row.tenant for row in report[COVERAGE].coverage if row.due}
    if (board.tenants, board.tenants_due) != (len(due | tenants_of(report[BOUNDARY].logs)), len(due)):
        yield "the first page has other tenants than logs and coverage"
    seen = [one for one in report[BOUNDARY].workers if not one.end.startswith("died")]
    if not 0 <= board.workers_scanned <= min(board.workers, len(seen)):
        yield "the first page has more workers scanned than did not die"
    if not board.workers_scanned <= board.workers <= len(report[BOUNDARY].workers):
        yield "the first page has more workers than the boundary"
    if report.asked.tenant is None and board.workers - len(report[UNSCANNED]) > board.workers_scanned + len(
        report[BOUNDARY].workers
    ) - len(seen):
        yield "the first page has fewer workers scanned than were and did not die"
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
        "one page: workers that were scanned, tenants with units due; the covered share beside the threshold that "
        "its reader asks for (`--threshold 98`; 99.9 % where nobody says): met, missed, or not known where the "
        "range holds it; three sentences; the first exceptions with owner and date; erasures on time and not due yet; "
        "four periods as long as the report's; the decision that is asked"
    ),
    part=PagePart.FRONT,
    fields={"board": "workers and earlier periods of the first page; its other figures follow from other sections"},
    disagreements=_disagreements,
)
