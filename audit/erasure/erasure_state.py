"""How an erasure stands, in one word that pages, commands, the API, metrics and reports all use.

1. `open`: before its deadline, and some worker that owes an answer has not said that all is gone. `missed`: the same
   past the deadline. `complete`: every one has said so by the deadline. `late`: every one has, some after it.
2. Who owes an answer, and who has given it, is as `requests_and_answers` has it. Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.erasure.who_owes import owing
from kvcustody.audit.processes.work_periods import WorkPeriod
from kvcustody.audit.schema.all_tables import has_leaf
from kvcustody.audit.schema.ledger import erasure_results, incarnations, workers

_AT_ONCE = 500  # erasures in one statement


class ErasureState(StrEnum):
    """Rule 1."""

    OPEN = "open"
    MISSED = "missed"
    COMPLETE = "complete"
    LATE = "late"


class AskedErasure(NamedTuple):
    """An erasure, when it was asked for and by when it is due; UTC microseconds."""

    erasure: str
    at_us: int
    deadline_us: int


def state_of(asked: AskedErasure, owed: Sequence[str], done: Mapping[str, int], now_us: int) -> ErasureState:
    """The state: `owed` are workers, `done` says when one said first that all is gone."""
    if not all(name in done for name in owed):
        return ErasureState.MISSED if now_us > asked.deadline_us else ErasureState.OPEN
    last_us = max((done[name] for name in owed), default=asked.at_us)
    return ErasureState.LATE if last_us > asked.deadline_us else ErasureState.COMPLETE


def read_states(
    connection: Connection, asked: Sequence[AskedErasure], now_us: int, periods: Mapping[str, WorkPeriod]
) -> dict[str, ErasureState]:
    """The state of each of these erasures, by its id."""
    found: dict[str, ErasureState] = {}
    for place in range(0, len(asked), _AT_ONCE):
        part = asked[place : place + _AT_ONCE]
        done: dict[str, dict[str, int]] = {}
        result = erasure_results.c
        query = (
            select(result.erasure, workers.c.name, func.min(result.at_us))
            .join(incarnations, incarnations.c.id == result.incarnation)
            .join(workers, workers.c.id == incarnations.c.worker)
            .where(
                result.erasure.in_([one.erasure for one in part]),
                result.outcome == "complete",
                has_leaf(erasure_results),
            )
            .group_by(result.erasure, workers.c.name)
        )
        for erasure, worker, at_us in connection.execute(query):
            done.setdefault(erasure, {})[worker] = at_us
        for one in part:
            owed = owing(periods, one.at_us)
            found[one.erasure] = state_of(one, owed, done.get(one.erasure, {}), now_us)
    return found
