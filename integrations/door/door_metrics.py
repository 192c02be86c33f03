"""What a door counts: requests passed on, refusals by status, and the time that it adds to each message."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.05, 0.1)


class DoorMetrics:
    """Counters in a registry of their own, which `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._passed = Counter(
            "kvcustody_door_passed", "Requests that went on to the router.", registry=self.registry
        )
        self._refused = Counter(
            "kvcustody_door_refused", "Requests refused, by status.", ("status",), registry=self.registry
        )
        self._left = Counter(
            "kvcustody_door_left",
            "Requests whose client left before the answer ended.",
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kvcustody_door_seconds",
            "Seconds that the door took for one message of a request.",
            ("message",),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def passed(self) -> None:
        """One request went on to the router."""
        self._passed.inc()

    def refused(self, status: int) -> None:
        """One request was refused with this status."""
        self._refused.labels(str(status)).inc()

    def left(self) -> None:
        """One client left before its answer ended."""
        self._left.inc()

    def took(self, message: str, seconds: float) -> None:
        """One message of a request took so long."""
        self._seconds.labels(message or "other").observe(seconds)
