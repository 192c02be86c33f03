"""Measures of routing from receipts: locality, routed hit length, queue delta, stale-location misses, balance.

    measures = measure(read_routes(connection, period, now_us=now_us).receipts)

1. Every figure is of receipts with the half of who answered. One that no receipt has something to say of is None.
2. *Locality* is the share of prompt tokens that were found where the request went. *Routed hit length* is how many
   tokens a request found there, on average.
3. *Queue delta* of a request: how many requests were at its worker when it came, less the fewest at another worker, as
   each of these said last, within `FRESH_US`. Below 0: it went where least waited. None while no other worker spoke.
4. A *stale-location miss* is a request that found less than the router promised; known only where the router says what
   it promised (`promises`).
5. *Imbalance* is the largest worker's requests over the mean of all workers: 1 is even.
6. `RouteSums` takes receipts one by one and keeps none: its memory follows workers and tenants alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvcustody.audit.evidence.routes.route_receipts import FoundHalf, Receipt
from kvcustody.times import SECOND_US

FRESH_US: Final = 60 * SECOND_US
SCORE_STEPS: Final = 10


class ScoreStep(NamedTuple):
    """Requests whose score was in one tenth of the range from 0 to the largest, and their hits."""

    score_from: float
    requests: int
    prompt_tokens: int
    found_tokens: int


class RouteCounts(NamedTuple):
    """Requests with the answering worker's half: prompt tokens, hits, and kept promises."""

    requests: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    promises: int = 0
    stale_misses: int = 0
    promised_tokens: int = 0
    kept_tokens: int = 0  # of those promised

    def plus(self, half: FoundHalf, promised: int | None) -> RouteCounts:
        """Return the counts with one more request; `promised`: None if no promise was made."""
        kept_tokens = 0 if promised is None else min(half.found_tokens, promised)
        return RouteCounts(
            self.requests + 1,
            self.prompt_tokens + half.prompt_tokens,
            self.found_tokens + half.found_tokens,
            self.promises + (promised is not None),
            self.stale_misses + (promised is not None and kept_tokens < promised),
            self.promised_tokens + (promised or 0),
            self.kept_tokens + kept_tokens,
        )


class RouteSums:
    """Sums of receipts: over all, by worker and by tenant (rule 6)."""

    def __init__(self) -> None:
        self.whole = RouteCounts()
        self.by_worker: dict[str, RouteCounts] = {}
        self.by_tenant: dict[str, RouteCounts] = {}

    def take(self, receipt: Receipt) -> None:
        """Add one receipt."""
        half = receipt.served
        if half is None:
            return
        promised = receipt.promised_tokens
        self.whole = self.whole.plus(half, promised)
        for counts, name in ((self.by_worker, half.worker), (self.by_tenant, receipt.tenant)):
            counts[name] = counts.get(name, _NONE).plus(half, promised)

    @property
    def tenants(self) -> tuple[TenantRoutes, ...]:
        """The sums by tenant, in their order."""
        return tuple(TenantRoutes(name, *self.by_tenant[name][:5]) for name in sorted(self.by_tenant))


_NONE: Final = RouteCounts()


class WorkerRoutes(NamedTuple):
    """One worker: the requests it answered, their hits, and its queue and free blocks at the time."""

    worker: str
    requests: int
    prompt_tokens: int
    found_tokens: int
    promises: int
    stale_misses: int
    queue_mean: float
    queue_last: int
    free_blocks_last: int
    last_us: int

    @property
    def locality(self) -> float | None:
        """Rule 2."""
        return self.found_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def stale_rate(self) -> float | None:
        """Stale-location misses as a share of the requests with a promise."""
        return self.stale_misses / self.promises if self.promises else None


class TenantRoutes(NamedTuple):
    """One tenant: its requests with a receipt, and their hits at the chosen worker."""

    tenant: str
    requests: int
    prompt_tokens: int
    found_tokens: int
    promises: int
    stale_misses: int

    @property
    def locality(self) -> float | None:
        """Rule 2."""
        return self.found_tokens / self.prompt_tokens if self.prompt_tokens else None


