"""The steps of a case: every refusal, and beside it the step that is accepted."""

from __future__ import annotations

import pytest

from kvcustody.audit.evidence.cases.case_record import (
    NEAR_US,
    CaseState,
    CaseStep,
    OpenedCase,
    StepKind,
    SubjectCase,
    refusal,
    replay,
)
from kvcustody.times import DAY_US, moment_us

RECEIVED_US = moment_us("2026-05-05T09:00:00Z")
FIRST_US = moment_us("2026-06-06T00:00:00Z")  # over, in UTC: due on Friday 5 June
EXTENDED_US = moment_us("2026-08-06T00:00:00Z")
DIGEST = "ab" * 32
CONFIRMED = CaseStep("identity", outcome="confirmed")
LINKED = CaseStep("erasure", about="e-1")
ERASED = CaseStep("decide", outcome="erased")
ANSWER = CaseStep("answer", about="letter", digest=DIGEST)
REFUSED = CaseStep("decide", outcome="refused", ground="12(5)", reason="the ninth this week")
EXTEND = CaseStep("extend", ground="complexity", reason="three systems")
EXEMPT = CaseStep("exempt", ground="17(3)(e)", reason="a claim is pending")
RESTRICT = CaseStep("restrict", ground="18(1)(c)")
LIFT = CaseStep("lift-restriction", reason="the claim is settled")
EXPORT = CaseStep("export", digest=DIGEST)


def opened(right: str = "erasure") -> OpenedCase:
    return OpenedCase("c-1", "acme", "pseudonym", right, "mail", RECEIVED_US, "UTC", "", "dana", RECEIVED_US)


def case(*steps: CaseStep, right: str = "erasure", at_us: int = RECEIVED_US + DAY_US) -> SubjectCase:
    made = replay(opened(right), [step._replace(at_us=step.at_us or at_us) for step in steps])
    assert not any(step.void for step in made.steps), made.steps
    return made


WHOLE = (CONFIRMED, LINKED, ERASED)


@pytest.mark.parametrize(
    ("before", "step", "right", "why"),
    [
        ((), CaseStep("burn"), "erasure", "there is no step `burn`"),
        ((), CaseStep("identity", outcome="perhaps"), "erasure", "`outcome` of `identity` is one of"),
        ((), CONFIRMED._replace(ground="12(5)"), "erasure", "`ground` of `identity`"),
        ((), EXTEND._replace(reason=" "), "erasure", "needs a `reason`"),
        ((), EXTEND._replace(ground=""), "erasure", "`ground` of `extend`"),
        ((), EXTEND._replace(at_us=FIRST_US), "erasure", "the first month ended with 2026-06-05"),
        ((EXTEND,), EXTEND, "erasure", "extended already"),
        ((), EXEMPT._replace(ground="17(3)(f)"), "erasure", "`ground` of `exempt`"),
        ((), LIFT, "erasure", "there is no restriction"),
        ((RESTRICT,), RESTRICT, "erasure", "applies already"),
        ((), LINKED, "erasure", "confirm the person's identity first"),
        ((CONFIRMED,), LINKED._replace(about=""), "erasure", "needs `about`"),
        ((CONFIRMED,), CONFIRMED._replace(about="x"), "erasure", "has no `about`"),
        ((CONFIRMED,), EXPORT._replace(digest="xy"), "access", "SHA-256"),
        ((CONFIRMED,), LINKED._replace(digest=DIGEST), "erasure", "has no `digest`"),
        ((CONFIRMED,), ERASED, "erasure", "no erasure is named"),
        ((CONFIRMED, LINKED), CaseStep("decide", outcome="given"), "erasure", "is decided as one of"),
        ((CONFIRMED, LINKED, EXEMPT), ERASED, "erasure", "not all was erased"),
        ((CONFIRMED, LINKED, RESTRICT), ERASED, "erasure", "a restriction keeps the data"),
        ((CONFIRMED, LINKED), CaseStep("decide", outcome="partly"), "erasure", "needs a `reason`"),
        ((), REFUSED._replace(ground=""), "erasure", "a `ground` and a `reason`"),
        ((), REFUSED._replace(reason=""), "erasure", "a `ground` and a `reason`"),
        ((), REFUSED._replace(ground="17(3)"), "erasure", "no exemption is on record"),
        ((CONFIRMED,), REFUSED._replace(ground="12(2)"), "erasure", "their identity is confirmed"),
        ((CONFIRMED,), CaseStep("decide", outcome="given"), "access", "no export was given"),
        ((CONFIRMED,), CaseStep("decide", outcome="partly", reason="trade secrets"), "access", "no export"),
        ((CONFIRMED,), CaseStep("decide", outcome="restricted"), "restriction", "no restriction applies"),
        ((CONFIRMED,), ANSWER, "erasure", "nothing is decided yet"),
        ((*WHOLE, ANSWER), REFUSED, "erasure", "the person was answered"),
        ((*WHOLE, ANSWER), EXTEND, "erasure", "the person was answered"),
        ((), EXEMPT._replace(reason="x" * 501), "erasure", "at most 500 characters"),
    ],
)
def test_a_step_that_may_not_follow_is_refused_and_void(
    before: tuple[CaseStep, ...], step: CaseStep, right: str, why: str
) -> None:
    standing = case(*before, right=right)
    taken = step._replace(at_us=step.at_us or RECEIVED_US + 2 * DAY_US)
    assert why in (refusal(standing, taken) or "")
    after = replay(standing.opened, [*standing.steps, taken])
    assert why in after.steps[-1].void and after.counted == standing.steps
    assert after.state(RECEIVED_US) == standing.state(RECEIVED_US)


