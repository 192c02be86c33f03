"""Erasures, as the API shows them: people by pseudonym."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcustody.audit.evidence.erasure.erasure_holds import ErasureHold
from kvcustody.audit.evidence.erasure.preview import PreviewRow
from kvcustody.audit.evidence.erasure.requests_and_answers import ErasureAnswer
from kvcustody.audit.reports.erasure.certificate import CERTIFICATE
from kvcustody.governance.api.models.base import Model, Name, TenantName, Utc, Whole, example
from kvcustody.governance.api.models.shown import SignedDocument, of_document, shown

_ERASURE = {
    "erasure": "4f1c0e…",
    "tenant": "acme",
    "selector": "subject",
    "actor": "acme-dpo",
    "at_us": 1_780_000_000_000_000,
    "deadline_us": 1_780_000_060_000_000,
}
AnswerOfWorker = shown(ErasureAnswer, "AnswerOfWorker")
_HOLD = {
    "hold": "case-9",
    "tenant": "acme",
    "subject": None,
    "reason": "litigation",
    "actor": "counsel",
    "at_us": 1_780_000_000_000_000,
}
ErasureHoldModel = shown(ErasureHold, "ErasureHoldModel", _HOLD)


class ErasureRequest(Model):
    """What to erase: a tenant, narrowed by subject or session, by a domain's parts or by a model."""

    model_config = example({"tenant": "acme", "subject": "user-17", "deadline_seconds": 60})

    tenant: TenantName | None = None
    subject: Name | None = None
    session: Name | None = None
    model: Annotated[str | None, Field(pattern=r"^[0-9a-f]{64}$", description="A ModelIdentity's digest.")] = None
    classification: Name | None = None
    segment: Name | None = None
    key_epoch: Annotated[int | None, Field(strict=True, ge=0, lt=1 << 31, description="Domains of this key epoch.")] = (
        None
    )
    labels: dict[Name, Name] = Field(
        default_factory=dict, max_length=16, description="Domains with these labels, as region: eu."
    )
    deadline_seconds: Annotated[int, Field(strict=True, ge=1, le=30 * 86_400)] = 3600


class ErasureModel(Model):
    """A request to end custody."""

    model_config = example(_ERASURE)

    erasure: str
    tenant: str | None
    selector: str
    actor: str
    at_us: Utc
    deadline_us: Utc


_ROW = {"tenant": "acme", "classification": "internal", "residencies": 12, "running": 1}
PreviewRowModel = shown(PreviewRow, "ErasurePreviewRow", _ROW)


class ErasurePreview(Model):
    """What an erasure would cover according to the ledger; each of `workers` would owe an answer."""

    model_config = example(
        {
            "tenant": "acme",
            "selector": "subject",
            "rows": [_ROW],
            "residencies": 12,
            "running": 1,
            "is_cut": False,
            "not_counted": [],
            "workers": ["gpu-0"],
        }
    )

    tenant: str | None
    selector: str
    rows: list[PreviewRowModel]  # type: ignore[valid-type]
    residencies: Whole
    running: Whole
    is_cut: bool
    not_counted: list[str]
    workers: list[str]


class ErasureListed(ErasureModel):
    """An erasure and its state: `missed` is past its deadline with answers outstanding, `late` has all of them, too
    late.

    `not-followed`: no trusted key signed the order, and `why` says what is wrong with it; no worker takes it up.
    """

    model_config = example(_ERASURE | {"state": "open", "why": ""})

    state: Literal["open", "missed", "complete", "late", "not-followed"]
    why: str


class ErasureStatus(ErasureListed):
    """An erasure over all workers: partial until every one that owes an answer has given it."""

    model_config = example(
        _ERASURE
        | {
            "state": "open",
            "why": "",
            "outcome": "partial",
            "answers": [],
            "waiting": ["gpu-0"],
            "unreachable": [],
        }
        | {"holds": [_HOLD]}
    )

    outcome: Literal["complete", "partial"]
    answers: list[AnswerOfWorker]  # type: ignore[valid-type]
    waiting: list[str]
    unreachable: list[str]
    holds: list[ErasureHoldModel]  # type: ignore[valid-type]


class ErasurePage(Model):
    """A page of erasures, newest first."""

    model_config = example({"items": [_ERASURE | {"state": "open", "why": ""}], "next": None})

    items: list[ErasureListed]
    next: str | None


class Certificate(SignedDocument):
    """A certificate as `kvcustody erasure verify` checks it: facts, and a signature over its canonical bytes."""

    model_config = of_document(
        {"erasure": "4f1c0e…", "outcome": "complete"},
        CERTIFICATE,
        "kvcustody.example/ledger+0a1b2c3d+…",
    )

    erasure: str
    outcome: Literal["complete", "partial"]


class OpeningModel(Model):
    """The opening of a commitment: the salt in hexadecimal, and the selector's text."""

    model_config = example({"salt": "ab" * 32, "selector": '{"tenant":"acme","subject":"user-17"}'})

    salt: str
    selector: str
