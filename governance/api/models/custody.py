"""Custody as the API shows it: the ledger's own answers, with pseudonyms for subjects and counts for blocks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from kvcustody.audit.copies.copy_coverage import CopyCoverageRow
from kvcustody.audit.counters import hourly_coverage, read_figures
from kvcustody.audit.coverage.summary import CoverageRow
from kvcustody.audit.query import custody as queries
from kvcustody.audit.query.live_residencies import Live
from kvcustody.audit.report import subject_access as subject
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
Gaps = page_of(shown(queries.Gap), "Gaps")
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
    },
)


class SubjectAnswer(BaseModel):
    """Everything of one subject as of `now_us`, newest first; people by pseudonym, so that it may be kept."""

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


class CoverageAnswer(BaseModel):
    """Deletion coverage: rows by tenant and classification, their total, and the lag to the last receipt.

    `copies` are those off the device that were due, by tier too.
    """

    rows: list[CoverageRows]  # type: ignore[valid-type]
    total: CoverageRows  # type: ignore[valid-type]
    lag_us_p50: int
    lag_us_p99: int
    lag_us_max: int
    since_us: int
    until_us: int
    copies: list[CopyRows]  # type: ignore[valid-type]


def facts(rows: Any) -> list[dict[str, Any]]:
    """Facts of the library as JSON values."""
    return [row._asdict() for row in rows]


HourCoverage = shown(
    hourly_coverage.HourCoverage,
    example={
        "hour_us": 1_780_000_000_000_000,
        "row": CoverageRow("acme", "internal", due=7, covered=7)._asdict(),
        "lag_us_max": 4000,
    },
    parts={"row": CoverageRows},
)


class HourlyCoverage(BaseModel):
    """A page of judged hours, oldest first, and of which state they are."""

    items: list[HourCoverage]  # type: ignore[valid-type]
    next: str | None
    as_of: int | None
    judged_us: int | None
