"""A case from its leaves: the request, the steps taken, the allowed next steps, and the state.

    case = replay(opened, steps)
    case.state(now_us)
    allowed_steps(case, now_us)

1. Steps count in the order of their leaves. One that may not follow what was before it changes nothing: it is `void`,
   with the reason. What refuses a step before it is taken (`refusal`) and what finds it void later are one function.
2. A step counts from when it was recorded, not from when somebody says that it happened: what was sent in time and
   recorded late is `late`.
3. The clock runs from receipt, whether or not the person is known yet; a question back to them stops it not. It is
   extended once, before the first month is over, with a reason that the person is told within it (12(3)).
4. A refusal has a ground and a reason. `erased` and `partly` name an erasure. What a person is told is a letter, of
   which the record has the digest; with it the case is answered and takes no step but those of `AFTERWARDS`.
5. Nothing here reads a clock or a database, and no name of a person is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kvcustody.audit.evidence.cases.case_clock import CaseDays, CaseDeadline, days_of
from kvcustody.times import DAY_US

NEAR_US = 7 * DAY_US
REASON_CHARACTERS_MAX = 500
ABOUT_CHARACTERS_MAX = 200
_DIGEST = re.compile("[0-9a-f]{64}")


class SubjectRight(StrEnum):
    """The right that a person exercises."""

    ERASURE = "erasure"
    ACCESS = "access"
    RESTRICTION = "restriction"


class StepKind(StrEnum):
    """The kinds of steps in a case."""

    IDENTITY = "identity"
    EXTEND = "extend"
    EXEMPT = "exempt"
    RESTRICT = "restrict"
    LIFT = "lift-restriction"
    THIRD_PARTY = "third-party"
    RECIPIENT = "recipient"
    ERASURE = "erasure"
    EXPORT = "export"
    DECIDE = "decide"
    ANSWER = "answer"


class CaseState(StrEnum):
    """The state of a case. `near`: open, and its deadline is less than `NEAR_US` away. `late`: answered after the
    deadline.
    """

    OPEN = "open"
    NEAR = "near"
    MISSED = "missed"
    ANSWERED = "answered"
    LATE = "late"


OUTCOMES: dict[StepKind, tuple[str, ...]] = {
    StepKind.IDENTITY: ("confirmed", "asked", "not-confirmed"),
    StepKind.THIRD_PARTY: ("concerned", "consulted", "told"),
    StepKind.RECIPIENT: ("told", "impossible", "disproportionate"),
    StepKind.DECIDE: ("erased", "partly", "refused", "not-found", "given", "restricted"),
}
GROUNDS: dict[StepKind, tuple[str, ...]] = {
    StepKind.EXTEND: ("complexity", "number"),
    StepKind.EXEMPT: ("17(3)(a)", "17(3)(b)", "17(3)(c)", "17(3)(d)", "17(3)(e)"),
    StepKind.RESTRICT: ("18(1)(a)", "18(1)(b)", "18(1)(c)", "18(1)(d)"),
    StepKind.DECIDE: ("11(2)", "12(2)", "12(5)", "15(4)", "17(3)"),
}
REASONED = frozenset({StepKind.EXTEND, StepKind.EXEMPT, StepKind.LIFT, StepKind.THIRD_PARTY})
ABOUT = frozenset({StepKind.THIRD_PARTY, StepKind.RECIPIENT, StepKind.ERASURE, StepKind.ANSWER})
DIGESTED = frozenset({StepKind.EXPORT, StepKind.ANSWER})
AFTERWARDS = frozenset({StepKind.LIFT, StepKind.THIRD_PARTY, StepKind.RECIPIENT, StepKind.ERASURE})
_OF_RIGHT = {
    SubjectRight.ERASURE: {"erased", "partly", "refused", "not-found"},
    SubjectRight.ACCESS: {"given", "partly", "refused", "not-found"},
    SubjectRight.RESTRICTION: {"restricted", "refused", "not-found"},
}


class OpenedCase(NamedTuple):
    """A request as recorded. Times are UTC microseconds; `subject` is a pseudonym."""

    case_id: str
    tenant: str
    subject: str | None
    subject_right: str
    channel: str
    received_us: int
    zone: str
    holidays: str
    actor: str
    at_us: int
    ends: str | None = None

    @property
    def days(self) -> CaseDays:
        """The days of receipt and deadline, according to the leaf."""
        return days_of(self.received_us, self.zone, self.holidays, self.ends or "")


class CaseStep(NamedTuple):
    """A recorded or requested step. `void` gives the reason if a recorded step does not count."""

    step: str
    outcome: str = ""
    ground: str = ""
    about: str = ""
    reason: str = ""
    digest: str = ""
    actor: str = ""
    at_us: int = 0
    void: str = ""


@dataclass(frozen=True, slots=True)
class SubjectCase:
    """A case and the result of its steps."""

    opened: OpenedCase
    steps: tuple[CaseStep, ...] = ()

    @property
    def counted(self) -> tuple[CaseStep, ...]:
        """The steps that are not void."""
        return tuple(step for step in self.steps if not step.void)

    def of_kind(self, kind: StepKind) -> tuple[CaseStep, ...]:
        """Return the counted steps of one kind."""
        return tuple(step for step in self.counted if step.step == kind)

    def last(self, kind: StepKind) -> CaseStep | None:
        """Return the last counted step of a kind."""
        found = self.of_kind(kind)
        return found[-1] if found else None

    @property
    def identity(self) -> str:
        """The result of checking the person's identity; empty if not checked yet."""
        found = self.last(StepKind.IDENTITY)
        return "" if found is None else found.outcome

    @property
    def outcome(self) -> str:
        """The decision; empty if there is none yet."""
        found = self.last(StepKind.DECIDE)
        return "" if found is None else found.outcome

    @property
    def is_restricted(self) -> bool:
        """Whether a restriction applies that nobody has lifted."""
        both = [step.step for step in self.counted if step.step in (StepKind.RESTRICT, StepKind.LIFT)]
        return bool(both) and both[-1] == StepKind.RESTRICT

    @property
    def first_due(self) -> CaseDeadline:
        """The end of the first month."""
        return self.opened.days.first

    @property
    def due(self) -> CaseDeadline:
        """When the answer is due."""
        return self.opened.days.extended if self.of_kind(StepKind.EXTEND) else self.first_due

    @property
    def answered_us(self) -> int | None:
        """The time at which the letter was recorded."""
        found = self.last(StepKind.ANSWER)
        return None if found is None else found.at_us

    @property
    def erasures(self) -> tuple[str, ...]:
        """The erasures that the case names, each once."""
        return tuple(dict.fromkeys(step.about for step in self.of_kind(StepKind.ERASURE)))

    def state(self, now_us: int) -> CaseState:
        """Return the state at a moment."""
        until_us = self.due.until_us
        if self.answered_us is not None:
            return CaseState.ANSWERED if self.answered_us < until_us else CaseState.LATE
        if now_us >= until_us:
            return CaseState.MISSED
        return CaseState.NEAR if until_us - now_us < NEAR_US else CaseState.OPEN

    def as_of(self, until_us: int) -> SubjectCase:
        """Return the case without anything recorded from a moment on."""
        return replay(self.opened, (step for step in self.steps if step.at_us < until_us))

    def untold(self, recipients: Iterable[str]) -> tuple[str, ...]:
        """Return the recipients for whom no step records a notification, or the reason why none is possible (19)."""
        told = {step.about for step in self.of_kind(StepKind.RECIPIENT)}
        return tuple(sorted(set(recipients) - told))


