"""What route receipts measure of routing: locality, routed hit length, queue delta, stale-location misses, balance.

    measures = measure(read_routes(connection, period, now_us=now_us).receipts)

1. Every figure is of receipts with the half of who answered. One that no receipt has something to say of is None.
2. *Locality* is the share of prompt tokens that were found where the request went. *Routed hit length* is how many
   tokens a request found there, on average.
3. *Queue delta* of a request: how many requests were at its worker when it came, less the fewest at another worker, as
   each of these said last, within `FRESH_US`. Below 0: it went where least waited. None while no other worker spoke.
4. A *stale-location miss* is a request that found less than the router promised; known only where the router says what
   it promised (`promises`).
5. *Imbalance* is the largest worker's requests over the mean of all workers: 1 is even.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvcustody.audit.evidence.routes.route_receipts import FoundHalf, Receipt
from kvcustody.times import SECOND_US

FRESH_US: Final = 60 * SECOND_US
SCORE_STEPS: Final = 10


class ScoreStep(NamedTuple):
    """Requests whose score was in one tenth of the range from 0 to the largest, and what they found."""

    score_from: float
    requests: int
    prompt_tokens: int
    found_tokens: int


class WorkerRoutes(NamedTuple):
    """One worker: requests that it answered, what they found, its queue and free blocks as they came."""

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
        """Stale-location misses of those requests that something was promised of."""
        return self.stale_misses / self.promises if self.promises else None


class TenantRoutes(NamedTuple):
    """One tenant: its requests with a receipt, and what they found where they went."""

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
    """All of it; see the rules of this module."""

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
        """Stale-location misses of those requests that something was promised of."""
        return self.stale_misses / self.promises if self.promises else None


class _Served(NamedTuple):
    receipt: Receipt
    half: FoundHalf

    @property
    def promised(self) -> int | None:
        return self.receipt.promised_tokens

    @property
    def is_stale(self) -> bool:
        return self.promised is not None and self.half.found_tokens < self.promised


def measure(receipts: Iterable[Receipt]) -> RouteMeasures:
    """What these receipts measure."""
    served = [_Served(receipt, half) for receipt in receipts if (half := receipt.served) is not None]
    served.sort(key=lambda one: (one.half.at_us, one.receipt.receipt))
    promised = [one for one in served if one.promised is not None]
    kept = [(one.promised or 0, min(one.half.found_tokens, one.promised or 0)) for one in promised]
    deltas = _queue_deltas(served)
    by_worker, by_tenant = defaultdict(list), defaultdict(list)
    for one in served:
        by_worker[one.half.worker].append(one)
        by_tenant[one.receipt.tenant].append(one)
    counts = Counter({worker: len(of_it) for worker, of_it in by_worker.items()})
    return RouteMeasures(
        len(served),
        sum(one.half.prompt_tokens for one in served),
        sum(one.half.found_tokens for one in served),
        len(promised),
        sum(said for said, _ in kept),
        sum(was for _, was in kept),
        sum(one.is_stale for one in promised),
        sum(said - was for said, was in kept),
        sum(not one.half.agrees for one in served),
        len(deltas),
        sum(deltas) / len(deltas) if deltas else None,
        max(deltas, default=None),
        max(counts.values()) * len(counts) / counts.total() if len(counts) > 1 else None,
        tuple(_worker(worker, of_it) for worker, of_it in sorted(by_worker.items())),
        tuple(_tenant(tenant, of_it) for tenant, of_it in sorted(by_tenant.items())),
        _scores(served),
    )


def measure_tenants(receipts: Iterable[Receipt]) -> tuple[TenantRoutes, ...]:
    """The same by tenant alone, in their order; keeps no receipt."""
    tenants: dict[str, TenantRoutes] = {}
    for receipt in receipts:
        if (half := receipt.served) is not None:
            one = _tenant(receipt.tenant, [_Served(receipt, half)])
            before = tenants.get(one.tenant, TenantRoutes(one.tenant, *(0,) * 5))
            sums = (a + b for a, b in zip(before[1:], one[1:], strict=True))
            tenants[one.tenant] = TenantRoutes(one.tenant, *sums)
    return tuple(tenants[name] for name in sorted(tenants))


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


def _worker(worker: str, served: Sequence[_Served]) -> WorkerRoutes:
    last = served[-1].half
    return WorkerRoutes(
        worker,
        len(served),
        sum(one.half.prompt_tokens for one in served),
        sum(one.half.found_tokens for one in served),
        sum(one.promised is not None for one in served),
        sum(one.is_stale for one in served),
        sum(one.half.queue for one in served) / len(served),
        last.queue,
        last.free_blocks,
        last.at_us,
    )


def _tenant(tenant: str, served: Sequence[_Served]) -> TenantRoutes:
    return TenantRoutes(
        tenant,
        len(served),
        sum(one.half.prompt_tokens for one in served),
        sum(one.half.found_tokens for one in served),
        sum(one.promised is not None for one in served),
        sum(one.is_stale for one in served),
    )


def _scores(served: Sequence[_Served]) -> tuple[ScoreStep, ...]:
    """Decisions by score, in tenths of the largest; none where no router told one."""
    said = [
        (one.receipt.sent.score, one.half)
        for one in served
        if one.receipt.sent is not None and one.receipt.sent.score >= 0
    ]
    largest = max((score for score, _ in said), default=0)
    steps: dict[int, list[FoundHalf]] = defaultdict(list)
    for score, half in said:
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
