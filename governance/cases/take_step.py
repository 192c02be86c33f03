"""Opens a case and takes its steps, after checking each against the ledger.

    service.record(opened_event(now_us, wanted, actor, calendar))
    check_step(connection, case, step, ...); service.record(step_event(now_us, case, step, trace))

1. A step that the case refuses (`case_record.refusal`) is refused here, before it is recorded.
2. A step's claims are checked against the ledger:
   - its erasure belongs to the tenant, covers the person, and was requested after the person's request;
   - `erased` needs every answer to the erasure;
   - `not-found` needs a ledger without a residency of the person.
3. The actor is a principal whom a leaf enrolled. No text names the person: only the directory links the pseudonym to
   them. A text that contains the name as a word is refused, as far as the name is known here.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.evidence.cases.case_clock import WorkingCalendar, case_days
from kvcustody.audit.evidence.cases.case_record import CaseStep, StepKind, SubjectCase, SubjectRight, refusal
from kvcustody.audit.evidence.cases.read_cases import principal_periods
from kvcustody.audit.evidence.erasure.requests_and_answers import Status, status
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod
from kvcustody.audit.evidence.subjects.subject_filter import of_subjects
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import names_of, subject_behind
from kvcustody.audit.kinds import CaseOpened, CaseStepped
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.identity.principal import check_identifier

CHANNEL_CHARACTERS_MAX = 64
_ABOUT_OF_LEDGER = frozenset({StepKind.ERASURE, StepKind.RECIPIENT})  # `about` is an id or a name that the ledger has
_ANSWERED = frozenset({"complete", "late"})


class WantedCase(NamedTuple):
    """A request as it arrived; `received_us` in UTC microseconds."""

    tenant: str
    subject: str
    subject_right: str
    channel: str
    received_us: int


def opened_event(
    at_us: int, wanted: WantedCase, actor: str, calendar: WorkingCalendar, now_us: int, trace: str = ""
) -> CaseOpened:
    """Return the event that opens a case at boot time `at_us`; raises `ConfigError` for a request that is not valid.

    `now_us` is that moment in UTC: nothing was received after it.
    """
    if wanted.subject_right not in set(SubjectRight):
        raise ConfigError(f"`{wanted.subject_right}` is none of: {', '.join(SubjectRight)}")
    channel = wanted.channel.strip()
    if not channel or len(channel) > CHANNEL_CHARACTERS_MAX or not channel.isprintable():
        raise ConfigError(f"a channel has 1 to {CHANNEL_CHARACTERS_MAX} characters, as `mail` or `letter`")
    if wanted.received_us > now_us:
        raise ConfigError("`received` is in the future: the deadline would start too late")
    if _names_person(channel, wanted.subject):
        raise ConfigError("the channel names the person: say `mail`, not the address")
    check_identifier("subject", wanted.subject)
    near = calendar.near(wanted.received_us)
    return CaseOpened(
        at_us,
        case_id=uuid.uuid4().hex,
        tenant=wanted.tenant,
        subject=wanted.subject,
        subject_right=wanted.subject_right,
        channel=channel,
        received_utc=wanted.received_us,
        zone=near.zone,
        holidays=near.texts(),
        actor=actor,
        trace=trace,
        ends=case_days(wanted.received_us, near).texts(),
    )


def step_event(at_us: int, case: SubjectCase, step: CaseStep, trace: str = "") -> CaseStepped:
    """Return the event of a checked step, at boot time `at_us`."""
    return CaseStepped(
        at_us,
        case_id=case.opened.case_id,
        tenant=case.opened.tenant,
        step=step.step,
        outcome=step.outcome,
        ground=step.ground,
        about=step.about,
        reason=step.reason,
        digest=step.digest,
        actor=step.actor,
        trace=trace,
    )


def check_actor(connection: Connection, actor: str, now_us: int) -> None:
    """Raise `ConfigError` for an actor that is not a principal of the ledger now (rule 3)."""
    if not principal_periods(connection).acted(actor, now_us):
        raise ConfigError(
            f"`{actor}` is no principal of this ledger: `kvcustody principal add` lets somebody in",
            actor=actor,
        )


def check_step(
    connection: Connection,
    case: SubjectCase,
    step: CaseStep,
    *,
    keys: SubjectKeys | None = None,
    periods: Mapping[str, WorkPeriod] | None = None,
) -> None:
    """Raise `ConfigError` where the step may not be taken; `step.at_us` is its UTC time.

    `connection` sees the directory of subjects and the system log: nothing here is told to who asks but a refusal.
    """
    why = refusal(case, step) or next(_against_ledger(connection, case, step, keys, periods), None)
    if why is not None:
        raise ConfigError(f"step `{step.step}`: {why}", step=step.step)


def contradictions(
    connection: Connection,
    case: SubjectCase,
    now_us: int,
    *,
    keys: SubjectKeys | None = None,
    periods: Mapping[str, WorkPeriod] | None = None,
) -> tuple[str, ...]:
    """Return where the ledger now contradicts a decision: the same checks again, for the steps that count."""
    found: list[str] = []
    for step in case.of_kind(StepKind.DECIDE):
        found += _decided(connection, case, step._replace(at_us=now_us), keys, periods)
    return tuple(found)


def pseudonyms_of(connection: Connection, case: SubjectCase, keys: SubjectKeys | None) -> list[str]:
    """Return every pseudonym of the person; only the case's own where the link is destroyed or not known here."""
    opened = case.opened
    if opened.subject is None:
        return []
    name = subject_behind(connection, opened.subject, keys)
    known = [] if name is None else names_of(connection, opened.tenant, name, keys)
    return sorted({opened.subject, *known})


