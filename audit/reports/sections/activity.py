"""Recorded activity in the period: leaves by kind, erasures, cases, orphan findings.

1. Counts are of leaves in the state of the checkpoint whose `at_us` is in the period; of one tenant, of its own log.
   Decisions are counted when they were made (`decided`).
2. A case is in the period where it came in before the end, and had no answer on record before the beginning. It is
   shown as it stood when the period ended, or, where the last leaf is from before that, at that leaf.
"""

from __future__ import annotations

from typing import NamedTuple

import orjson
from sqlalchemy import Connection, func, select

from kvcustody.audit.evidence.cases.read_cases import read_cases
from kvcustody.audit.evidence.coverage.block_uses import NEVER
from kvcustody.audit.evidence.erasure.erasure_state import AskedErasure, ErasureState, completed_by, state_of
from kvcustody.audit.evidence.erasure.who_owes import owing
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod
from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import erasure_results, erasures, orphan_findings
from kvcustody.audit.store.schema.ledger import events, incarnations


class KindCount(NamedTuple):
    """Leaves of one kind."""

    kind: str
    leaves: int


class ReportedErasure(NamedTuple):
    """One requested erasure; subject and session are pseudonyms. `outcome` is the last recorded one."""

    erasure: str
    tenant: str | None
    selector: str
    pseudonym: str | None
    actor: str
    at_us: int
    outcome: str
    blocks: int
    remaining: int
    reason: str
    unanswered: tuple[str, ...] = ()  # workers that were at work at the request and did not say that all is gone
    due_us: int = 0  # UTC; 0: no deadline
    completed_us: int = 0  # when the last of those who owed an answer said that all is gone; 0: not yet
    state: str = ErasureState.OPEN.value  # as of the report's checkpoint

    @property
    def is_late(self) -> bool:
        """Whether an answer was missing at the deadline: it came later, or is still owed."""
        return self.state in (ErasureState.LATE, ErasureState.MISSED)


class ReportedStep(NamedTuple):
    """A step of a policy release: who proposed, consented to, approved or activated which revision."""

    at_us: int
    action: str
    revision: int
    actor: str


class FindingCount(NamedTuple):
    """Orphan findings of one class and outcome."""

    orphan: str
    outcome: str
    findings: int


class ReportedCase(NamedTuple):
    """One case; `pseudonym` is the person's. Times are UTC microseconds, `answered_us` 0: not answered.

    `void` counts steps on record that count for nothing. `restricted`: their processing was restricted then (18).
    """

    case_id: str
    tenant: str
    pseudonym: str | None
    subject_right: str
    state: str
    outcome: str
    received_us: int
    due_us: int
    extended: bool
    answered_us: int
    void: int
    restricted: bool = False


class Activity(NamedTuple):
    """All recorded activity."""

    kinds: tuple[KindCount, ...]
    erasures: tuple[ReportedErasure, ...]
    findings: tuple[FindingCount, ...]
    cases: tuple[ReportedCase, ...] = ()
    release: tuple[ReportedStep, ...] = ()


def read_activity(reading: ReportReading) -> Activity:
    """Return the activity of the period."""
    kinds: dict[str, int] = {}
    for item in reading.counts.counted:
        kinds[item.kind] = kinds.get(item.kind, 0) + item.in_period
    return Activity(
        tuple(KindCount(kind, leaves) for kind, leaves in sorted(kinds.items()) if leaves),
        tuple(_erasures(reading)),
        _findings(reading),
        _cases(reading),
        _release(reading),
    )


def _release(reading: ReportReading) -> tuple[ReportedStep, ...]:
    query = select(events.c.at_us, events.c.leaf).where(events.c.kind == "release-step", reading.within(events))
    steps = ((at_us, orjson.loads(bytes(leaf))) for at_us, leaf in reading.connection.execute(query))
    return tuple(sorted(ReportedStep(at, *(body[name] for name in ReportedStep._fields[1:])) for at, body in steps))


