"""Route receipts as the API shows them: joined halves, their problems, and measures."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from kvcustody.audit.evidence.routes.route_measures import ScoreStep, TenantRoutes, WorkerRoutes
from kvcustody.audit.evidence.routes.route_receipts import FoundHalf, RouteFinding, SentHalf
from kvcustody.governance.api.models.shown import page_of, shown

_AT_US = 1_780_000_000_000_000
_RECEIPT = "1f4e6d0c9b8a7f5e3c2d1b0a99887766"
_SENT: dict[str, Any] = {
    "door": "door-1",
    "scope": "subject",
    "fleet_epoch": 0,
    "tenant_epoch": 0,
    "scope_epoch": 3,
    "worker": "gpu-0",
    "target": "3b0f6a52",
    "status": 200,
    "answer_ms": 42,
    "requests": 1,
    "uses": 3,
    "promised_tokens": 112,
    "score": 875_000,
    "at_us": _AT_US,
}
_FOUND: dict[str, Any] = {
    "worker": "gpu-0",
    "asked": True,
    "prompt_tokens": 128,
    "found_tokens": 96,
    "queue": 2,
    "free_blocks": 3000,
    "crosses": False,
    "agrees": True,
    "model": "3b1f0c2d4e5f6071",
    "at_us": _AT_US,
}
_FINDING: dict[str, Any] = {
    "problem": "promise-not-found",
    "receipt": _RECEIPT,
    "tenant": "acme",
    "worker": "gpu-0",
    "detail": "96 of 112 tokens",
    "at_us": _AT_US,
}
_SUMS: dict[str, Any] = {"requests": 40, "prompt_tokens": 5120, "found_tokens": 3840}
_STALE: dict[str, Any] = {"promises": 40, "stale_misses": 2}
_SHARES: dict[str, Any] = {"locality": 0.75, "stale_rate": 0.05}
_WORKER: dict[str, Any] = {
    "worker": "gpu-0",
    **_SUMS,
    **_STALE,
    "queue_mean": 1.5,
    "queue_last": 2,
    "free_blocks_last": 3000,
    "last_us": _AT_US,
}

SentHalfModel = shown(SentHalf, "SentHalf", _SENT)
FoundHalfModel = shown(FoundHalf, "FoundHalf", _FOUND)
RouteFindingModel = shown(RouteFinding, "RouteFinding", _FINDING, parts={"problem": str})
RouteFindings = page_of(RouteFindingModel, "RouteFindings")
ScoreStepModel = shown(ScoreStep, "ScoreStep", {"score_from": 0.5, **_SUMS})


class JoinedReceipt(BaseModel):
    """The receipt of one request; `sent` is null where the door's half is missing."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"receipt": _RECEIPT, "tenant": "acme", "sent": _SENT, "found": [_FOUND], "at_us": _AT_US}]
        }
    )

    receipt: str
    tenant: str
    sent: SentHalfModel | None  # type: ignore[valid-type]
    found: list[FoundHalfModel]  # type: ignore[valid-type]
    at_us: int


RouteReceipts = page_of(JoinedReceipt, "RouteReceipts")


class RoutesOfWorker(shown(WorkerRoutes, "WorkerRoutes", _WORKER)):  # type: ignore[misc]
    """One worker: its answers, and the tokens found there; shares are null where they are unknown."""

    model_config = ConfigDict(json_schema_extra={"examples": [_WORKER | _SHARES]})

    locality: float | None
    stale_rate: float | None


class RoutesOfTenant(shown(TenantRoutes, "TenantRoutes", {"tenant": "acme", **_SUMS, **_STALE})):  # type: ignore[misc]
    """One tenant: its requests with a receipt, and the tokens that they found."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tenant": "acme", **_SUMS, **_STALE, "locality": 0.75}]})

    locality: float | None


class RouteMeasuresModel(BaseModel):
    """The measures of the receipts in [since, until); null where no receipt contributes.

    `findings`: how many there are of each kind. `awaited`: receipts whose other half may still come. All of it is of
    receipts from `measured_since_us` on, which is later than `since_us` where the period has too many.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    **_SUMS,
                    **_STALE,
                    **_SHARES,
                    "hit_length": 96.0,
                    "promised_tokens": 3900,
                    "kept_tokens": 3840,
                    "stale_tokens": 60,
                    "other_epochs": 0,
                    "queue_deltas": 38,
                    "queue_delta_mean": -0.4,
                    "queue_delta_most": 3,
                    "imbalance": 1.05,
                    "workers": [_WORKER | _SHARES],
                    "tenants": [{"tenant": "acme", **_SUMS, **_STALE, "locality": 0.75}],
                    "scores": [{"score_from": 0.5, **_SUMS}],
                    "receipts": 41,
                    "awaited": 1,
                    "findings": {"promise-not-found": 2},
                    "since_us": _AT_US,
                    "until_us": _AT_US + 86_400_000_000,
                    "measured_since_us": _AT_US,
                }
            ]
        }
    )

    requests: int
    prompt_tokens: int
    found_tokens: int
    locality: float | None
    hit_length: float | None
    promises: int
    promised_tokens: int
    kept_tokens: int
    stale_misses: int
    stale_tokens: int
    stale_rate: float | None
    other_epochs: int
    queue_deltas: int
    queue_delta_mean: float | None
    queue_delta_most: int | None
    imbalance: float | None
    workers: list[RoutesOfWorker]
    tenants: list[RoutesOfTenant]
    scores: list[ScoreStepModel]  # type: ignore[valid-type]
    receipts: int
    awaited: int
    findings: dict[str, int]
    since_us: int
    until_us: int
    measured_since_us: int
