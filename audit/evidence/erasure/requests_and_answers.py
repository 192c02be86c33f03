"""Erasures in the ledger: requests, workers that owe an answer, and their answers.

1. A worker owes an answer when one of its processes had memory when the erasure was requested. A later process of the
   same worker may give it: what the earlier one held is closed as unproven when it died. Who had memory, and whose
   process answers, follows from signed leaves (`who_owes`), from no row.
2. An erasure is complete when every worker that owes an answer says so; until then it is partial, and those that have
   not answered by the deadline are named as unreachable.
3. Nothing here reads a clock: `now_us` is UTC, and passed in.
4. Where orders are authenticated, workers follow a request alone whose signed leaf says what its row says. Of several
   requests with one id the one that is followed is meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, exists, select

from kvcustody.audit.evidence.erasure.erasure_state import (
    AskedErasure,
    ErasureStanding,
    ErasureState,
    read_states,
    state_of,
)
from kvcustody.audit.evidence.erasure.who_owes import owing
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod, read_work_periods
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, is_tag
from kvcustody.audit.evidence.subjects.subject_table import named_row
from kvcustody.audit.store.database.signed_orders import SignedOrders, orders_of
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of, kinds_of
from kvcustody.audit.store.schema.leaf_tables import (
    erasure_effects,
    erasure_remains,
    erasure_rereads,
    erasure_results,
    erasures,
)
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.errors import LedgerError


class Requested(NamedTuple):
    """One erasure's request. Times are UTC microseconds; `subject` and `session` are pseudonyms."""

    erasure: str
    tenant: str | None
    selector: str
    subject: str | None
    session: str | None
    actor: str
    at_us: int
    deadline_us: int
    detail: str

    @property
    def asked(self) -> AskedErasure:
        """The facts from which its state is computed."""
        return AskedErasure(self.erasure, self.at_us, self.deadline_us)


class ErasureAnswer(NamedTuple):
    """One worker's answer to an erasure; `outcome` is `complete`, `partial`, or empty without an answer."""

    worker: str
    incarnation: str
    outcome: str
    at_us: int
    residencies: int
    blocks: int
    remaining: int
    reason: str
    reread_blocks: int
    reread_nonzero: int


class Status(NamedTuple):
    """An erasure over all workers."""

    request: Requested
    answers: tuple[ErasureAnswer, ...]
    waiting: tuple[str, ...]
    unreachable: tuple[str, ...]
    standing: ErasureStanding

    @property
    def state(self) -> ErasureState:
        """The state in one word."""
        return self.standing.state

    @property
    def outcome(self) -> str:
        """`complete` once every worker that owes an answer confirmed it (rule 2); `partial` for an order that nobody
        follows.
        """
        done = not (self.waiting or self.unreachable) and self.state is not ErasureState.NOT_FOLLOWED
        return "complete" if done and all(answer.outcome == "complete" for answer in self.answers) else "partial"


class SelectorNames(NamedTuple):
    """The names behind the pseudonyms of a request, if the link still exists."""

    subject: str | None
    session: str | None


(_KIND,) = kinds_of(erasures)
_AT_ONCE = 500  # requests in one statement
_REQUEST = (
    select(
        erasures.c.erasure,
        erasures.c.tenant,
        erasures.c.selector,
        erasures.c.subject,
        erasures.c.session,
        erasures.c.actor,
        erasures.c.at_us,
        (erasures.c.deadline_boot_us + incarnations.c.offset_us).label("deadline_us"),
        erasures.c.detail,
    )
    .join(incarnations, incarnations.c.id == erasures.c.incarnation)
    .where(has_leaf(erasures))
)
_ANSWERED = exists().where(
    erasure_results.c.erasure == erasures.c.erasure,
    erasure_results.c.outcome == "complete",
    has_leaf(erasure_results),
    erasure_results.c.incarnation.in_(
        select(incarnations.c.id).where(incarnations.c.uuid.in_(bindparam("lives", expanding=True)))
    ),
)
_PENDING = _REQUEST.where(~_ANSWERED, erasures.c.at_us >= bindparam("first_us")).order_by(erasures.c.at_us)


