"""Reports and checks, as the API takes them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from kvcustody.audit.reports.framework import NAMES
from kvcustody.governance.api.models.base import Model, Name, TenantName, Unread, Whole, example
from kvcustody.governance.service.operations.parameters import LARGE
from kvcustody.governance.service.schedules.calendar_periods import Cadence

FrameworkName = StrEnum("FrameworkName", {name.replace("-", "_").upper(): name for name in sorted(NAMES)})  # type: ignore[misc]
_CONTROL = {
    "id": "CC6.5",
    "title": "Disposal",
    "scope": "blocks of KV caches",
    "supports": "Every block that was held is shown with its end.",
    "limit": "Nothing is shown of other storage.",
    "clock": True,
    "evidence": ["coverage"],
    "shows": ["disposal"],
}
_FRAMEWORK = {
    "id": "soc2",
    "title": "SOC 2",
    "edition": "2017, revised 2022",
    "ids_from": "https://www.aicpa-cima.com/",
    "ids_taken": "2026-11-01",
    "controls": [_CONTROL],
}


class ReportRequest(Model):
    """The parameters of a report: with the same ledger and parameters, the bytes are the same."""

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
    organisation: Annotated[str, Field(max_length=200, description="The organisation that it is of.")] = ""
    zone: Annotated[
        str,
        Field(min_length=1, max_length=64, description="The time zone whose times pages show beside UTC."),
    ] = "UTC"
    formats: Annotated[list[Literal["json", "html", "pdf", "oscal"]], Field(max_length=4)] = Field(default_factory=list)
    expected_digest: Annotated[
        str | None,
        Field(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 that report.json should have."),
    ] = None


_SCHEDULE = {
    "schedule": "ab12" * 4, "principal": "dana", "tenant": "acme", "framework": "soc2", "formats": ["json"],
    "destinations": ["auditors"], "every": "monthly", "zone": "Europe/Berlin", "hour": 6, "state": "active",
    "made_us": 1_780_000_000_000_000, "changed_us": 1_780_000_000_000_000, "changed_by": "dana",
    "next_us": 1_780_200_000_000_000, "unread": "",
}  # fmt: skip
_DELIVERY = {
    "destination": "auditors", "state": "delivered", "tries": 1, "next_us": 1_780_200_000_000_000, "failing_us": None,
    "delivered_us": 1_780_200_003_000_000, "place": "soc2-2026-04-30-2026-05-31-0f2c7a9d11ee", "error": None,
    "unread": "",
}  # fmt: skip
_REASON = {"id": "gap", "adverse": False, "amount": 2, "cause": "2 gaps: records that are not there"}
_MADE = {
    "report": "cd" * 16, "schedule": "ab12" * 4, "job": "ef" * 16, "principal": "dana", "tenant": "acme",
    "framework": "soc2", "formats": ["json"], "since_us": 1_777_000_000_000_000, "until_us": 1_780_000_000_000_000,
    "due_us": 1_780_200_000_000_000, "state": "made", "tries": 0, "checkpoint": 1041, "digest": "9f" * 32,
    "opinion": "qualified", "reasons": [_REASON], "signed_by": "kv.example/ledger/report+d2b266a2", "error": None,
    "created_us": 1_780_200_000_000_000, "made_us": 1_780_200_002_000_000, "deliveries": [_DELIVERY], "unread": "",
}  # fmt: skip
ReportFormat = Literal["json", "html", "pdf", "oscal"]
DestinationName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]


class ScheduleRequest(Model):
    """A schedule of reports: the tenant, the interval, the calendar, and the destinations.

    Destinations are those of the settings, by name. `zone` is an IANA name; default: the tenant's, or the service's.
    """

    model_config = example({"framework": "soc2", "tenant": "acme", "every": "monthly", "destinations": ["auditors"]})

    framework: FrameworkName
    every: Cadence
    tenant: TenantName | None = None
    formats: Annotated[list[ReportFormat], Field(max_length=4)] = Field(default_factory=list)
    destinations: Annotated[list[DestinationName], Field(max_length=8)] = Field(default_factory=list)
    zone: Annotated[str | None, Field(min_length=1, max_length=64)] = None
    hour: Annotated[int, Field(strict=True, ge=0, le=23)] = 6


class ScheduleReason(Model):
    """The reason for a change; it goes on record."""

    model_config = example({"reason": "the audit is over"})

    reason: Annotated[str, Field(max_length=500)] = ""


class ScheduleModel(Model):
    """A schedule; `next_us` is when its next report is due. It is null while paused, or where `unread` says why."""

    model_config = example(_SCHEDULE)

    schedule: str
    principal: str
    tenant: str | None
    framework: str
    formats: list[str]
    destinations: list[str]
    every: str
    zone: str
    hour: int
    state: Literal["active", "paused", "deleted"]
    made_us: Whole
    changed_us: Whole
    changed_by: str
    next_us: Whole | None
    unread: str


class ScheduleList(Model):
    """Every schedule that you may see, the oldest first."""

    model_config = example({"items": [_SCHEDULE], "next": None})

    items: list[ScheduleModel]
    next: str | None


class DestinationModel(Model):
    """A destination that reports may be delivered to. The operator sets its address and keys."""

    name: str
    kind: Literal["folder", "s3", "webhook"]


class DestinationList(Model):
    """Every destination that your reports may be delivered to."""

    model_config = example({"items": [{"name": "auditors", "kind": "s3"}], "next": None})

    items: list[DestinationModel]
    next: str | None


class ReasonModel(Model):
    """One exception that qualifies an opinion, and the amount that it concerns."""

    id: str
    adverse: bool
    amount: int
    cause: str


class DeliveryModel(Model):
    """The delivery of a report to one destination."""

    destination: str
    state: Literal["waiting", "delivered", "given-up"]
    tries: Whole
    next_us: Whole
    failing_us: Whole | None
    delivered_us: Whole | None
    place: str | None
    error: str | None
    unread: Unread


class MadeReportModel(Model):
    """A report that exists or is due by a schedule: its verdict, its digest, and its deliveries."""

    model_config = example(_MADE)

    report: str
    schedule: str | None
    job: str | None
    principal: str
    tenant: str | None
    framework: str
    formats: list[str]
    since_us: Whole
    until_us: Whole
    due_us: Whole | None
    state: Literal["waiting", "making", "made", "failed", "skipped"]
    tries: Whole
    checkpoint: Whole | None
    digest: str | None
    opinion: Literal["unqualified", "qualified", "adverse"] | None
    reasons: list[ReasonModel]
    signed_by: str | None
    error: str | None
    created_us: Whole
    made_us: Whole | None
    deliveries: list[DeliveryModel]
    unread: Unread


class MadeReportPage(Model):
    """A page of reports, newest first."""

    model_config = example({"items": [_MADE], "next": None})

    items: list[MadeReportModel]
    next: str | None


class ControlModel(Model):
    """A control that the ledger has evidence for: what supports it, and what the evidence does not show."""

    id: str
    title: str
    scope: str
    supports: str
    limit: str
    clock: bool
    evidence: list[str]
    shows: list[str]


class FrameworkModel(Model):
    """A framework, the source and date of its ids, and the controls that the ledger has evidence for."""

    id: str
    title: str
    edition: str
    ids_from: str
    ids_taken: str
    controls: list[ControlModel]


class Frameworks(Model):
    """Every framework."""

    model_config = example({"items": [_FRAMEWORK], "next": None})

    items: list[FrameworkModel]
    next: str | None


class CheckRequest(Model):
    """What to check the ledger against: public keys of its signer, and checkpoints that were kept elsewhere."""

    model_config = example({"keys": [], "notes": []})

    keys: Annotated[list[Annotated[str, Field(min_length=1, max_length=512)]], Field(max_length=16)] = Field(
        default_factory=list
    )
    notes: Annotated[list[Annotated[str, Field(min_length=1, max_length=65_536)]], Field(max_length=16)] = Field(
        default_factory=list
    )
