"""Custody as the API shows it: the ledger's own answers, with pseudonyms for subjects and counts for blocks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverageRow
from kvcustody.audit.evidence.copies.copy_rows import DecidedTransfer
from kvcustody.audit.evidence.copies.transfers import (
    ExplainedRequest,
    RecordedTransfer,
    TierSummary,
    TransferSize,
    TransferSummary,
)
from kvcustody.audit.evidence.counters import hourly_coverage, read_figures
from kvcustody.audit.evidence.coverage.summary import CoverageRow
from kvcustody.audit.evidence.processes import sequence_gaps
from kvcustody.audit.evidence.processes.enforcement import NotEnforced
from kvcustody.audit.evidence.query import custody as queries
from kvcustody.audit.evidence.query.live_residencies import Live
from kvcustody.audit.evidence.query.showback import DatedReuse
from kvcustody.audit.reports import subject_access as subject
from kvcustody.governance.api.models.shown import page_of, shown

Residency = shown(
    queries.SubjectResidency,
    "Residency",
    {
        "incarnation": "ab" * 16,
        "residency": 17,
        "tenant": "acme",
        "classification": "internal",
        "session": None,
        "revision": 3,
        "opened_us": 1_780_000_000_000_000,
        "absolute_us": 1_780_028_800_000_000,
        "released_us": None,
        "cause": None,
        "hold_us": None,
        "attached_blocks": 12,
        "written_blocks": 4,
    },
)
Residencies = page_of(Residency, "Residencies")
LiveResidency = shown(
    Live,
    "LiveResidency",
    {
        "incarnation": "ab" * 16,
        "residency": 17,
        "tenant": "acme",
        "classification": "internal",
        "subject": "p-3f1a",
        "opened_us": 1_780_000_000_000_000,
        "running": True,
        "until_us": 1_780_028_800_000_000,
    },
)
Totals = page_of(shown(read_figures.TenantTotals), "Totals")
Denials = page_of(shown(read_figures.Denials, "Denial"), "Denials")
CrossedReuses = page_of(shown(DatedReuse), "CrossedReuses")
Gaps = page_of(shown(sequence_gaps.Gap), "Gaps")
Findings = page_of(shown(queries.OrphanFinding), "Findings")
BlockHistory = page_of(shown(queries.BlockLeaf), "BlockHistory")
CoverageRows = shown(CoverageRow)
CopyRows = shown(CopyCoverageRow)
EventCounts = page_of(shown(read_figures.EventCount), "EventCounts")


Holding = shown(
    subject.Holding,
    example={
        "incarnation": "ab" * 16,
        "residency": 17,
        "classification": "internal",
        "model": "",
        "pseudonym": "p-3f1a",
        "asserted": False,
        "reasons": ["own-scope"],
        "revision": 3,
        "opened_us": 1_780_000_000_000_000,
        "released_us": None,
        "until_us": 1_780_028_800_000_000,
        "state": "running",
        "blocks": 16,
        "in_custody": 16,
    },
)
ErasureShown = shown(
    subject.ErasureShown,
    example={
        "erasure": "cd" * 16,
        "selector": "subject",
        "at_us": 1_780_000_000_000_000,
        "deadline_us": 1_780_000_600_000_000,
        "outcome": "complete",
        "waiting": [],
        "unreachable": [],
        "state": "complete",
    },
)


class SubjectAnswer(BaseModel):
    """Everything on record about one subject as of `now_us`, newest first; people by pseudonym, so that it may
    be kept.
    """

    tenant: str
    pseudonyms: list[str]
    now_us: int
    held_blocks: int
    until_us: int
    holdings: list[Holding]  # type: ignore[valid-type]
    evidence: CoverageRows  # type: ignore[valid-type]
    erasures: list[ErasureShown]  # type: ignore[valid-type]


class LiveResidencies(BaseModel):
    """A page of what is held at `now_us`, oldest first."""

    items: list[LiveResidency]  # type: ignore[valid-type]
    next: str | None
    now_us: int


NotEnforcedModel = shown(
    NotEnforced,
    "NotEnforced",
    NotEnforced(1_780_000_000_000_000, 1_780_000_600_000_000, "monitor")._asdict(),
)


class CoverageAnswer(BaseModel):
    """Deletion coverage: rows by tenant and classification, their total, and the lag to the last receipt.

    `copies` are those off the device that were due, by tier too. `monitored`: when a worker did not enforce its policy
    for everybody in the period, which `qualification` says in words; both are empty where all was enforced.
    """

    rows: list[CoverageRows]  # type: ignore[valid-type]
    total: CoverageRows  # type: ignore[valid-type]
    lag_us_p50: int
    lag_us_p99: int
    lag_us_max: int
    since_us: int
    until_us: int
    copies: list[CopyRows]  # type: ignore[valid-type]
    monitored: list[NotEnforcedModel]  # type: ignore[valid-type]
    qualification: str


def facts(rows: Any) -> list[dict[str, Any]]:
    """Convert the library's facts to JSON values."""
    return [row._asdict() for row in rows]