def requests(connection: Connection, *, tenant: str | None = None) -> tuple[Requested, ...]:
    """Return every erasure, newest first."""
    query = _REQUEST.order_by(erasures.c.at_us.desc(), erasures.c.log, erasures.c.idx.desc())
    if tenant is not None:
        query = query.where(erasures.c.tenant == tenant)
    return tuple(Requested(*row) for row in connection.execute(query))


def request(connection: Connection, erasure: str) -> Requested:
    """Return the request of one erasure; raises `LedgerError` if the ledger has none."""
    requests = [Requested(*row) for row in connection.execute(_REQUEST.where(erasures.c.erasure == erasure))]
    if not requests:
        raise LedgerError(f"erasure `{erasure}` is not in the ledger", erasure=erasure)
    if len(requests) == 1:
        return requests[0]
    refused = refused_requests(connection, requests)
    return next((one for one in requests if one not in refused), requests[0])


def pending(connection: Connection, worker: str) -> tuple[Requested, ...]:
    """Return erasures that this worker has not completed, oldest first: after a crash it must resume them."""
    return to_follow(connection, unanswered(connection, lives_of(connection, worker)))


def lives_of(connection: Connection, worker: str) -> dict[str, WorkPeriod]:
    """Return the processes of a worker, by incarnation, from the system log."""
    return {life: one for life, one in read_work_periods(connection).items() if one.worker == worker}


def unanswered(connection: Connection, lives: Mapping[str, WorkPeriod]) -> list[Requested]:
    """Return requests that no process of a worker has completed, oldest first, followed or not (rule 4).

    Only those that were requested since the first of the processes began, as its leaf says.
    """
    if not lives:
        return []
    first_us = min(one.started_us for one in lives.values())
    found = connection.execute(_PENDING, {"lives": list(lives), "first_us": first_us})
    return [Requested(*row) for row in found]


def completed(connection: Connection, lives: Mapping[str, WorkPeriod]) -> tuple[Requested, ...]:
    """Return erasures of a subject or tenant that these processes of a worker have completed, oldest first."""
    query = _REQUEST.where(_ANSWERED, erasures.c.selector.in_(("subject", "tenant"))).order_by(erasures.c.at_us)
    found = connection.execute(query, {"lives": list(lives)}) if lives else ()
    return to_follow(connection, [Requested(*row) for row in found])


def to_follow(connection: Connection, rows: Sequence[Requested]) -> tuple[Requested, ...]:
    """Return the requests that a process acts on (rule 4)."""
    refused = refused_requests(connection, rows)
    return tuple(row for row in rows if row not in refused)


def refused_requests(connection: Connection, rows: Sequence[Requested]) -> dict[Requested, str]:
    """Return the requests that no worker follows, with reasons (rule 4); empty if orders are not authenticated."""
    signed = orders_of(connection)
    reasons: dict[Requested, str] = {}
    if signed is None:
        return reasons
    for first in range(0, len(rows), _AT_ONCE):
        part = rows[first : first + _AT_ONCE]
        leaves = _leaves_of(connection, [row.erasure for row in part])
        for row in part:
            of_id = leaves.get(row.erasure, [])
            if row not in (_said(signed, leaf) for leaf in of_id):
                why = (refused.why for leaf in of_id if (refused := signed.refusal(leaf)) is not None)
                reasons[row] = next(why, "its row does not say what its signed leaf says")
    return reasons


def _leaves_of(connection: Connection, ids: Sequence[str]) -> dict[str, list[bytes]]:
    """Return the leaves of requests, by erasure."""
    query = (
        select(erasures.c.erasure, events.c.leaf)
        .select_from(events)
        .join(erasures, is_leaf_of(erasures))
        .where(erasures.c.erasure.in_(ids))
    )
    found: dict[str, list[bytes]] = {}
    for erasure, leaf in connection.execute(query):
        found.setdefault(erasure, []).append(bytes(leaf))
    return found


def _said(signed: SignedOrders, leaf: bytes) -> Requested | None:
    """What a leaf says whose signature counts; None for any other."""
    body = signed.accepted(leaf, _KIND)
    if body is None:
        return None
    utc = int(body["at_us"]) - int(body["boot_us"])
    said = body | {"at_us": int(body["at_us"]), "deadline_us": int(body["deadline_boot_us"]) + utc}
    return Requested(*(said[name] for name in Requested._fields))