def replay(opened: OpenedCase, steps: Iterable[CaseStep]) -> SubjectCase:
    """Return the case that results from a request and its steps, in the order of their leaves (rule 1)."""
    case = SubjectCase(opened)
    for step in steps:
        taken = step._replace(void=refusal(case, step._replace(void="")) or "")
        case = replace(case, steps=(*case.steps, taken))
    return case


def refusal(case: SubjectCase, step: CaseStep) -> str | None:
    """Return why the case does not allow a step now; None if it does."""
    return next((why for check in (_form, _order, _clock, _decision) for why in check(case, step)), None)


def allowed_steps(case: SubjectCase, at_us: int) -> tuple[CaseStep, ...]:
    """Return every step with its outcome and ground that the case allows now, given what else the step needs."""
    every = (
        CaseStep(
            kind,
            outcome,
            ground,
            about="a" if kind in ABOUT else "",
            reason="a",
            digest="0" * 64 if kind in DIGESTED else "",
            at_us=at_us,
        )
        for kind in StepKind
        for outcome in OUTCOMES.get(kind, ("",))
        for ground in ("", *GROUNDS.get(kind, ()))
    )
    return tuple(step for step in every if refusal(case, step) is None)


def _form(case: SubjectCase, step: CaseStep) -> Iterator[str]:
    if step.step not in set(StepKind):
        yield f"there is no step `{step.step}`: it is one of {', '.join(StepKind)}"
        return
    kind = StepKind(step.step)
    outcomes, grounds = OUTCOMES.get(kind, ("",)), GROUNDS.get(kind, ())
    if step.outcome not in outcomes:
        yield f"`outcome` of `{kind}` is one of: {', '.join(outcomes) or 'none'}"
    if step.ground not in grounds and (step.ground or kind in (StepKind.EXEMPT, StepKind.RESTRICT)):
        yield f"`ground` of `{kind}` is one of: {', '.join(grounds) or 'none'}"
    if kind in REASONED and not step.reason.strip():
        yield f"`{kind}` needs a `reason`"
    if (kind in ABOUT) != bool(step.about):
        yield f"`{kind}` {'needs' if kind in ABOUT else 'has no'} `about`"
    if (kind in DIGESTED) != bool(step.digest) or (step.digest and not _DIGEST.fullmatch(step.digest)):
        yield f"`{kind}` {'needs the SHA-256 of a file as' if kind in DIGESTED else 'has no'} `digest`"
    if len(step.reason) > REASON_CHARACTERS_MAX or len(step.about) > ABOUT_CHARACTERS_MAX:
        yield f"a reason has at most {REASON_CHARACTERS_MAX} characters, `about` {ABOUT_CHARACTERS_MAX}"


