"""Records of processing (GDPR 30), as the API shows them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcustody.audit.verify.documents.record_agreement import RECORD
from kvcustody.governance.api.models.base import Model, TenantName, example
from kvcustody.governance.api.models.policies import Source
from kvcustody.governance.api.models.shown import SignedDocument, of_document, shown
from kvcustody.governance.cases.recipients import GrantedRecipient
from kvcustody.governance.processing import record as ropa
from kvcustody.governance.service.operations.parameters import LARGE

Statement = Annotated[str, Field(max_length=1000)]


class ProcessingRequest(Model):
    """The input of a record of processing: a period of the ledger, and the controller's or processor's own text.

    It has every policy that workers ran in the period, else what is released; `policy` puts one beside them. A
    statement that is left out stays open in the record, and says so.
    """

    model_config = example({"controller": "Example AG, Bonn", "purposes": "answering support questions"})

    policy: Source | None = None
    since: Annotated[int | None, Field(strict=True, ge=0, lt=LARGE)] = None
    until: Annotated[int | None, Field(strict=True, ge=0, lt=LARGE)] = None
    controller: Statement = ""
    contact: Statement = ""
    officer: Statement = ""
    purposes: Statement = ""
    subjects: Statement = ""
    data: Statement = ""
    transfers: Statement = ""
    role: Literal["controller", "processor"] = "controller"
    as_of: Annotated[int | None, Field(strict=True, ge=1, lt=LARGE)] = None
    controllers: dict[TenantName, Statement] = Field(
        default_factory=dict, max_length=1000, description="Of a processor: names of controllers by tenant."
    )


_RECIPIENT = GrantedRecipient(
    "acme",
    "labs",
    "grant labs-reads-acme",
    "internal",
    "joint evaluation",
    "sha256:…",
    0,
    1_790_000_000_000_000,
    0,
)._asdict()
_TIME_LIMIT = ropa.TimeLimit(
    *("internal", "30m", "8h", "2h", "1s", "a share of 1/64 of the blocks", "device memory only", "sha256:…")
)._asdict()
_POLICY = ropa.RecordedPolicy(
    "sha256:…", "regulated-saas", "", 1_780_000_000_000_000, 0, ("gpu-0",), ropa.OF_LEAVES
)._asdict() | {"workers": ["gpu-0"]}
_CATEGORY = ropa.ProcessedCategory("acme", "internal", 400, 400)._asdict()
_CONTROL = {
    "framework": "gdpr",
    "control": "Art. 32",
    "title": "Security of processing",
    "status": "evidence present",
    "sections": ["decisions"],
}
_RECORD = {
    "version": "1.0",
    "role": "controller",
    "checkpoint": 41,
    "since_us": 1_780_000_000_000_000,
    "until_us": 1_787_000_000_000_000,
    "activity": "Caching of attention keys and values of language models",
    "controller": "Example AG, Bonn",
    "contact": ropa.OPEN,
    "officer": ropa.OPEN,
    "purposes": "answering support questions",
    "subjects": ropa.OPEN,
    "data": "Tensors computed from prompts and answers of users",
    "transfers": ropa.OPEN,
    "controllers": [],
    "categories": [_CATEGORY],
    "policies": [_POLICY],
    "recipients": [_RECIPIENT],
    "time_limits": [_TIME_LIMIT],
    "erasure_within": "1d",
    "measures": ["Reuse is denied unless the policy permits it."],
    "controls": [_CONTROL],
    "policy": "regulated-saas",
    "policy_digest": "sha256:…",
    "run_by": ["gpu-0"],
    "due": 400,
    "covered": 400,
    "history": "",
    "orders": "Orders are authenticated: every worker states that it follows those of its control plane.",
}
_PARTS = {
    "controllers": list[shown(ropa.ServedController, "ServedControllerModel")],  # type: ignore[misc]
    "categories": list[shown(ropa.ProcessedCategory, "ProcessedCategoryModel", _CATEGORY)],  # type: ignore[misc]
    "policies": list[shown(ropa.RecordedPolicy, "RecordedPolicyModel", _POLICY)],  # type: ignore[misc]
    "recipients": list[shown(GrantedRecipient, "GrantedRecipientModel", _RECIPIENT)],  # type: ignore[misc]
    "time_limits": list[shown(ropa.TimeLimit, "TimeLimitModel", _TIME_LIMIT)],  # type: ignore[misc]
    "controls": list[shown(ropa.MeasuredControl, "MeasuredControlModel", _CONTROL)],  # type: ignore[misc]
}
ProcessingRecordFacts = shown(ropa.ProcessingRecord, "ProcessingRecordFacts", _RECORD, parts=_PARTS)


class ProcessingRecordModel(ProcessingRecordFacts, SignedDocument):  # type: ignore[misc,valid-type]
    """A record of processing as `kvcustody report verify` checks it; without a signature where no key signs."""

    model_config = of_document(_RECORD, RECORD, "kvcustody.example/ledger/report+0a1b2c3d+…")