def names(connection: Connection, asked: Requested, keys: SubjectKeys | None = None) -> SelectorNames | None:
    """Return the subject and session of a request by name; None if their link was destroyed.

    Where the ledger has tags instead of names, `keys` says who is meant, and None without them: a tag names nobody.
    """
    names: list[str | None] = []
    for pseudonym, place in ((asked.subject, 2), (asked.session, 3)):  # of the name in a row
        if pseudonym is None:
            names.append(None)
            continue
        row = named_row(connection, pseudonym)
        name = None if row is None else row[place]
        if name is not None and is_tag(name):
            kept = None if keys is None else keys.named(pseudonym)
            name = None if kept is None else kept[place - 1]
        if name is None:
            return None
        names.append(name)
    return SelectorNames(*names)


def status(
    connection: Connection, erasure: str, now_us: int, periods: Mapping[str, WorkPeriod] | None = None
) -> Status:
    """Return who has answered, who has not, and who has missed the deadline (rule 2).

    `periods`: who was at work, read beforehand by a connection that sees the system log; None: this one sees it.
    """
    requested = request(connection, erasure)
    if periods is None:
        periods = read_work_periods(connection)
    answers = tuple(_answer(connection, erasure, name, periods) for name in owing(periods, requested.at_us))
    silent = tuple(answer.worker for answer in answers if answer.outcome != "complete")
    late = now_us > requested.deadline_us
    done = {answer.worker: answer.at_us for answer in answers if answer.outcome == "complete"}
    owed = [answer.worker for answer in answers]
    standing = ErasureStanding(state_of(requested.asked, owed, done, now_us))
    standing = standing.under(refused_requests(connection, [requested]).get(requested), owed)
    return Status(requested, answers, () if late else silent, silent if late else (), standing)


def read_standings(
    connection: Connection,
    requested: Sequence[Requested],
    now_us: int,
    periods: Mapping[str, WorkPeriod] | None = None,
) -> dict[Requested, ErasureStanding]:
    """Return the standing of each request; `periods` as for `status`."""
    periods = read_work_periods(connection) if periods is None else periods
    states = read_states(connection, [one.asked for one in requested], now_us, periods)
    refused = refused_requests(connection, requested)
    return {
        one: ErasureStanding(states[one.asked]).under(refused.get(one), owing(periods, one.at_us)) for one in requested
    }


def _answer(connection: Connection, erasure: str, name: str, periods: Mapping[str, WorkPeriod]) -> ErasureAnswer:
    result, life = erasure_results.c, incarnations.c
    lives = [uuid for uuid, period in periods.items() if period.worker == name]
    query = (
        select(erasure_results, life.uuid)
        .join(incarnations, life.id == result.incarnation)
        .where(result.erasure == erasure, life.uuid.in_(lives), has_leaf(erasure_results))
        .order_by(result.outcome == "complete", result.at_us, result.idx)
    )
    rows = connection.execute(query).all()
    if not rows:
        return ErasureAnswer(name, "", "", 0, 0, 0, 0, "", 0, 0)
    row = rows[-1]
    read = connection.execute(
        select(erasure_rereads.c.checked, erasure_rereads.c.nonzero).where(
            erasure_rereads.c.erasure == erasure,
            erasure_rereads.c.incarnation == row.incarnation,
            has_leaf(erasure_rereads),
        )
    ).all()
    return ErasureAnswer(
        name,
        row.uuid,
        row.outcome,
        row.at_us,
        row.residencies,
        row.blocks,
        row.remaining,
        row.reason,
        sum(one.checked for one in read),
        sum(one.nonzero for one in read),
    )


__all__ = [
    "ErasureAnswer",
    "ErasureStanding",
    "ErasureState",
    "Requested",
    "SelectorNames",
    "Status",
    "completed",
    "erasure_effects",
    "erasure_remains",
    "names",
    "pending",
    "read_standings",
    "request",
    "requests",
    "status",
]
