"""The state of an erasure in one word, used by pages, commands, the API, metrics and reports.

1. `open`: before its deadline, and some worker that owes an answer has not said that all is gone. `missed`: the same
   past the deadline. `complete`: every one has said so by the deadline. `late`: every one has, some after it.
2. Who owes an answer, and who has given it, is as `requests_and_answers` has it. Nothing here reads a clock.
3. A worker said that all is gone when it first said so, unless it said later that something is left.
4. `not-followed`: orders are authenticated (`signed_orders`), no trusted key signed this one, and it is not so that
   workers owed an answer and have all given it. No worker takes it up. A report is of leaves alone, and has no such
   state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import Connection, select

from kvcustody.audit.evidence.erasure.who_owes import owing
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import erasure_results
from kvcustody.audit.store.schema.ledger import incarnations

_AT_ONCE = 500  # erasures in one statement


class ErasureState(StrEnum):
    """Rules 1 and 4."""

    OPEN = "open"
    MISSED = "missed"
    COMPLETE = "complete"
    LATE = "late"
    NOT_FOLLOWED = "not-followed"


STATES_OF_LEAVES = (ErasureState.OPEN, ErasureState.MISSED, ErasureState.COMPLETE, ErasureState.LATE)


class ErasureStanding(NamedTuple):
    """The state of an erasure; `why` explains the state `not-followed`."""

    state: ErasureState
    why: str = ""

    @property
    def text(self) -> str:
        """The state in words, with its reason."""
        return f"not followed: {self.why}" if self.state is ErasureState.NOT_FOLLOWED else self.state.value

    def under(self, refused: str | None, owed: Sequence[str]) -> ErasureStanding:
        """Return the state of an order that is refused for a reason (rule 4); None: it counts. `owed` are workers."""
        answered = bool(owed) and self.state in (ErasureState.COMPLETE, ErasureState.LATE)
        if refused is None or answered:
            return self
        return ErasureStanding(ErasureState.NOT_FOLLOWED, refused)


class AskedErasure(NamedTuple):
    """An erasure, its request time and its deadline; UTC microseconds."""

    erasure: str
    at_us: int
    deadline_us: int


def state_of(erasure: AskedErasure, owed: Sequence[str], done: Mapping[str, int], now_us: int) -> ErasureState:
    """Return the state. `owed`: workers that owe an answer; `done`: when each first confirmed that everything is
    gone.
    """
    if not all(name in done for name in owed):
        return ErasureState.MISSED if now_us > erasure.deadline_us else ErasureState.OPEN
    last_us = max((done[name] for name in owed), default=erasure.at_us)
    return ErasureState.LATE if last_us > erasure.deadline_us else ErasureState.COMPLETE


def completed_by(answers: Iterable[tuple[str, str, str, int]]) -> dict[str, dict[str, int]]:
    """Return by erasure the workers that confirmed that everything is gone, and when (rule 3).

    `answers` are erasure, worker, outcome and moment, in order.
    """
    done: dict[str, dict[str, int]] = {}
    for erasure, worker, outcome, at_us in answers:
        said = done.setdefault(erasure, {})
        if outcome == "complete":
            said.setdefault(worker, at_us)
        else:
            said.pop(worker, None)
    return done


def read_states(
    connection: Connection, asked: Sequence[AskedErasure], now_us: int, periods: Mapping[str, WorkPeriod]
) -> dict[AskedErasure, ErasureState]:
    """Return the state of each of these erasures."""
    states: dict[AskedErasure, ErasureState] = {}
    for place in range(0, len(asked), _AT_ONCE):
        part = asked[place : place + _AT_ONCE]
        result = erasure_results.c
        query = (
            select(result.erasure, incarnations.c.uuid, result.outcome, result.at_us)
            .join(incarnations, incarnations.c.id == result.incarnation)
            .where(result.erasure.in_([one.erasure for one in part]), has_leaf(erasure_results))
            .order_by(result.at_us, result.log, result.idx)
        )
        done = completed_by(
            (erasure, periods[life].worker, outcome, at_us)
            for erasure, life, outcome, at_us in connection.execute(query)
            if life in periods
        )
        for one in part:
            owed = owing(periods, one.at_us)
            states[one] = state_of(one, owed, done.get(one.erasure, {}), now_us)
    return states
