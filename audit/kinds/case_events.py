"""Events of cases: a person's request about their data, and every step of its answer."""

from __future__ import annotations

from kvcustody.audit.kinds.event import (
    CaseId,
    GuardingOrder,
    MaybeWords,
    OrderedTenant,
    Words,
    WorkersLifecycleEvent,
)
from kvcustody.audit.kinds.row import Kept, LeafFigures, RowColumn, in_table


class CaseOpened(GuardingOrder, frozen=True, tag="case-opened"):
    """A person's request was received and will be answered as a case (class A).

    `received_utc` is when it came in, in UTC microseconds, as `actor` says. Its deadlines follow from that, the `zone`
    and the `holidays`, which are those of the controller's list that can matter; `ends` are what followed when it was
    opened (`audit.evidence.cases.case_clock`).
    """

    case_id: str
    tenant: str
    subject: str | None
    subject_right: str
    channel: str
    received_utc: int
    zone: str
    holidays: tuple[str, ...]
    actor: str
    trace: str = ""
    ends: tuple[str, ...] = ()

    row = in_table(
        "cases", "case_id", "tenant", "subject", "subject_right", "channel", RowColumn("received_us", "received_utc"),
        "zone", RowColumn("holidays", "_holidays", Kept.TEXT), "actor", "at_us",
        RowColumn("ends", "_ends", Kept.MAYBE_TEXT),
        indexes={"case_id": ("case_id",)},
    )  # fmt: skip
    figures = LeafFigures(by="subject_right")


class CaseStepped(GuardingOrder, frozen=True, tag="case-step"):
    """A step of a case is about to be taken (class A). `audit.evidence.cases.case_record` defines its words.

    `about` names an erasure, a recipient, a third party or a channel; `digest` is the SHA-256 of a letter or an export.
    """

    case_id: str
    tenant: str
    step: str
    outcome: str
    ground: str
    about: str
    reason: str
    digest: str
    actor: str
    trace: str = ""

    row = in_table(
        "case_steps", "case_id", "step", "outcome", "ground", "about", "reason", "digest", "actor", "at_us",
        indexes={"case_id": ("case_id",)},
    )  # fmt: skip
    figures = LeafFigures(by="step")


class ProcessingRestricted(WorkersLifecycleEvent, frozen=True, tag="processing-restricted"):
    """A worker stops or resumes using a subject's data: in effect before it is recorded (class B).

    `change`: `restricted` or `lifted`, as the case orders it.
    """

    case_id: CaseId
    tenant: OrderedTenant
    subject: MaybeWords
    change: Words

    figures = LeafFigures(by="change")
