"""Restrictions of processing (GDPR 18) in force, from the cases of a ledger, and the workers that follow them.

A restriction is in force from the leaf of its step on until one lifts it. A worker that follows it says so in a leaf of
its own, `processing-restricted`, and each later process does so again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.evidence.cases.case_record import StepKind, SubjectCase
from kvcustody.audit.evidence.cases.read_cases import case_to_follow
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod, at_work
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import case_steps
from kvcustody.audit.store.schema.ledger import events, incarnations

FOLLOWED = "processing-restricted"
_ASKED = (
    select(case_steps.c.case_id).where(case_steps.c.step == StepKind.RESTRICT.value, has_leaf(case_steps)).distinct()
)


class Restriction(NamedTuple):
    """A restriction in force: the pseudonym, the ground, and since when (UTC)."""

    case_id: str
    tenant: str
    subject: str | None
    ground: str
    since_us: int


def restriction_of(case: SubjectCase) -> Restriction | None:
    """Return the restriction of a case; None if it restricts nothing or no longer does."""
    step = case.last(StepKind.RESTRICT)
    if step is None or not case.is_restricted:
        return None
    opened = case.opened
    return Restriction(opened.case_id, opened.tenant, opened.subject, step.ground, step.at_us)


def restrictions_in_force(connection: Connection) -> tuple[Restriction, ...]:
    """Return all restrictions in force, in the order of their cases' ids."""
    cases = [case_to_follow(connection, case_id) for case_id in connection.scalars(_ASKED).all()]
    found = (restriction_of(case) for case in cases if case is not None)
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.case_id))


def followed_by(
    connection: Connection, restriction: Restriction, periods: Mapping[str, WorkPeriod]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the workers at work that follow it, and those that have not confirmed it yet."""
    query = (
        select(incarnations.c.uuid, events.c.leaf)
        .join(incarnations, incarnations.c.id == events.c.incarnation)
        .where(events.c.kind == FOLLOWED, has_leaf(events))
        .order_by(events.c.at_us, events.c.log, events.c.idx)
    )
    last: dict[str, str] = {}
    for life, leaf in connection.execute(query):
        body = orjson.loads(bytes(leaf))
        if body["case_id"] == restriction.case_id:
            last[life] = body["change"]
    working = {life: periods[life].worker for life in at_work(periods)}
    follows = {worker for life, worker in working.items() if last.get(life) == "restricted"}
    waiting = {worker for life, worker in working.items() if last.get(life) != "restricted"}
    return tuple(sorted(follows)), tuple(sorted(waiting))
