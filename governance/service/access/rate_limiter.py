"""Rate limits by name: one token bucket each."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvcustody.governance.service.problem_details import ProblemError


class RateLimiter:
    """Buckets of `burst` tokens by name, that fill with `per_second`; thread-safe.

    A bucket depends on its own name's requests alone: nobody learns of others by being told to wait. Names are bounded;
    a bucket that is full again is forgotten first.
    """

    def __init__(
        self,
        per_second: float,
        burst: int,
        *,
        names_max: int = 65_536,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._names_max = names_max
        self._seconds = seconds
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when

    def take(self, name: str) -> float:
        """Take a token and return 0.0, or return the seconds until one is available."""
        with self._lock:
            tokens, now = self._tokens(name), self._seconds()
            if tokens < 1.0:
                return (1.0 - tokens) / self._per_second
            self._buckets[name] = (tokens - 1.0, now)
            self._buckets.move_to_end(name)
            while len(self._buckets) > self._names_max:
                self._buckets.popitem(last=False)
            return 0.0

    def wait(self, name: str) -> float:
        """Return the seconds until a token is available; takes none."""
        with self._lock:
            tokens = self._tokens(name)
        return 0.0 if tokens >= 1.0 else (1.0 - tokens) / self._per_second

    def left(self, name: str) -> int:
        """Return the number of whole tokens left."""
        with self._lock:
            return int(self._tokens(name))

    def _tokens(self, name: str) -> float:
        known = self._buckets.get(name)
        if known is None:
            return self._burst
        return min(self._burst, known[0] + (self._seconds() - known[1]) * self._per_second)


def too_many(wait_seconds: float) -> ProblemError:
    """Return the refusal for a rate."""
    return ProblemError("too-many-requests", headers={"Retry-After": str(max(1, round(wait_seconds + 0.5)))})
