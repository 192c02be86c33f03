"""Reports and checks, as the API takes them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from kvcustody.audit.report.framework import NAMES
from kvcustody.governance.api.models.base import LARGE, Model, Name, TenantName, Whole, example
from kvcustody.governance.api.models.policies import Source
from kvcustody.governance.api.models.shown import shown
from kvcustody.governance.observability import processing_record as ropa

FrameworkName = StrEnum("FrameworkName", {name.replace("-", "_").upper(): name for name in sorted(NAMES)})  # type: ignore[misc]
_FRAMEWORK = {"id": "soc2", "title": "SOC 2", "edition": "2017, revised 2022", "controls": 9}


class ReportRequest(Model):
    """What a report depends on besides the ledger: the same again gives the same bytes."""

    model_config = example({"framework": "soc2", "tenant": "acme", "formats": ["json"]})

    framework: FrameworkName
    tenant: TenantName | None = None
    since: Annotated[int | None, Field(strict=True, ge=0, lt=LARGE)] = None
    until: Annotated[int | None, Field(strict=True, ge=0, lt=LARGE)] = None
    as_of: Annotated[int | None, Field(strict=True, ge=1, lt=LARGE)] = None
    extends: Annotated[int | None, Field(strict=True, ge=1, lt=LARGE)] = None
    seed: Name = "kvcustody"
    sample: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 25
    recount: bool = True
    threshold: Annotated[float, Field(ge=0, le=100, description="Percent in time that is asked for.")] = 99.9
    prepared_by: Annotated[str, Field(max_length=200, description="Who answers for the report.")] = ""
    formats: Annotated[list[Literal["json", "html", "pdf", "oscal"]], Field(max_length=4)] = Field(
        default_factory=list
    )
    expected_digest: Annotated[
        str | None,
        Field(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 that report.json should have."),
    ] = None


Statement = Annotated[str, Field(max_length=1000)]


class ProcessingRequest(Model):
    """What a record of processing is made of: a policy, a period of the ledger, and the controller's own words.

    Without `policy`, the one in effect: what workers run, released or from a file; else what is released. A statement
    that is left out stays open in the record, and says so.
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


_RECIPIENT = {
    "owner": "acme",
    "reader": "labs",
    "by": "grant labs-reads-acme",
    "at_most": "internal",
    "reason": "joint evaluation",
}
_TIME_LIMIT = {
    "classification": "internal",
    "since_last_use": "30m",
    "since_birth": "8h",
    "running_at_most": "2h",
    "overwritten_within": "1s",
    "read_back": "a share of 1/64 of the blocks",
    "tiers": "device memory only",
}
_RECORD = {
    "activity": "Caching of attention keys and values of language models",
    "controller": "Example AG, Bonn",
    "contact": ropa.OPEN,
    "officer": ropa.OPEN,
    "purposes": "answering support questions",
    "subjects": ropa.OPEN,
    "data": "Tensors computed from prompts and answers of users",
    "recipients": [_RECIPIENT],
    "transfers": ropa.OPEN,
    "time_limits": [_TIME_LIMIT],
    "erasure_within": "1d",
    "measures": ["Reuse is denied unless the policy permits it."],
    "policy": "regulated-saas",
    "policy_digest": "sha256:…",
    "run_by": ["gpu-0"],
    "due": 400,
    "covered": 400,
    "history": "",
}
Recipient = shown(ropa.Recipient, example=_RECIPIENT)
TimeLimit = shown(ropa.TimeLimit, example=_TIME_LIMIT)
_PARTS = {"recipients": list[Recipient], "time_limits": list[TimeLimit]}  # type: ignore[valid-type]
ProcessingRecord = shown(ropa.ProcessingRecord, "ProcessingRecord", _RECORD, parts=_PARTS)


class FrameworkModel(Model):
    """A framework and how many of its controls there is evidence for."""

    id: str
    title: str
    edition: str
    controls: Whole


class Frameworks(Model):
    """Every framework."""

    model_config = example({"items": [_FRAMEWORK], "next": None})

    items: list[FrameworkModel]
    next: str | None


class CheckRequest(Model):
    """What to hold the ledger against: public keys of its signer, and checkpoints that were kept elsewhere."""

    model_config = example({"keys": [], "notes": []})

    keys: Annotated[list[Annotated[str, Field(min_length=1, max_length=512)]], Field(max_length=16)] = Field(
        default_factory=list
    )
    notes: Annotated[list[Annotated[str, Field(min_length=1, max_length=65_536)]], Field(max_length=16)] = (
        Field(default_factory=list)
    )
