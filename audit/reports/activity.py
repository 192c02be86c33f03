"""What was recorded in the period: leaves by kind, erasures, cases, orphan findings.

1. Counts are of leaves in the state of the checkpoint whose `at_us` is in the period; of one tenant, of its own log.
   Decisions are counted when they were made (`sections.decisions`).
"""

from __future__ import annotations

from typing import NamedTuple

import orjson
from sqlalchemy import ColumnElement, Connection, Table, and_, func, select, true

from kvcustody.audit.evidence.coverage.block_uses import NEVER
from kvcustody.audit.evidence.erasure.erasure_state import AskedErasure, ErasureState, completed_by, state_of
from kvcustody.audit.evidence.erasure.who_owes import owing
from kvcustody.audit.evidence.processes.work_periods import LIVES, WorkPeriod, work_periods
from kvcustody.audit.kinds import log_of
from kvcustody.audit.reports.leaf_counts import LeafCounts
from kvcustody.audit.reports.sections.cases import ReportedCase, read_reported_cases
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import erasure_results, erasures, orphan_findings
from kvcustody.audit.store.schema.ledger import events, incarnations, logs


class KindCount(NamedTuple):
    """Leaves of one kind."""

    kind: str
    leaves: int


class ReportedErasure(NamedTuple):
    """One erasure that was asked for; subject and session are pseudonyms. `outcome` is the last that was recorded."""

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
    unanswered: tuple[
        str, ...
    ] = ()  # workers that were at work at the request and did not say that all is gone
    due_us: int = 0  # UTC; 0: no deadline
    completed_us: int = 0  # when the last of those who owed an answer said that all is gone; 0: not yet
    state: str = ErasureState.OPEN.value  # as of the report's checkpoint

    @property
    def is_on_time(self) -> bool:
        """Everybody answered that all is gone, before it was due."""
        return self.state == ErasureState.COMPLETE

    @property
    def is_late(self) -> bool:
        """It was due, and not everybody had answered by then: the answer came later, or is still owed."""
        return self.state in (ErasureState.LATE, ErasureState.MISSED)


class ReportedStep(NamedTuple):
    """A step of the policy's release: who proposed, consented to, approved or activated which revision."""

    at_us: int
    action: str
    revision: int
    actor: str


class FindingCount(NamedTuple):
    """Orphan findings of one class and outcome."""

    orphan: str
    outcome: str
    findings: int


class Activity(NamedTuple):
    """All of it."""

    kinds: tuple[KindCount, ...]
    erasures: tuple[ReportedErasure, ...]
    findings: tuple[FindingCount, ...]
    cases: tuple[ReportedCase, ...] = ()
    release: tuple[ReportedStep, ...] = ()


def read_activity(
    connection: Connection,
    as_of: AsOf,
    overview: LeafCounts,
    since_us: int,
    until_us: int,
    *,
    now_us: int,
    tenant: str | None,
) -> Activity:
    """The activity of a period; `now_us`: when the last leaf under the checkpoint was written."""
    own = _own_log(connection, tenant)

    def within(table: Table) -> ColumnElement[bool]:
        log = true() if own is None else table.c.log == own
        return and_(
            as_of.has(table), has_leaf(table), table.c.at_us >= since_us, table.c.at_us < until_us, log
        )

    kinds: dict[str, int] = {}
    for item in overview.counted:
        kinds[item.kind] = kinds.get(item.kind, 0) + item.in_period
    return Activity(
        tuple(KindCount(kind, leaves) for kind, leaves in sorted(kinds.items()) if leaves),
        tuple(_erasures(connection, within(erasures), as_of, work_periods(overview.of_kind(*LIVES)), now_us)),
        _findings(connection, within(orphan_findings)),
        read_reported_cases(connection, as_of, since_us, until_us, tenant=tenant),
        _release(connection, within(events)),
    )


def _release(connection: Connection, within: ColumnElement[bool]) -> tuple[ReportedStep, ...]:
    query = select(events.c.at_us, events.c.leaf).where(
        events.c.kind == "release-step", within, has_leaf(events)
    )
    steps = ((at_us, orjson.loads(bytes(leaf))) for at_us, leaf in connection.execute(query))
    return tuple(
        sorted(ReportedStep(at, *(body[name] for name in ReportedStep._fields[1:])) for at, body in steps)
    )


def _own_log(connection: Connection, tenant: str | None) -> int | None:
    if tenant is None:
        return None
    return connection.scalar(select(logs.c.id).where(logs.c.name == log_of(tenant))) or -1


def _erasures(
    connection: Connection,
    within: ColumnElement[bool],
    as_of: AsOf,
    periods: dict[str, WorkPeriod],
    now_us: int,
) -> list[ReportedErasure]:
    result = erasure_results.c
    said = _answered(connection, as_of, periods)
    outcomes = {
        row.erasure: row
        for row in connection.execute(
            select(result.erasure, result.outcome, result.blocks, result.remaining, result.reason)
            .where(as_of.has(erasure_results), has_leaf(erasure_results))
            .order_by(result.at_us, result.log, result.idx)
        )
    }
    made = []
    for row in connection.execute(select(erasures).where(within)).all():
        last, answers = outcomes.get(row.erasure), said.get(row.erasure, {})
        owed = owing(periods, row.at_us)
        silent = tuple(name for name in owed if name not in answers)
        due_us = row.at_us + row.deadline_boot_us - row.at_boot_us if row.deadline_boot_us else 0
        asked = AskedErasure(row.erasure, row.at_us, due_us or int(NEVER))
        made.append(
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
                state_of(asked, owed, answers, now_us).value,
            )
        )
    return sorted(made, key=lambda item: (item.at_us, item.erasure))


def _answered(
    connection: Connection, as_of: AsOf, periods: dict[str, WorkPeriod]
) -> dict[str, dict[str, int]]:
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


def _findings(connection: Connection, within: ColumnElement[bool]) -> tuple[FindingCount, ...]:
    column = orphan_findings.c
    query = (
        select(column.orphan, column.outcome, func.count())
        .where(within)
        .group_by(column.orphan, column.outcome)
    )
    return tuple(sorted(FindingCount(*row) for row in connection.execute(query)))
