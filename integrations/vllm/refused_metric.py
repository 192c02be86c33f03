"""What a door refused, for vLLM's own `/metrics`: `kvcustody_door_refused_total`, by reason.

vLLM's API server serves what its process has registered with `prometheus_client`, and that of its other processes. A
reason is one of few, so it says what was asked, and nothing of who asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from kvcustody.governance.observability.attempts import REASONS


def counted(note: Callable[[str, str], None], registry: CollectorRegistry = REGISTRY) -> Callable[[str, str], None]:
    """`note`, and a counter beside it; every reason is there from the start, at zero."""
    by_reason = {reason: _counter(registry).labels(reason) for reason in sorted(REASONS)}

    def refused(reason: str, source: str) -> None:
        note(reason, source)
        by_reason[reason].inc()

    return refused


@cache
def _counter(registry: CollectorRegistry) -> Counter:
    return Counter(
        "kvcustody_door_refused", "Requests that the door refused, by reason.", ("reason",), registry=registry
    )