def _order(case: SubjectCase, step: CaseStep) -> Iterator[str]:
    if case.answered_us is not None and step.step not in AFTERWARDS:
        yield "the person was answered already: open a new case for a later request"
    if step.step == StepKind.LIFT and not case.is_restricted:
        yield "there is no restriction to lift"
    if step.step == StepKind.RESTRICT and case.is_restricted:
        yield "a restriction applies already"
    if step.step == StepKind.ANSWER and not case.outcome:
        yield "nothing is decided yet, so there is nothing to tell the person"
    unproven = step.step in (StepKind.EXPORT, StepKind.ERASURE) or step.outcome in _GIVING
    if unproven and case.identity != "confirmed":
        yield "confirm the person's identity first: before that no data is given out, erased or restricted"


_GIVING = ("erased", "partly", "given", "restricted")


def _clock(case: SubjectCase, step: CaseStep) -> Iterator[str]:
    if step.step != StepKind.EXTEND:
        return
    if not step.ground:
        yield f"`ground` of `extend` is one of: {', '.join(GROUNDS[StepKind.EXTEND])}"
    if case.of_kind(StepKind.EXTEND):
        yield "the time was extended already, and may only be extended once"
    if step.at_us >= case.first_due.until_us:
        yield f"the first month ended with {case.first_due.day.isoformat()}: it can only be extended before that"


def _decision(case: SubjectCase, step: CaseStep) -> Iterator[str]:
    if step.step != StepKind.DECIDE:
        return
    right = SubjectRight(case.opened.subject_right)
    if step.outcome not in _OF_RIGHT[right]:
        yield f"a request for {right} is decided as one of: {', '.join(sorted(_OF_RIGHT[right]))}"
    exempt = case.of_kind(StepKind.EXEMPT)
    if step.outcome == "refused" and not (step.ground and step.reason.strip()):
        yield "a refusal needs a `ground` and a `reason`: the person is told both (12(4))"
    if step.ground == "17(3)" and not exempt:
        yield "it names 17(3), and no exemption is on record"
    if step.ground in ("11(2)", "12(2)") and case.identity == "confirmed":
        yield "it says that the person cannot be identified, and their identity is confirmed"
    if step.outcome == "partly" and not step.reason.strip():
        yield "`partly` needs a `reason` that names what remains, and why"
    if right is SubjectRight.ERASURE and step.outcome in ("erased", "partly") and not case.erasures:
        yield "no erasure is named: take the step `erasure` first"
    if step.outcome == "erased" and exempt:
        yield "an exemption is on record, so not all was erased: decide `partly`"
    if step.outcome == "erased" and case.is_restricted:
        yield "a restriction keeps the data: lift it, or decide `partly`"
    gives = step.outcome == "given" or (right is SubjectRight.ACCESS and step.outcome == "partly")
    if gives and not case.of_kind(StepKind.EXPORT):
        yield "no export was given: take the step `export` first"
    if step.outcome == "restricted" and not case.is_restricted:
        yield "no restriction applies: take the step `restrict` first"
