"""A case as people see it: its state, what the ledger has about it, and open tasks.

1. Everything in it is of leaves and of the directory's pseudonyms; no name of a person is in it.
2. Holds are those in effect now on the person, on their tenant and on everything; they bind the ledger's retention and
   the unlinking of pseudonyms, and no deadline of any block.
3. Who follows a restriction says so in a leaf (`followed_by`); who is at work and has not is named.
4. Recipients are readers to whom the tenant's data was open since the person's first residency, each up to the
   classification as granted. What is scoped to a subject is open to no reader; what the tenant shares may be of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.evidence.cases.case_record import CaseState, CaseStep, StepKind, SubjectCase
from kvcustody.audit.evidence.cases.read_cases import principal_periods, strangers
from kvcustody.audit.evidence.cases.restrictions import followed_by, restriction_of
from kvcustody.audit.evidence.erasure.requests_and_answers import status
from kvcustody.audit.evidence.processes.policies_in_period import read_policies_in_period
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod, read_work_periods
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.keep.purge_and_legal_hold import Hold, holds_on
from kvcustody.errors import LedgerError
from kvcustody.governance.cases.recipients import GrantedRecipient, known_policies, recipients_in
from kvcustody.governance.cases.take_step import contradictions, first_residency_us, pseudonyms_of
from kvcustody.governance.release.replay_records import ReleaseState


class CaseErasure(NamedTuple):
    """An erasure that a case names, and its state."""

    erasure: str
    selector: str
    at_us: int
    deadline_us: int
    state: str
    outcome: str
    waiting: tuple[str, ...]
    why: str = ""  # nobody follows it


class CaseRecipient(NamedTuple):
    """A recipient, and the outcome of the step that informed it; empty where no step did."""

    reader: str
    by: str
    at_most: str
    policy_digest: str
    first_use_us: int
    told: str


class CaseSummary(NamedTuple):
    """A case in a list. Days are ISO dates in its time zone; `due_us` is the first moment that is too late."""

    case_id: str
    tenant: str
    subject: str | None
    subject_right: str
    state: str
    identity: str
    outcome: str
    received_us: int
    received_day: str
    due_day: str
    due_us: int
    extended: bool
    restricted: bool
    answered_us: int | None
    unread: str = ""  # what of its leaf could not be read: its days are then ones that are never too late


class CaseView(NamedTuple):
    """A case with everything about it."""

    summary: CaseSummary
    channel: str
    zone: str
    holidays: tuple[str, ...]
    first_due_day: str
    counted_day: str
    opened_us: int
    actor: str
    steps: tuple[CaseStep, ...]
    erasures: tuple[CaseErasure, ...]
    holds: tuple[Hold, ...]
    recipients: tuple[CaseRecipient, ...]
    unknown_policies: tuple[str, ...]
    duties: tuple[str, ...]
    contradictions: tuple[str, ...]
    strangers: tuple[str, ...]
    followed_by: tuple[str, ...] = ()
    not_followed_by: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """Return the case as JSON data, with the summary's fields beside the others."""
        made: dict[str, Any] = self._asdict()
        summary = made.pop("summary")._asdict()
        for name, value in made.items():
            if isinstance(value, tuple):
                made[name] = [one._asdict() if hasattr(one, "_asdict") else one for one in value]
        return {**summary, **made}


def summary_of(case: SubjectCase, now_us: int) -> CaseSummary:
    """Return the case as a row of a list."""
    opened, due = case.opened, case.due
    return CaseSummary(
        opened.case_id,
        opened.tenant,
        opened.subject,
        opened.subject_right,
        case.state(now_us).value,
        case.identity,
        case.outcome,
        opened.received_us,
        opened.days.received.isoformat(),
        due.day.isoformat(),
        due.until_us,
        bool(case.of_kind(StepKind.EXTEND)),
        case.is_restricted,
        case.answered_us,
        opened.days.unread,
    )


