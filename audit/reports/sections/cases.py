"""Requests of people in the period, as cases: how each stood at its end, by its own clock.

1. A case is in the period where it came in before the end, and had no answer on record before the beginning.
2. It is shown as it stood when the period ended, or, where the last leaf is from before that, at that leaf.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.evidence.cases.read_cases import read_cases
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events


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


def read_reported_cases(
    connection: Connection, as_of: AsOf, since_us: int, until_us: int, *, tenant: str | None
) -> tuple[ReportedCase, ...]:
    """Those of the period, the first to come in first."""
    every = read_cases(connection, tenant=tenant, as_of=as_of)
    if not every:
        return ()
    last_us = (
        connection.scalar(select(func.max(events.c.at_us)).where(as_of.has(events), has_leaf(events))) or 0
    )
    now_us, made = min(until_us, last_us), []
    for whole in every:
        if whole.opened.at_us >= until_us or whole.opened.received_us >= until_us:
            continue
        case = whole.as_of(until_us)
        if case.answered_us is not None and case.answered_us < since_us:
            continue
        opened = case.opened
        made.append(
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
    return tuple(sorted(made, key=lambda one: (one.received_us, one.case_id)))
