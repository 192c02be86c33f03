"""Cases, as the API shows them: people by pseudonym."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

from kvcustody.audit.evidence.cases.case_record import (
    ABOUT_CHARACTERS_MAX,
    REASON_CHARACTERS_MAX,
    CaseStep,
    StepKind,
    SubjectRight,
)
from kvcustody.audit.keep.purge_and_legal_hold import Hold
from kvcustody.governance.api.models.base import Model, Name, TenantName, example
from kvcustody.governance.api.models.shown import page_of, shown
from kvcustody.governance.cases import show_case as views
from kvcustody.governance.service.operations.parameters import LARGE

_CASE = {
    "case_id": "4f1c0e…",
    "tenant": "acme",
    "subject": "b1946ac92492d2347c6235b4d2611184",
    "subject_right": "erasure",
    "state": "open",
    "identity": "confirmed",
    "outcome": "",
    "received_us": 1_780_000_000_000_000,
    "received_day": "2026-05-28",
    "due_day": "2026-06-29",
    "due_us": 1_782_770_400_000_000,
    "extended": False,
    "restricted": False,
    "answered_us": None,
    "unread": "",
}
CaseSummaryModel = shown(views.CaseSummary, "CaseSummaryModel", _CASE)
CasePage = page_of(CaseSummaryModel, "CasePage")
_STEP = CaseStep("identity", outcome="confirmed", actor="dana", at_us=1_780_000_100_000_000)._asdict()
_HOLD = Hold("case-9", "acme", "litigation", "counsel", 1_780_000_000_000_000)._asdict()
_PARTS = {
    "steps": list[shown(CaseStep, "CaseStepModel", _STEP)],  # type: ignore[misc]
    "erasures": list[shown(views.CaseErasure, "CaseErasureModel")],  # type: ignore[misc]
    "holds": list[shown(Hold, "LegalHoldModel", _HOLD)],  # type: ignore[misc]
    "recipients": list[shown(views.CaseRecipient, "CaseRecipientModel")],  # type: ignore[misc]
}
_VIEW = _CASE | {
    "channel": "mail",
    "zone": "Europe/Berlin",
    "holidays": [],
    "first_due_day": "2026-06-29",
    "counted_day": "2026-06-28",
    "opened_us": 1_780_000_050_000_000,
    "actor": "dana",
    "steps": [_STEP],
    "erasures": [],
    "holds": [_HOLD],
    "recipients": [],
    "unknown_policies": [],
    "duties": ["decide (step `decide`)"],
    "contradictions": [],
    "strangers": [],
    "followed_by": [],
    "not_followed_by": [],
}
_SHOWN = shown(views.CaseView, "CaseView", _VIEW, parts=_PARTS)
_EXAMPLES: list[Any] = [_VIEW]
_FIELDS: dict[str, Any] = {
    name: (field.annotation, ...)
    for model in (CaseSummaryModel, _SHOWN)
    for name, field in model.model_fields.items()
    if name != "summary"
}
CaseModel = create_model(
    "CaseModel",
    __config__=ConfigDict(json_schema_extra={"examples": _EXAMPLES}),
    __doc__="A case with everything about it.",
    **_FIELDS,
)


class CaseRequest(Model):
    """A person's request: whose data, what they ask for, how and when it arrived (default: now)."""

    model_config = example({"tenant": "acme", "subject": "user-17", "right": "erasure", "channel": "mail"})

    tenant: TenantName | None = None
    subject: Name
    right: SubjectRight
    channel: Name
    received: Annotated[int | None, Field(strict=True, ge=1, lt=LARGE)] = None


class StepRequest(Model):
    """A step of a case; its kind decides which fields it needs, and a refusal names them."""

    model_config = example({"step": "identity", "outcome": "confirmed"})

    step: StepKind
    outcome: Annotated[str, Field(max_length=64)] = ""
    ground: Annotated[str, Field(max_length=64)] = ""
    about: Annotated[str, Field(max_length=ABOUT_CHARACTERS_MAX)] = ""
    reason: Annotated[str, Field(max_length=REASON_CHARACTERS_MAX)] = ""
    digest: Annotated[str, Field(max_length=64)] = ""


class LetterForm(StrEnum):
    """The format of a letter."""

    TEXT = "text"
    HTML = "html"
    PDF = "pdf"


Address = Annotated[str, Field(max_length=1000)]


class LetterRequest(Model):
    """Details for a letter that its case does not hold; they go into the letter and are not stored."""

    model_config = example({"addressee": "Ada Lovelace", "sender": "Example AG, Bonn", "date": "2026-06-20"})

    addressee: Address
    sender: Address = ""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="The letter's date.")]
    kind: Literal["answer", "extension", "identity"] = "answer"
    form: LetterForm = LetterForm.TEXT