def _erasures(reading: ReportReading) -> list[ReportedErasure]:
    connection, periods = reading.connection, reading.periods
    result = erasure_results.c
    answers_by_erasure = _answered(connection, reading.state, periods)
    outcomes = {
        row.erasure: row
        for row in connection.execute(
            select(result.erasure, result.outcome, result.blocks, result.remaining, result.reason)
            .where(reading.state.has(erasure_results), has_leaf(erasure_results))
            .order_by(result.at_us, result.log, result.idx)
        )
    }
    erased = []
    for row in connection.execute(select(erasures).where(reading.within(erasures))).all():
        last, answers = outcomes.get(row.erasure), answers_by_erasure.get(row.erasure, {})
        owed = owing(periods, row.at_us)
        silent = tuple(name for name in owed if name not in answers)
        due_us = row.at_us + row.deadline_boot_us - row.at_boot_us if row.deadline_boot_us else 0
        erasure = AskedErasure(row.erasure, row.at_us, due_us or int(NEVER))
        erased.append(
            ReportedErasure(
                row.erasure,
                row.tenant,
                row.selector,
                row.session or row.subject,
                row.actor,
                row.at_us,
                last.outcome if last else "nothing recorded",
                last.blocks if last else 0,
                last.remaining if last else 0,
                last.reason if last else "",
                silent,
                due_us,
                max((answers[name] for name in owed if name in answers), default=0) if not silent else 0,
                state_of(erasure, owed, answers, reading.now_us).value,
            )
        )
    return sorted(erased, key=lambda item: (item.at_us, item.erasure))


def _answered(connection: Connection, as_of: AsOf, periods: dict[str, WorkPeriod]) -> dict[str, dict[str, int]]:
    """By erasure: the workers that said that all is gone, and when."""
    result = erasure_results.c
    query = (
        select(result.erasure, incarnations.c.uuid, result.outcome, result.at_us)
        .join(incarnations, incarnations.c.id == result.incarnation)
        .where(as_of.has(erasure_results), has_leaf(erasure_results))
        .order_by(result.at_us, result.log, result.idx)
    )
    return completed_by(
        (erasure, periods[life].worker, outcome, at_us)
        for erasure, life, outcome, at_us in connection.execute(query)
        if life in periods
    )


def _findings(reading: ReportReading) -> tuple[FindingCount, ...]:
    column = orphan_findings.c
    query = (
        select(column.orphan, column.outcome, func.count())
        .where(reading.within(orphan_findings))
        .group_by(column.orphan, column.outcome)
    )
    return tuple(sorted(FindingCount(*row) for row in reading.connection.execute(query)))


def _cases(reading: ReportReading) -> tuple[ReportedCase, ...]:
    """Those of the period (rule 2), the first to come in first."""
    connection, state, until_us = reading.connection, reading.state, reading.until_us
    every = read_cases(connection, tenant=reading.asked.tenant, as_of=state)
    if not every:
        return ()
    newest = select(func.max(events.c.at_us)).where(state.has(events), has_leaf(events))
    last_us = connection.scalar(newest) or 0
    now_us, reported_cases = min(until_us, last_us), []
    for whole in every:
        if whole.opened.at_us >= until_us or whole.opened.received_us >= until_us:
            continue
        case = whole.as_of(until_us)
        if case.answered_us is not None and case.answered_us < reading.since_us:
            continue
        opened = case.opened
        reported_cases.append(
            ReportedCase(
                opened.case_id,
                opened.tenant,
                opened.subject,
                opened.subject_right,
                case.state(now_us).value,
                case.outcome,
                opened.received_us,
                case.due.until_us,
                case.due != case.first_due,
                case.answered_us or 0,
                sum(bool(step.void) for step in case.steps),
                case.is_restricted,
            )
        )
    return tuple(sorted(reported_cases, key=lambda one: (one.received_us, one.case_id)))


KEY_EVENTS = ("key-event", "keys-dropped", "keys-ordered")


def recorded_kinds(report: ReportFacts) -> set[str]:
    """Return the kinds of leaves in the period."""
    return {each.kind for each in report[SECTION].kinds}


def _has_findings(report: ReportFacts) -> bool:
    return "orphan-scanned" in recorded_kinds(report) or bool(report[SECTION].findings)


SECTION: Section[Activity] = Section(
    "activity",
    "Decisions, orphans, recorded events",
    read_activity,
    order=130,
    about=("activity in the period: decisions, the steps of policy releases, orphan findings, leaves by kind"),
    fields={"activity": "erasures, findings and recorded events"},
    cited={
        "release": Citation("Steps of the policy's release", lambda report: bool(report[SECTION].release)),
        "findings": Citation("Orphan findings", _has_findings),
        "activity": Citation("Recorded events", lambda report: bool(recorded_kinds(report))),
        "keys": Citation("Recorded events: keys", lambda report: bool(recorded_kinds(report).intersection(KEY_EVENTS))),
    },
)