def _against_ledger(
    connection: Connection,
    case: SubjectCase,
    step: CaseStep,
    keys: SubjectKeys | None,
    periods: Mapping[str, WorkPeriod] | None,
) -> Iterator[str]:
    name = None if case.opened.subject is None else subject_behind(connection, case.opened.subject, keys)
    texts = {"reason": step.reason} if step.step in _ABOUT_OF_LEDGER else {"about": step.about, "reason": step.reason}
    for field, text in texts.items():
        if name is not None and _names_person(text, name):
            yield f"`{field}` names the person as `{name}`: leaves hold only pseudonyms, so leave the name out"
    if step.step == StepKind.RESTRICT and name is None:
        yield "this person's name is unlinked: no worker would know whom to restrict"
    if step.step == StepKind.ERASURE:
        yield from _linked(connection, case, step, keys, periods)
    if step.step == StepKind.DECIDE:
        yield from _decided(connection, case, step, keys, periods)


def _names_person(text: str, name: str) -> bool:
    """Whether the name stands in a text as a word: `7` is none in an erasure's id, nor in `2027`.

    Words are apart only where letters are ASCII: other scripts put none between, and there any occurrence counts.
    """
    sought, apart = re.escape(name.casefold()), "[A-Za-z0-9_-]" if name.isascii() else "(?!)"
    return re.search(f"(?<!{apart}){sought}(?!{apart})", text.casefold()) is not None


def _linked(
    connection: Connection,
    case: SubjectCase,
    step: CaseStep,
    keys: SubjectKeys | None,
    periods: Mapping[str, WorkPeriod] | None,
) -> Iterator[str]:
    found = _status(connection, step.about, step.at_us, periods)
    if found is None or found.request.tenant not in (None, case.opened.tenant):
        yield f"erasure `{step.about}` is none of this tenant"
        return
    asked, mine = found.request, pseudonyms_of(connection, case, keys)
    if asked.selector == "subject" and asked.subject not in mine:
        yield f"erasure `{step.about}` is of another person"
    elif asked.selector not in ("subject", "tenant") or asked.detail not in ("", "{}"):
        yield f"erasure `{step.about}` covers only a part of the person's data: the rest stays"
    if asked.at_us < case.opened.received_us:
        yield f"erasure `{step.about}` was requested before this request arrived"


def _decided(
    connection: Connection,
    case: SubjectCase,
    step: CaseStep,
    keys: SubjectKeys | None,
    periods: Mapping[str, WorkPeriod] | None,
) -> Iterator[str]:
    if step.outcome == "erased":
        for erasure in case.erasures:
            found = _status(connection, erasure, step.at_us, periods)
            if found is None or found.outcome != "complete" or found.state not in _ANSWERED:
                away = [] if found is None else [*found.waiting, *found.unreachable]
                missing = f": no answer of {', '.join(away[:5])}" if away else ""
                yield f"erasure `{erasure}` is not complete{missing}"
            elif sum(answer.remaining for answer in found.answers):
                yield f"erasure `{erasure}` left blocks that others hold: answer with the outcome `partly`"
    if step.outcome == "not-found":
        number = _residencies(connection, case, pseudonyms_of(connection, case, keys))
        if number:
            yield f"the ledger has {number} residencies of this person"


def _status(
    connection: Connection, erasure: str, now_us: int, periods: Mapping[str, WorkPeriod] | None
) -> Status | None:
    try:
        return status(connection, erasure, now_us, periods)
    except LedgerError:
        return None


def _residencies(connection: Connection, case: SubjectCase, names: list[str]) -> int:
    where = of_subjects(connection, case.opened.tenant, names)
    return connection.scalar(select(func.count()).select_from(residencies).where(*where, has_leaf(residencies))) or 0


def first_residency_us(connection: Connection, case: SubjectCase, names: list[str]) -> int | None:
    """Return when the person's first residency was opened; None where the ledger has none."""
    where = of_subjects(connection, case.opened.tenant, names)
    first: int | None = connection.scalar(
        select(func.min(residencies.c.opened_us)).where(*where, has_leaf(residencies))
    )
    return first
