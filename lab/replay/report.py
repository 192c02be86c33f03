"""The figures of a replay, per tenant and for the pool, for a terminal, JSON or a page.

1. Nothing here is estimated: token and block figures are counted, times are measured, identities compare two sources.
2. A figure that was not observed is `None`, never zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvcustody.governance.tiers.transfer_rates import TierUse
from kvcustody.lab.replay.answers import ReplayAnswers
from kvcustody.lab.replay.traces.model import Key


@dataclass(slots=True)
class TenantResult:
    """One tenant's share of a replay. Counts are requests, tokens or blocks, as the names say."""

    tenant: str
    requests: int = 0
    refused: int = 0
    deferred: int = 0
    preempted: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    hit_requests: int = 0
    hit_tokens: int = 0
    shared_hit_tokens: int = 0
    first_requests: int = 0
    first_request_hits: int = 0
    first_request_hit_tokens: int = 0
    recomputed_blocks: int = 0
    room_blocks: int = 0
    thrashing_samples: int = 0
    denials: Counter[str] = field(default_factory=Counter)
    deferrals: Counter[str] = field(default_factory=Counter)
    ended_blocks: Counter[str] = field(default_factory=Counter)
    scrubbed_blocks: int = 0

    @property
    def prefill_avoided(self) -> float:
        """Share of the prompt tokens whose prefill was not needed."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


class ReplayIdentity(NamedTuple):
    """A conservation identity: two counts from independent sources that must agree."""

    name: str
    left: int
    right: int
    sources: str

    @property
    def holds(self) -> bool:
        """Whether the two agree."""
        return self.left == self.right


ORPHANS = "orphans found by a scan = 0"


class Spread(NamedTuple):
    """Percentiles of a time in microseconds, weighted by blocks; `None` where nothing was observed."""

    blocks: int
    p50_us: int | None
    p99_us: int | None
    max_us: int | None


class Sample(NamedTuple):
    """The pool at one moment of the replay's clock."""

    at_us: int
    active: int
    cached: int
    leaving: int  # fenced, dirty or quarantined
    hit_tokens: int
    input_tokens: int
    used_tokens: int = 0  # of running requests, and the room in their blocks
    room_tokens: int = 0


class ReplayCoverage(NamedTuple):
    """Deletion coverage as the ledger proves it, in units of (block, generation, shard), and bytes by level."""

    due: int = 0
    in_time: int = 0
    late: int = 0
    failed: int = 0
    missing: int = 0
    unproven: int = 0
    overdue: int = 0
    disputed: int = 0
    reread_blocks: int = 0
    bytes_by_level: tuple[tuple[str, int], ...] = ()

    @property
    def share(self) -> float | None:
        """The share of due custody that ended in time with evidence."""
        return self.in_time / self.due if self.due else None


@dataclass(slots=True)
class ReplayReport:
    """Everything that one replay prints, stores as JSON and draws."""

    title: str
    origin: str
    settings: dict[str, str]
    tenants: list[TenantResult]
    samples: list[Sample]
    coverage: ReplayCoverage
    identities: list[ReplayIdentity]
    scrub_lag: Spread
    retention_age: dict[str, Spread]
    age_histogram: list[int]
    lag_histogram: list[int]
    residue_checked_blocks: int
    residue_bytes: int
    read_tokens: int
    wrong_tokens: int
    drift_blocks: int
    expired_residencies: int
    evicted_blocks: dict[str, int]
    status: Mapping[str, float]  # as a worker says it, by the keys of `metrics.MEASURES`
    charged: Mapping[str, int]
    lineages: Counter[tuple[str, Key]]  # tokens found, by tenant and what the trace calls a lineage
    seconds: float
    virtual_seconds: float
    error: BaseException | None = None
    tiers: list[TierUse] = field(default_factory=list)
    remarks: tuple[str, ...] = ()
    answers: ReplayAnswers | None = None

    @property
    def shown_tenants(self) -> list[TenantResult]:
        """The tenants that sent something."""
        return [row for row in self.tenants if row.requests]

    @property
    def stopped(self) -> str | None:
        """The reason why the replay ended early, or None."""
        if self.error is None:
            return None
        return "interrupted" if isinstance(self.error, KeyboardInterrupt) else str(self.error)

    @property
    def waste(self) -> float | None:
        """The share of running requests' blocks that was empty, over all samples."""
        room = sum(sample.room_tokens for sample in self.samples)
        return 1 - sum(sample.used_tokens for sample in self.samples) / room if room else None

    def advised_blocks(self, row: TenantResult) -> int:
        """Return the blocks that a tenant would have needed to keep everything that it requested again; 0 for
        nothing.
        """
        advised = int(self.status.get("advised_blocks", 0))
        beyond = advised - int(self.status["blocks.total"]) if advised else 0
        return row.room_blocks + beyond if row.recomputed_blocks and beyond else 0

    @property
    def totals(self) -> TenantResult:
        """The totals of all tenants."""
        total = TenantResult("all")
        for row in self.tenants:
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(row, name))
            total.denials.update(row.denials)
            total.deferrals.update(row.deferrals)
            total.ended_blocks.update(row.ended_blocks)
        return total

    def as_json(self) -> dict[str, Any]:
        """Return the report for `--json`: the same figures, without charts."""
        return {
            "title": self.title,
            "origin": self.origin,
            "settings": self.settings,
            "stopped": self.stopped,
            "seconds": round(self.seconds, 3),
            "virtual_seconds": round(self.virtual_seconds, 3),
            "tenants": [
                _tenant_json(row)
                | {
                    "room_blocks": row.room_blocks,
                    "advised_blocks": self.advised_blocks(row),
                    "thrashing": row.thrashing_samples / len(self.samples) if self.samples else None,
                }
                for row in self.tenants
            ],
            "totals": _tenant_json(self.totals),
            "pressure": {
                "advised_blocks": int(self.status.get("advised_blocks", 0)),
                "stalls": int(self.status.get("stalled", 0)),
                "queue_seconds": self.status.get("queue.sum", 0.0),
                "clean_waits": int(self.status.get("clean_waits", 0)),
                "fragmentation": self.waste,
                "findings": pressure_findings(self),
            },
            "coverage": {
                **self.coverage._asdict(),
                "bytes_by_level": dict(self.coverage.bytes_by_level),
                "share": self.coverage.share,
            },
            "identities": [{**row._asdict(), "holds": row.holds} for row in self.identities],
            "scrub_lag": {**self.scrub_lag._asdict(), "histogram": self.lag_histogram},
            "retention_age": {name: spread._asdict() for name, spread in self.retention_age.items()},
            "residue": {"blocks_checked": self.residue_checked_blocks, "nonzero_bytes": self.residue_bytes},
            "found": {"tokens_read_back": self.read_tokens, "wrong_tokens": self.wrong_tokens},
            "drift_blocks": self.drift_blocks,
            "expired_residencies": self.expired_residencies,
            "evicted_blocks": self.evicted_blocks,
            "tiers": [use._asdict() for use in self.tiers],
            "remarks": list(self.remarks),
            "answers": None if self.answers is None else self.answers.as_json(),
        }