HourCoverage = shown(
    hourly_coverage.HourCoverage,
    example={
        "hour_us": 1_780_000_000_000_000,
        "row": CoverageRow("acme", "internal", due=7, covered=7)._asdict(),
        "lag_us_max": 4000,
        "lag_us_p50": 900,
        "lag_us_p99": 4000,
    },
    parts={"row": CoverageRows},
)


class HourlyCoverage(BaseModel):
    """A page of judged hours, oldest first, with the state that they were judged at."""

    items: list[HourCoverage]  # type: ignore[valid-type]
    next: str | None
    as_of: int | None
    judged_us: int | None


_DECIDED = {
    "tenant": "acme",
    "action": "restore",
    "tier": "host",
    "residency": 17,
    "blocks": 8,
    "bytes": 1_048_664,
    "transfer_us": 812,
    "recompute_us": 40_312,
    "choice": "transfer",
    "outcome": "done",
    "actual_us": 799,
    "reason": "faster",
    "part_blocks": 0,
    "latency_class": "interactive",
    "at_us": 1_780_000_000_000_000,
}
_SIZED = {
    "bytes_min": 1_048_576,
    "transfers": 9,
    "measured_us": 7380,
    "predicted": 8,
    "predicted_us": 7400,
    "predicted_actual_us": 7310,
}
_SUMMED = {
    "tier": "host",
    "action": "restore",
    "decisions": 12,
    "transfers": 10,
    "partial": 0,
    "failed": 1,
    "blocks": 72,
    "bytes": 9_437_976,
    "measured_us": 8210,
    "predicted": 8,
    "predicted_us": 7400,
    "predicted_actual_us": 7310,
    "error": 0.04,
    "saved_us": 361_000,
    "against": {"slower": 2},
    "sizes": [_SIZED],
}
Transfer = shown(RecordedTransfer, "Transfer", {"incarnation": "ab" * 16} | _DECIDED)
Transfers = page_of(Transfer, "Transfers")
TransferSizes = shown(TransferSize, "TransferSize", _SIZED)
TransferTotals = shown(
    TransferSummary,
    "TransferTotals",
    _SUMMED,
    parts={"sizes": list[TransferSizes]},  # type: ignore[valid-type]
)
Tier = shown(
    TierSummary,
    "Tier",
    {
        "tier": "host",
        "stored": 40,
        "stored_bytes": 41_946_560,
        "ended": 8,
        "ended_bytes": 8_389_312,
        "living": 32,
        "net_us": 352_790,
        "transfers": [_SUMMED],
    },
    parts={"transfers": list[TransferTotals]},  # type: ignore[valid-type]
)
TransferDecided = shown(DecidedTransfer, "TransferDecided", _DECIDED)
RequestTransfers = shown(
    ExplainedRequest,
    "RequestTransfers",
    {
        "incarnation": "ab" * 16,
        "residency": 17,
        "tenant": "acme",
        "classification": "internal",
        "opened_us": 1_780_000_000_000_000,
        "attached_blocks": 2,
        "written_blocks": 9,
        "decisions": [_DECIDED],
    },
    parts={"decisions": list[TransferDecided]},  # type: ignore[valid-type]
)


class Tiers(BaseModel):
    """Every tier on record: its copies since it began, and the decisions in [since, until)."""

    items: list[Tier]  # type: ignore[valid-type]
    since_us: int
    until_us: int


class ExplainedTransfers(BaseModel):
    """The decisions for one request number, by process, newest first; `any_tier`: whether any tier is on record."""

    items: list[RequestTransfers]  # type: ignore[valid-type]
    any_tier: bool