PARTLY = CaseStep("decide", outcome="partly", reason="a claim")
UNKNOWN = CaseStep("identity", outcome="not-confirmed")
CONSULTED = CaseStep("third-party", outcome="consulted", about="Bank AG", reason="their data, too")


@pytest.mark.parametrize(
    ("steps", "right", "outcome"),
    [
        ((*WHOLE, ANSWER), "erasure", "erased"),
        ((CONFIRMED, LINKED, EXEMPT, PARTLY, ANSWER), "erasure", "partly"),
        ((EXEMPT, REFUSED._replace(ground="17(3)"), ANSWER), "erasure", "refused"),
        ((UNKNOWN, REFUSED._replace(ground="12(2)"), ANSWER), "erasure", "refused"),
        ((CONFIRMED, CaseStep("decide", outcome="not-found"), ANSWER), "erasure", "not-found"),
        ((CONFIRMED, EXPORT, CaseStep("decide", outcome="given"), ANSWER), "access", "given"),
        (
            (CONFIRMED, RESTRICT, CaseStep("decide", outcome="restricted"), ANSWER, LIFT),
            "restriction",
            "restricted",
        ),
        ((CONFIRMED, LINKED, RESTRICT, LIFT, ERASED, ANSWER), "erasure", "erased"),
        ((CONSULTED, REFUSED), "erasure", "refused"),
    ],
)
def test_every_way_to_an_answer(steps: tuple[CaseStep, ...], right: str, outcome: str) -> None:
    assert case(*steps, right=right).outcome == outcome


def test_its_state_follows_its_own_clock() -> None:
    fresh = case(CONFIRMED)
    assert fresh.state(RECEIVED_US) is CaseState.OPEN
    assert fresh.state(FIRST_US - NEAR_US) is CaseState.OPEN
    assert fresh.state(FIRST_US - NEAR_US + 1) is CaseState.NEAR
    assert fresh.state(FIRST_US - 1) is CaseState.NEAR
    assert fresh.state(FIRST_US) is CaseState.MISSED
    longer = case(EXTEND._replace(at_us=FIRST_US - 1), CONFIRMED)
    assert longer.first_due.until_us == FIRST_US and longer.due.until_us == EXTENDED_US
    assert longer.state(FIRST_US) is CaseState.OPEN and longer.state(EXTENDED_US) is CaseState.MISSED


@pytest.mark.parametrize(("at_us", "state"), [(FIRST_US - 1, CaseState.ANSWERED), (FIRST_US, CaseState.LATE)])
def test_an_answer_counts_from_when_it_was_recorded(at_us: int, state: CaseState) -> None:
    found = case(*WHOLE, ANSWER._replace(at_us=at_us))
    assert found.answered_us == at_us and found.state(at_us + 900 * DAY_US) is state
    assert found.as_of(at_us).answered_us is None and found.as_of(at_us + 1) == found


def test_a_question_back_stops_no_clock() -> None:
    asked = case(CaseStep("identity", outcome="asked", reason="the name is common"))
    assert asked.due == case().due and asked.state(FIRST_US) is CaseState.MISSED


def test_recipients_that_no_step_names_are_untold() -> None:
    told = case(*WHOLE, CaseStep("recipient", outcome="told", about="labs"))
    assert told.untold(["labs", "zeta"]) == ("zeta",) and case(*WHOLE).untold(["labs"]) == ("labs",)
    late = case(*WHOLE, ANSWER, CaseStep("recipient", outcome="impossible", about="zeta", reason="closed"))
    assert late.untold(["zeta"]) == (), "recipients are told after the answer, too"


def test_of_two_decisions_at_once_the_second_is_judged_behind_the_first() -> None:
    both = replay(
        opened(),
        [each._replace(at_us=RECEIVED_US + 1) for each in (CONFIRMED, LINKED, ERASED, ANSWER, ANSWER)],
    )
    assert [bool(step.void) for step in both.steps] == [False, False, False, False, True]
    assert {kind.value for kind in StepKind} >= {step.step for step in both.steps}