_SUMMED = (
    "requests",
    "refused",
    "deferred",
    "preempted",
    "input_tokens",
    "output_tokens",
    "hit_requests",
    "hit_tokens",
    "shared_hit_tokens",
    "first_requests",
    "first_request_hits",
    "first_request_hit_tokens",
    "recomputed_blocks",
    "scrubbed_blocks",
)


def _tenant_json(row: TenantResult) -> dict[str, Any]:
    return {
        "tenant": row.tenant,
        **{name: getattr(row, name) for name in _SUMMED},
        "prefill_avoided": round(row.prefill_avoided, 6),
        "denials": dict(sorted(row.denials.items())),
        "deferrals": dict(sorted(row.deferrals.items())),
        "ended_blocks": dict(sorted(row.ended_blocks.items())),
    }


def pressure_findings(report: ReplayReport) -> list[str]:
    """Return the problems of a pool of this size: thrash by tenant, requests without room, unused room."""
    findings = []
    pool = int(report.status.get("blocks.total", 0))
    for row in report.tenants:
        if row.thrashing_samples:
            needed = report.advised_blocks(row)
            findings.append(
                f"thrash: {row.tenant} computed {row.recomputed_blocks:,} blocks again after they had been evicted, "
                f"and thrashed in {row.thrashing_samples} of {len(report.samples)} looks; it may have "
                f"{row.room_blocks:,} of {pool:,} blocks, and {needed:,} would have kept them: "
                f"a pool of {-(-needed * pool // max(1, row.room_blocks)):,} under this policy"
            )
    total = report.totals
    effects = [f"{count:,} requests waited ({reason})" for reason, count in sorted(total.deferrals.items())]
    queued = report.status.get("queue.sum", 0.0)
    effects += [f"{queued:,.1f} s in the queue together"] if effects and queued else []
    effects += [f"{total.deferred:,} given up"] if total.deferred else []
    effects += [f"{total.preempted:,} preempted"] if total.preempted else []
    if effects:
        findings.append("out of memory: " + ", ".join(effects))
    if report.waste is not None and report.waste >= _MUCH_WASTE:
        findings.append(
            f"fragmentation: {report.waste:.0%} of the room in running requests' blocks stood empty; "
            "smaller blocks suit such short requests"
        )
    return findings


_MUCH_WASTE = 0.5


class Weighted:
    """Values in microseconds, each with a weight, as percentiles and fixed-bin histograms."""

    __slots__ = ("_values", "_weights")

    def __init__(self) -> None:
        self._values: list[int] = []
        self._weights: list[int] = []

    def add(self, value_us: int, weight: int) -> None:
        """Observe `value_us` for `weight` blocks."""
        self._values.append(value_us)
        self._weights.append(weight)

    def spread(self) -> Spread:
        """Return p50, p99 and maximum by the nearest-rank rule."""
        if not self._values:
            return Spread(0, None, None, None)
        values, weights = np.array(self._values), np.array(self._weights)
        order = np.argsort(values)
        rank = np.cumsum(weights[order])
        total = int(rank[-1])
        p50, p99 = (int(values[order][np.searchsorted(rank, share * total)]) for share in (0.5, 0.99))
        return Spread(total, p50, p99, int(values.max()))

    def histogram(self, edges_us: list[int]) -> list[int]:
        """Return the counts of blocks in (-inf, e0], (e0, e1], ..., (eN, inf)."""
        counts = [0] * (len(edges_us) + 1)
        for index, weight in zip(np.searchsorted(edges_us, self._values).tolist(), self._weights, strict=True):
            counts[index] += weight
        return counts
