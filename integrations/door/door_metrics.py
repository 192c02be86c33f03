"""The door's metrics: forwarded requests, refusals by status, clipped hints, epochs, and the added latency."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.05, 0.1)


class DoorMetrics:
    """Counters in a registry of their own, which `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._passed = Counter("kvcustody_door_passed", "Requests that went on to the router.", registry=self.registry)
        self._refused = Counter(
            "kvcustody_door_refused", "Requests refused, by status.", ("status",), registry=self.registry
        )
        self._left = Counter(
            "kvcustody_door_left",
            "Requests whose client left before the answer ended.",
            registry=self.registry,
        )
        self._clipped = Counter(
            "kvcustody_door_hints_clipped",
            "Hints of clients that went on with less than they asked for, by hint.",
            ("hint",),
            registry=self.registry,
        )
        self._past_lease = Counter(
            "kvcustody_door_past_lease",
            "Requests that found nothing, because the door's lease on erase epochs was over.",
            registry=self.registry,
        )
        self._misplaced = Counter(
            "kvcustody_door_misplaced",
            "Requests that went nowhere, because policy lets no worker here serve them, or none is known yet; by code.",
            ("code",),
            registry=self.registry,
        )
        self._receipts = Counter(
            "kvcustody_door_receipts",
            "Route receipts of the door, written or lost.",
            ("outcome",),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kvcustody_door_seconds",
            "Seconds that the door took for one message of a request.",
            ("message",),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def show_epochs(self, version: Callable[[], float], age_seconds: Callable[[], float]) -> None:
        """Set the version of the door's erase epochs, and the seconds since it was last confirmed."""
        shown = (
            ("version", "Newest erase epoch that the door knows.", version),
            ("age_seconds", "Seconds since the control plane last confirmed it; -1: never.", age_seconds),
        )
        for name, said, read in shown:
            gauge = Gauge(f"kvcustody_door_epochs_{name}", said, registry=self.registry)
            gauge.set_function(read)

    def passed(self) -> None:
        """Count a request that was forwarded to the router."""
        self._passed.inc()

    def refused(self, status: int) -> None:
        """Count a request that was refused with this status."""
        self._refused.labels(str(status)).inc()

    def left(self) -> None:
        """Count a client that left before its answer ended."""
        self._left.inc()

    def clipped(self, hint: str) -> None:
        """Count a hint that was clipped."""
        self._clipped.labels(hint).inc()

    def misplaced(self, code: str) -> None:
        """Count a request that no worker may serve."""
        self._misplaced.labels(code).inc()

    def past_lease(self) -> None:
        """Count a request that came after the door's lease on erase epochs had expired."""
        self._past_lease.inc()

    def receipt(self, outcome: str) -> None:
        """Count the door's half of a route receipt, `written` or `lost`."""
        self._receipts.labels(outcome).inc()

    def took(self, message: str, seconds: float) -> None:
        """Record the time that one message of a request took."""
        self._seconds.labels(message or "other").observe(seconds)
