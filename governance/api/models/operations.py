"""Operations as the API shows them: quotas, capacity, sinks, scans."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from kvcustody.audit.evidence.query.custody import OrphanFinding
from kvcustody.audit.evidence.query.scans import Scan
from kvcustody.audit.siem.sink_folder import SinkStatus
from kvcustody.deadline_clock import ClockState
from kvcustody.governance.api.models.base import Model, Utc, Whole, example
from kvcustody.governance.api.models.policies import EFFECTIVE, EffectivePolicyModel
from kvcustody.governance.api.models.shown import page_of, shown
from kvcustody.governance.service.fleet.workers import WorkerState

_LIFE = "ab" * 16
_SCAN = {
    "incarnation": _LIFE, "scan": 3, "worker": "gpu-0", "mode": "full", "started_us": 1_780_000_000_000_000,
    "ended_us": 1_780_000_000_250_000, "residencies": 812, "blocks": 65_536, "findings": 1,
}  # fmt: skip
_FINDING = {
    "orphan": "lost finish", "cause": "no sequence for 5 minutes", "tenant": "acme", "age_us": 300_000_000,
    "blocks": 12, "action": "released", "outcome": "recovered", "at_us": 1_780_000_000_000_000,
}  # fmt: skip
_SINK = {
    "name": "siem", "attached": True, "delivered": 4096, "dead": 0, "failures": 0, "problem": "",
    "withheld": 0, "restarted": 0, "purged": 0, "failing_since_us": None, "losses": [],
}  # fmt: skip
_QUOTA = {
    "tenant": "acme", "group": "acme-family", "guaranteed": "20%", "cap": "60%", "held_blocks": 4096,
    "charged_blocks": 4100,
}  # fmt: skip
_CAPACITY = {
    "worker": "gpu-0", "incarnation": _LIFE, "silent": False, "state": "at work", "blocks": 65_536,
    "bytes_per_block": 2_097_152, "by_state": {"clean": 61_000, "active": 4_536},
}  # fmt: skip

ScanRow = shown(Scan, "Scan", _SCAN)
Scans = page_of(ScanRow, "Scans")
Found = shown(OrphanFinding, "ScanFinding", _FINDING)
Sink = shown(SinkStatus, "Sink", _SINK)
Clock = shown(
    ClockState,
    "Clock",
    {
        "now_us": 1_780_000_000_000_000,
        "wall_us": 1_780_000_000_000_000,
        "in_doubt": False,
        "ahead_us": 0,
        "behind_us": 0,
    },
)


class ScanDetail(Model):
    """One scan with its findings."""

    model_config = example({"scan": _SCAN, "findings": [_FINDING]})

    scan: ScanRow  # type: ignore[valid-type]
    findings: list[Found]  # type: ignore[valid-type]


class SinkPage(Model):
    """Every sink that the settings name."""

    model_config = example({"items": [_SINK], "next": None})

    items: list[Sink]  # type: ignore[valid-type]
    next: str | None


class SinkReason(Model):
    """Why a sink is changed; the reason goes on record."""

    model_config = example({"reason": "the collector is down"})

    reason: Annotated[str, Field(max_length=200)] = ""


class ClockReason(Model):
    """Why the machine's clock is right; the reason goes on record."""

    model_config = example({"reason": "compared with time.example over the telephone"})

    reason: Annotated[str, Field(min_length=1, max_length=200)]


class Quota(Model):
    """A tenant's shares of a worker's blocks by the policy in effect, and its blocks on all workers together.

    `held_blocks` is computed from the ledger, and null while a process runs that lost leaves. `charged_blocks` is the
    running workers' last report, without shards, and with blocks that are about to be overwritten. `guaranteed` and
    `cap` are null for a tenant that the policy does not name. They are also null where no policy or more than one is in
    effect, or its document is not known.
    """

    model_config = example(_QUOTA)

    tenant: str
    group: str | None
    guaranteed: str | None
    cap: str | None
    held_blocks: Whole | None
    charged_blocks: Whole


class Quotas(Model):
    """A page of quotas by tenant name; `policies` lists the policies in effect, as `getPolicyInEffect` does.

    `revision` is that of the one policy; 0 where there is none, or several.
    """

    model_config = example({"items": [_QUOTA], "next": None, "revision": 3, "policies": [EFFECTIVE]})

    items: list[Quota]
    next: str | None
    revision: Whole
    policies: list[EffectivePolicyModel]


_SHOWBACK = {
    "tenant": "acme",
    "block_seconds": 86_400.0,
    "blocks_mean": 1.0,
    "own_hit_blocks": 512,
    "taken_hit_blocks": 32,
    "given_hit_blocks": 0,
    "saved_seconds": 4.5,
    "taken_seconds": 0.3,
    "given_seconds": 0.0,
    "routed_requests": 40,
    "routed_tokens": 5120,
    "routed_found_tokens": 3840,
}


class TenantShowback(Model):
    """A tenant's blocks over time and the prefill that reuse avoided; seconds are null where no worker has reported its
    prefill cost.

    `routed_…`: of its requests with a route receipt, prompt tokens, and those found where they went; null: none has.
    """

    model_config = example(_SHOWBACK)

    tenant: str
    block_seconds: float
    blocks_mean: float
    own_hit_blocks: Whole
    taken_hit_blocks: Whole
    given_hit_blocks: Whole
    saved_seconds: float | None
    taken_seconds: float | None
    given_seconds: float | None
    routed_requests: Whole | None
    routed_tokens: Whole | None
    routed_found_tokens: Whole | None


class Showback(Model):
    """Every tenant that held blocks in the period."""

    model_config = example({"since_us": 1_780_000_000_000_000, "until_us": 1_780_086_400_000_000, "items": [_SHOWBACK]})

    since_us: Utc
    until_us: Utc
    items: list[TenantShowback]


_PREFIX = {
    "incarnation": "ab" * 16,
    "residency": 17,
    "tenant": "acme",
    "classification": "internal",
    "blocks": 32,
    "attached_blocks": 640,
    "requests": 20,
    "foreign_requests": 0,
    "saved_seconds": 4.5,
    "last_us": 1_780_000_000_000_000,
}


class PrefixWorth(Model):
    """A request whose blocks later requests reused, and what that saved; never its content."""

    model_config = example(_PREFIX)

    incarnation: str
    residency: Whole
    tenant: str
    classification: str
    blocks: Whole
    attached_blocks: Whole
    requests: Whole
    foreign_requests: Whole
    saved_seconds: float | None
    last_us: Utc


class Prefixes(Model):
    """Prefixes by the work that they saved, the largest first."""

    model_config = example({"since_us": 1_780_000_000_000_000, "until_us": 1_780_086_400_000_000, "items": [_PREFIX]})

    since_us: Utc
    until_us: Utc
    items: list[PrefixWorth]


class WorkerCapacity(Model):
    """A running worker's blocks, by its last report; 0 where it has not reported."""

    model_config = example(_CAPACITY)

    worker: str
    incarnation: str
    silent: bool
    state: WorkerState
    blocks: Whole
    bytes_per_block: Whole
    by_state: dict[str, Any]


class Capacity(Model):
    """A page of running workers, and the blocks of all of them."""

    model_config = example({"items": [_CAPACITY], "next": None, "blocks": 65_536})

    items: list[WorkerCapacity]
    next: str | None
    blocks: Whole
