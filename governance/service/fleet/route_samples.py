"""What route receipts of the last minutes measure, as samples: the five measures of routing, and what is wrong.

Receipts of the last `WINDOW_US`, and no more than the newest `HALVES_MAX`, are read at most every `FRESH_SECONDS`.
What nobody can know is no sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sqlalchemy import Connection

from kvcustody.audit.evidence.routes.route_measures import measure
from kvcustody.audit.evidence.routes.route_receipts import RoutePeriod, by_problem, read_routes
from kvcustody.governance.observability.metrics import Sample
from kvcustody.times import SECOND_US

FRESH_SECONDS: Final = 30.0
WINDOW_US: Final = 600 * SECOND_US
HALVES_MAX: Final = 20_000


def route_samples(connection: Connection, now_us: int) -> Iterator[Sample]:
    """The samples; none where no request of that time has a receipt."""
    period = RoutePeriod(now_us - WINDOW_US, now_us + 1)
    joined = read_routes(connection, period, now_us=now_us, halves_max=HALVES_MAX)
    if not joined.receipts:
        return
    measures = measure(joined.receipts)
    yield "route_receipts", (), len(joined.receipts)
    yield "route_receipts_awaited", (), joined.awaited
    for problem, number in by_problem(joined.findings).items():
        yield "route_findings", (problem,), number
    if measures.queue_delta_mean is not None:
        yield "route_queue_delta", (), measures.queue_delta_mean
    if measures.imbalance is not None:
        yield "route_imbalance", (), measures.imbalance
    if measures.promises:
        yield "route_promised_tokens", (), measures.promised_tokens
        yield "route_promised_found_tokens", (), measures.kept_tokens
    for worker in measures.workers:
        labels = (worker.worker,)
        yield "route_requests", labels, worker.requests
        if worker.locality is not None:
            yield "route_locality_ratio", labels, worker.locality
        yield "route_hit_tokens_mean", labels, worker.found_tokens / worker.requests
        yield "route_queue_mean", labels, worker.queue_mean
        yield "route_free_blocks", labels, worker.free_blocks_last
        if worker.promises:
            yield "route_stale_misses", labels, worker.stale_misses
