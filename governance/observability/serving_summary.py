"""A worker's measures in one line, for a terminal and a page, computed from its last status.

    summary(status)                       # since the worker began
    summary(status, earlier)              # between two of its statuses

1. A quantile is a bucket's bound: at most this. None where nothing was counted.
2. Counters of a worker that began anew between the two statuses are taken from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvcustody.governance.observability.histogram import INFINITE

Status = Mapping[str, float]
_NOTHING: Status = {}


class SeenWorker(NamedTuple):
    """One worker's last status; `tenants` is by measure, then by tenant."""

    worker: str
    age_seconds: int
    silent: bool
    status: Status
    charged: Mapping[str, int]
    tenants: Mapping[str, Mapping[str, float]]


class ServingSummary(NamedTuple):
    """Shares are fractions, times are seconds; None without a value."""

    running: int
    usage: float | None
    hit_share: float | None  # of prompt tokens
    first_token_hit: float | None  # median
    first_token_miss: float | None
    queue: float | None  # nine in ten waited at most
    avoided_seconds: float
    evicted_blocks: int
    recomputed_blocks: int
    advised_blocks: int | None
    waste: float | None  # of the room in running requests' blocks
    stale_blocks: int
    cancel: float | None  # nine in ten
    without_kinds: int  # requests that said no kind of content, where the policy orders eviction by kind


class TierServing(NamedTuple):
    """One tier of a worker: its contents, and the time of transfers; None without a value."""

    tier: str
    copies: int
    used_bytes: int
    capacity_bytes: int | None
    waiting: int
    stored_blocks: int
    restored_blocks: int
    store_seconds: float
    restore_seconds: float
    refused: int
    left_alone: int
    prediction_error: float | None

    def busy_share(self, wall_seconds: float) -> float | None:
        """The share of serving time that transfers took; None where no time has passed."""
        return (self.store_seconds + self.restore_seconds) / wall_seconds if wall_seconds > 0 else None


def tiers_at_work(statuses: Iterable[Status]) -> frozenset[str] | None:
    """Return the tiers that any of these workers has; None without a worker, because nothing is known."""
    found = [{one.tier for one in tier_servings(status)} for status in statuses]
    return frozenset().union(*found) if found else None


def tier_servings(status: Status, earlier: Status = _NOTHING) -> list[TierServing]:
    """The tiers of one worker, in name order."""
    before = earlier if _grew(status, earlier) else _NOTHING
    start = "tier_copies."
    names = sorted(name.removeprefix(start) for name in status if name.startswith(start))

    def said(name: str, tier: str) -> float:
        return status.get(f"tier_{name}.{tier}", 0)

    def grown(name: str, tier: str) -> float:
        return said(name, tier) - before.get(f"tier_{name}.{tier}", 0)

    return [
        TierServing(
            tier,
            int(said("copies", tier)),
            int(said("used_bytes", tier)),
            int(said("capacity_bytes", tier)) or None,
            int(said("waiting", tier)),
            int(grown("stored_blocks", tier)),
            int(grown("restored_blocks", tier)),
            grown("store_seconds", tier),
            grown("restore_seconds", tier),
            int(grown("refused", tier)),
            int(grown("left_alone", tier)),
            status.get(f"tier_prediction_error.{tier}"),
        )
        for tier in names
    ]


def summary(status: Status, earlier: Status = _NOTHING) -> ServingSummary:
    """The measures of one worker."""
    before = earlier if _grew(status, earlier) else _NOTHING

    def grown(name: str) -> float:
        return status.get(name, 0) - before.get(name, 0)

    def quantile(name: str, share: float) -> float | None:
        start = f"{name}.le."
        total = grown(start + INFINITE)
        if not total:
            return None
        bounds = [one.removeprefix(start) for one in status if one.startswith(start)]
        for bound in sorted((float(one), one) for one in bounds):
            if grown(start + bound[1]) >= share * total:
                return bound[0]
        return float(INFINITE)

    prompts = grown("prompt_tokens")
    return ServingSummary(
        int(status.get("running", 0)),
        status.get("usage_ratio"),
        grown("hit_tokens") / prompts if prompts and "hit_tokens" in status else None,
        quantile("ttft.hit", 0.5),
        quantile("ttft.miss", 0.5),
        quantile("queue", 0.9),
        grown("prefill_avoided_seconds"),
        int(sum(grown(name) for name in status if name.startswith("evicted."))),
        int(grown("recomputed")),
        int(status["advised_blocks"]) if "advised_blocks" in status else None,
        status.get("fragmentation"),
        int(grown("hit_blocks.stale")),
        quantile("cancel", 0.9),
        int(grown("without_kinds")),
    )


def share_text(value: float | None) -> str:
    """Return a share as text."""
    return "–" if value is None else f"{value:.0%}"


def seconds_text(value: float | None) -> str:
    """Return a time as text."""
    if value is None:
        return "–"
    if value == float(INFINITE):
        return "over a minute"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:,.1f} s"


def _grew(status: Status, earlier: Status) -> bool:
    return status.get("allocated", 0) >= earlier.get("allocated", 0)
