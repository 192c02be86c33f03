"""Reports and checks, as the API takes them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from kvcustody.audit.report.framework import NAMES
from kvcustody.governance.api.models.base import LARGE, Model, Name, TenantName, Whole, example

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
    formats: Annotated[list[Literal["json", "html", "pdf", "oscal"]], Field(max_length=4)] = Field(
        default_factory=list
    )
    expected_digest: Annotated[
        str | None,
        Field(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 that report.json should have."),
    ] = None


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