def view_case(
    connection: Connection,
    case: SubjectCase,
    now_us: int,
    *,
    keys: SubjectKeys | None = None,
    release: ReleaseState | None = None,
    issuers: Iterable[str] = (),
    periods: Mapping[str, WorkPeriod] | None = None,
) -> CaseView:
    """Return the case in full; `connection` sees the directory and the system log (`check_step`)."""
    opened = case.opened
    names = pseudonyms_of(connection, case, keys)
    recipients, unknown = _recipients(connection, case, names, now_us, release)
    erasures = tuple(_erasures(connection, case, now_us, periods))
    restriction = restriction_of(case)
    followed: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    if restriction is not None:
        known = read_work_periods(connection) if periods is None else periods
        followed, waiting = followed_by(connection, restriction, known)
    told = {step.about: step.outcome for step in case.of_kind(StepKind.RECIPIENT)}
    shown = tuple(
        CaseRecipient(one.reader, one.by, one.at_most, one.policy_digest, one.first_use_us, told.get(one.reader, ""))
        for one in recipients
    )
    return CaseView(
        summary_of(case, now_us),
        opened.channel,
        opened.zone,
        tuple(opened.holidays.split()),
        case.first_due.day.isoformat(),
        case.due.counted.isoformat(),
        opened.at_us,
        opened.actor,
        case.steps,
        erasures,
        holds_on(connection, opened.tenant, names),
        shown,
        unknown,
        (*_duties(case, now_us, shown, erasures), *_unfollowed(waiting)),
        contradictions(connection, case, now_us, keys=keys, periods=periods),
        strangers(case, principal_periods(connection), issuers),
        followed,
        waiting,
    )


def _unfollowed(waiting: tuple[str, ...]) -> Iterator[str]:
    if waiting:
        yield f"workers that do not follow the restriction yet: {', '.join(waiting)}"


def _erasures(
    connection: Connection, case: SubjectCase, now_us: int, periods: Mapping[str, WorkPeriod] | None
) -> Iterator[CaseErasure]:
    for erasure in case.erasures:
        try:
            progress = status(connection, erasure, now_us, periods)
        except LedgerError:
            yield CaseErasure(erasure, "", 0, 0, "", "not in the ledger", ())
            continue
        asked = progress.request
        waiting = (*progress.waiting, *progress.unreachable)
        yield CaseErasure(
            *(erasure, asked.selector, asked.at_us, asked.deadline_us),
            *(progress.state.value, progress.outcome, waiting, progress.standing.why),
        )


def _recipients(
    connection: Connection, case: SubjectCase, names: list[str], now_us: int, release: ReleaseState | None
) -> tuple[tuple[GrantedRecipient, ...], tuple[str, ...]]:
    """Who they are (rule 3), and the digests of policies of which nobody has the document."""
    first_us = first_residency_us(connection, case, names)
    if first_us is None:
        return (), ()
    known = known_policies(read_policies_in_period(connection, first_us, now_us), release)
    unknown = sorted({one.period.digest for one in known if one.policy is None})
    return recipients_in(connection, known, first_us, now_us, owner=case.opened.tenant), tuple(unknown)


def _duties(
    case: SubjectCase, now_us: int, recipients: Iterable[CaseRecipient], erasures: Iterable[CaseErasure]
) -> Iterator[str]:
    """What is still to be done, in the order in which it is due."""
    state = case.state(now_us)
    if not case.identity and case.answered_us is None:
        yield "verify the person's identity (step `identity`)"
    if case.identity == "asked" and case.answered_us is None:
        yield "the person was asked to prove their identity: the deadline still runs"
    if case.identity == "confirmed" and not case.outcome and case.opened.subject_right == "erasure":
        if not case.erasures:
            yield "request the erasure, then name it (step `erasure`)"
        elif any(one.why for one in erasures):
            yield "no worker follows the erasure: sign its order, or request it again and name the new one"
        elif any(one.outcome != "complete" for one in erasures):
            yield "wait for the erasure to complete, or check its workers"
    if not case.outcome:
        yield "decide (step `decide`)"
    if case.outcome and case.answered_us is None:
        yield "answer the person (`case letter`, then step `answer`)"
    if state is CaseState.MISSED:
        yield f"the answer was due on {case.due.day.isoformat()}: it is already late"
    if case.outcome in ("erased", "partly", "restricted"):
        untold = case.untold(one.reader for one in recipients)
        if untold:
            yield f"notify its recipients (Article 19, step `recipient`): {', '.join(untold)}"
    if case.is_restricted and case.outcome:
        yield "processing is restricted: inform the person before you lift it (Article 18(3))"
