"""The opinion, derived only from a report's facts: every reader of the report derives the same.

1. Unqualified, if all of these hold: everything that was due is covered, every identity holds, and nothing is missing.
   Every erasure and every person who asked was answered in time, and every pool was scanned. Anything else is an
   exception, and the opinion is qualified. Only a framework that asks for an answer in time is qualified by a person
   who was not answered in time.
2. Adverse, if one of these holds:
   - the tables contradict the leaves;
   - an identity is off by more than one in a hundred;
   - even the upper end of the range is below `ADVERSE_BELOW_PPM`.
3. What is unknown stays unknown. This is custody whose process died, and blocks that a pool's counter handed out but no
   leaf lists. They count neither as covered nor as uncovered: they make up the width of the range.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcustody.audit.evidence.cases.case_record import CaseState
from kvcustody.audit.evidence.erasure.erasure_state import ErasureState
from kvcustody.audit.reports.given import NOT_GIVEN
from kvcustody.audit.reports.section import Citation, FactStage, PagePart, ReportFacts, Section
from kvcustody.audit.reports.sections.activity import SECTION as ACTIVITY
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.boundary import deaths
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.decided import SECTION as DECIDED
from kvcustody.audit.reports.sections.losses import SECTION as LOSSES
from kvcustody.audit.reports.sections.population import HANDED_OUT, Balance
from kvcustody.audit.reports.sections.population import SECTION as POPULATION
from kvcustody.audit.reports.sections.recount import SECTION as RECOUNT
from kvcustody.audit.reports.sections.responses import SECTION as RESPONSES
from kvcustody.audit.reports.sections.tiers import SECTION as TIERS
from kvcustody.audit.reports.sections.unscanned import SECTION as UNSCANNED
from kvcustody.plurals import several
from kvcustody.times import iso

UNQUALIFIED, QUALIFIED, ADVERSE = "unqualified", "qualified", "adverse"
ADVERSE_BELOW_PPM = 900_000
_PPM = 1_000_000
_OFF_BY = 100  # an identity that is off by more than one in so many
RISKS = {
    "uncovered": "data of one request may have been in memory for longer than was promised, or may be there still",
    "copies": "copies off the device may be readable for longer than was promised",
    "identity": "something was not recorded, so totals may be too small or too large",
    "recount": "rows were changed behind the leaves, so what is shown may not be what was recorded",
    "erasure": "some of what somebody asked to be erased stays, for the reason that is named",
    "late-erasure": "what somebody asked to be erased was there for longer than was promised",
    "missed-erasure": "what somebody asked to be erased may be there still: no answer says that it is gone",
    "case": "a person was not answered in the time that GDPR 12(3) gives",
    "unscanned": "custody that the ledger and the memory disagree about would not have been found",
    "gap": "what the missing records would have said is unknown",
    "death": "memory of a process that died went back to the driver, and nobody saw it overwritten",
    "history": "the record is of no engine at work, and shows nothing about one",
    "nothing-due": "nothing was due, so nothing is shown",
}


class QualifyingException(NamedTuple):
    """An exception that qualifies the opinion, and its stated remedy.

    `amount` counts what the cause is about; `is_adverse`: alone it makes the opinion adverse.
    """

    id: str
    is_adverse: bool
    amount: int
    cause: str
    risk: str
    owner: str
    date: str
    response: str
    compensating_control: str


class Opinion(NamedTuple):
    """The kind of opinion, and the covered share of units: at least, and at most if everything unknown were covered.

    Shares are millionths of what was due, `unknown` units are in neither.
    """

    kind: str
    low_ppm: int
    high_ppm: int
    unknown: int
    exceptions: tuple[QualifyingException, ...]


class _Found(NamedTuple):
    id: str
    amount: int
    cause: str
    is_adverse: bool = False
    risk: str = ""  # its place in `RISKS`, where that is not the beginning of its id


def opinion_of(report: ReportFacts) -> Opinion:
    """Return the opinion on a report."""
    low, high, unknown = share_range(report)
    found = [*_found(report)]
    if report[COVERAGE].total.due and high < ADVERSE_BELOW_PPM:
        found = [one._replace(is_adverse=one.is_adverse or one.id == "uncovered") for one in found]
    answers = {answer.id: answer for answer in report[RESPONSES]}
    exceptions = []
    for one in found:
        answer = answers.get(one.id)
        said = (NOT_GIVEN,) * 4 if answer is None else answer[1:]
        risk = RISKS[one.risk or one.id.partition(":")[0]]
        exceptions.append(QualifyingException(one.id, one.is_adverse, one.amount, one.cause, risk, *said))
    kind = UNQUALIFIED if not exceptions else ADVERSE if any(one.is_adverse for one in exceptions) else QUALIFIED
    return Opinion(kind, low, high, unknown, tuple(exceptions))


def share_range(report: ReportFacts) -> tuple[int, int, int]:
    """Return the covered share at least and at most (millionths), and the number of unknown units (rule 3)."""
    shards = max((worker.shards for worker in report[BOUNDARY].workers), default=1) or 1
    lost = sum(
        max(0, balance.left - balance.right) for balance in report[POPULATION].balances if HANDED_OUT in balance.name
    )
    unknown = report[COVERAGE].total.unproven + lost * shards
    whole = report[COVERAGE].total.due + lost * shards
    if not whole:
        return 0, 0, 0
    covered = report[COVERAGE].total.covered
    return covered * _PPM // whole, (covered + unknown) * _PPM // whole, unknown


def _found(report: ReportFacts) -> Iterator[_Found]:
    if report[BOUNDARY].history:
        yield _Found("history", 1, report[BOUNDARY].history)
    yield from _uncovered(report)
    for balance in _balances(report):
        if not balance.holds:
            off = abs(balance.left - balance.right)
            yield _Found(
                f"identity:{balance.name}",
                off,
                f"{balance.name}: {balance.left:,} ({balance.left_source}) against {balance.right:,} "
                f"({balance.right_source})",
                off * _OFF_BY > max(balance.left, balance.right),
            )
    recount = report[RECOUNT]
    if recount is not None and recount.differences:
        number = len(recount.differences)
        yield _Found("recount", number, f"tables and leaves differ in {several(number, 'figure')}", True)
    yield from _erasures(report)
    yield from _cases(report)
    if report[UNSCANNED]:
        names = ", ".join(report[UNSCANNED][:5])
        yield _Found("unscanned", len(report[UNSCANNED]), f"no scan for orphans in the period of: {names}")
    if report[LOSSES].gaps:
        yield _Found("gap", report[LOSSES].gaps, f"{several(report[LOSSES].gaps, 'gap')}: records that are not there")
    died = sum(deaths(report[BOUNDARY].workers))
    if died:
        yield _Found("death", died, f"{several(died, 'process')} ended without saying so")


def _uncovered(report: ReportFacts) -> Iterator[_Found]:
    total = report[COVERAGE].total
    if total.due > total.covered:
        parts = [
            f"{getattr(total, name):,} {name}"
            for name in ("late", "failed", "missing", "unproven", "overdue")
            if getattr(total, name)
        ]
        disputed = total.in_time - total.covered
        parts += [f"{disputed:,} disputed"] if disputed else []
        yield _Found("uncovered", total.due - total.covered, f"units that are not covered: {', '.join(parts)}")
    copies = sum(row.due - row.covered for row in report[TIERS].rows)
    if copies:
        yield _Found("copies", copies, f"{several(copies, 'copy')} off the device not covered")
    if not total.due and not any(row.due for row in report[TIERS].rows):
        yield _Found("nothing-due", 0, "no custody was due in the period")


def _balances(report: ReportFacts) -> Iterator[Balance]:
    yield from report[POPULATION].balances
    yield from report[TIERS].balances
    yield from report[DECIDED].balances


def _erasures(report: ReportFacts) -> Iterator[_Found]:
    """Those that were due and are late or missed, one by one; what is not due yet qualifies nothing."""
    for item in report[ACTIVITY].erasures:
        if item.is_late:
            answered = f"answered {iso(item.completed_us)}" if item.completed_us else "not answered"
            owed = f" by {', '.join(item.unanswered[:5])}" if item.unanswered else ""
            cause = f"erasure {item.erasure}: {item.state}, due {iso(item.due_us)}, {answered}{owed}"
            amount, risk = max(1, len(item.unanswered)), f"{item.state}-erasure"
            yield _Found(f"erasure:{item.erasure}", amount, cause, risk=risk)
        elif item.remaining and item.outcome != "complete" and item.state != ErasureState.OPEN:
            why = f", {item.reason}" if item.reason else ""
            yield _Found(f"erasure:{item.erasure}", item.remaining, f"erasure {item.erasure}: {item.outcome}{why}")


def _cases(report: ReportFacts) -> Iterator[_Found]:
    """Requests of people that were not answered in time; one whose deadline is near qualifies nothing yet."""
    for case in report[ACTIVITY].cases if report.framework.has_answer_deadline else ():
        if case.state in (CaseState.MISSED, CaseState.LATE):
            answered = f"answered {iso(case.answered_us)}" if case.answered_us else "not answered"
            yield _Found(f"case:{case.case_id}", 1, f"case {case.case_id}: due before {iso(case.due_us)}, {answered}")


SECTION: Section[Opinion] = Section(
    "opinion",
    "Opinion",
    opinion_of,
    order=20,
    about=(
        "unqualified, qualified or adverse; the range in which the covered share lies; every exception with "
        "cause, risk, owner, date, response and compensating control; the longest time between a leaf and the "
        "signature that covers it"
    ),
    part=PagePart.FRONT,
    fields={"opinion": "whether the facts are those that it follows from"},
    stage=FactStage.CONCLUSION,
    cited={"opinion": Citation("Opinion", lambda report: report[COVERAGE].total.due > 0)},
)