class RouteMeasures(NamedTuple):
    """All measures; see the rules of this module."""

    requests: int
    prompt_tokens: int
    found_tokens: int
    promises: int
    promised_tokens: int
    kept_tokens: int  # of those promised
    stale_misses: int
    stale_tokens: int
    other_epochs: int  # requests whose door and worker knew of other erasures
    queue_deltas: int
    queue_delta_mean: float | None
    queue_delta_most: int | None
    imbalance: float | None
    workers: tuple[WorkerRoutes, ...]
    tenants: tuple[TenantRoutes, ...]
    scores: tuple[ScoreStep, ...]

    @property
    def locality(self) -> float | None:
        """Rule 2."""
        return self.found_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def hit_length(self) -> float | None:
        """Rule 2, in tokens."""
        return self.found_tokens / self.requests if self.requests else None

    @property
    def stale_rate(self) -> float | None:
        """Stale-location misses as a share of the requests with a promise."""
        return self.stale_misses / self.promises if self.promises else None


class _Served(NamedTuple):
    receipt: Receipt
    half: FoundHalf


def measure(receipts: Iterable[Receipt]) -> RouteMeasures:
    """Return the measures of these receipts."""
    served = [_Served(receipt, half) for receipt in receipts if (half := receipt.served) is not None]
    served.sort(key=lambda one: (one.half.at_us, one.receipt.receipt))
    sums = RouteSums()
    by_worker = defaultdict(list)
    for one in served:
        sums.take(one.receipt)
        by_worker[one.half.worker].append(one.half)
    whole, deltas = sums.whole, _queue_deltas(served)
    busiest = max((counts.requests for counts in sums.by_worker.values()), default=0)
    return RouteMeasures(
        whole.requests,
        whole.prompt_tokens,
        whole.found_tokens,
        whole.promises,
        whole.promised_tokens,
        whole.kept_tokens,
        whole.stale_misses,
        whole.promised_tokens - whole.kept_tokens,
        sum(not one.half.agrees for one in served),
        len(deltas),
        sum(deltas) / len(deltas) if deltas else None,
        max(deltas, default=None),
        busiest * len(by_worker) / whole.requests if len(by_worker) > 1 else None,
        tuple(_worker(sums.by_worker[name], by_worker[name]) for name in sorted(by_worker)),
        sums.tenants,
        _scores(served),
    )


def measure_tenants(receipts: Iterable[Receipt]) -> tuple[TenantRoutes, ...]:
    """Return only the measures by tenant, in their order; keeps no receipt."""
    sums = RouteSums()
    for receipt in receipts:
        sums.take(receipt)
    return sums.tenants


def _queue_deltas(served: Sequence[_Served]) -> list[int]:
    """Rule 3, in the order of time."""
    last: dict[str, FoundHalf] = {}
    deltas = []
    for _, half in served:
        others = [
            other.queue
            for worker, other in last.items()
            if worker != half.worker and half.at_us - other.at_us <= FRESH_US
        ]
        if others:
            deltas.append(half.queue - min(others))
        last[half.worker] = half
    return deltas


def _worker(counts: RouteCounts, halves: Sequence[FoundHalf]) -> WorkerRoutes:
    """`halves`: in the order of time."""
    last = halves[-1]
    queue = sum(half.queue for half in halves) / len(halves)
    return WorkerRoutes(last.worker, *counts[:5], queue, last.queue, last.free_blocks, last.at_us)


def _scores(served: Sequence[_Served]) -> tuple[ScoreStep, ...]:
    """Decisions by score, in tenths of the largest; none where no router told one."""
    scored = [
        (one.receipt.sent.score, one.half)
        for one in served
        if one.receipt.sent is not None and one.receipt.sent.score >= 0
    ]
    largest = max((score for score, _ in scored), default=0)
    steps: dict[int, list[FoundHalf]] = defaultdict(list)
    for score, half in scored:
        steps[min(SCORE_STEPS - 1, score * SCORE_STEPS // largest) if largest else 0].append(half)
    return tuple(
        ScoreStep(
            step * largest / SCORE_STEPS / 1_000_000,
            len(halves),
            sum(half.prompt_tokens for half in halves),
            sum(half.found_tokens for half in halves),
        )
        for step, halves in sorted(steps.items())
    )
