"""Refused requests (no proven identity, no admitted tenant, not served by a door): counted by reason, and recorded as
sums.

1. Noting one costs a look-up and an addition, under a lock, and decides nothing.
2. What is noted within `WINDOW_SECONDS` is one event a reason and source, of at most `SOURCES_MAX` sources a reason:
   those beyond are counted together as `others`. So a flood writes little, and nothing of it is lost from the sums.
3. A source is a network or a tenant's name, never an address, a credential or anything that one held.
4. What cannot be recorded waits in the same sums, under the same bounds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from kvcustody.audit.kinds import AttemptsRefused, Event
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.logger import get_logger

REASONS = frozenset(
    {"missing", "invalid", "malformed", "incomplete", "other-key", "forged", "expired", "future-dated"}
    | {"before-start", "replayed", "memory-full", "unknown-tenant", "id-in-use", "misplaced"}
    | {"not-served", "not-found", "other-group"}
)
WINDOW_SECONDS = 60
SOURCES_MAX = 32
OTHERS = "others"
_NEVER_US = 1 << 62
_PREFIX_BITS = {4: 24, 6: 48}
_NOBODY = 401
_OF_STATUS = {403: "not-served", 404: "not-found"}
_log = get_logger(__name__)


class Attempted(NamedTuple):
    """The number of refusals of one source for one reason, since a boot time."""

    reason: str
    source: str
    attempts: int
    from_us: int


class Attempts:
    """The refused attempts at one place; thread-safe."""

    def __init__(self, place: str, clock: Clock) -> None:
        self._place = place
        self._clock = clock
        self._lock = threading.Lock()
        self._window: dict[tuple[str, str], list[int]] = {}  # attempts, and the first one's moment
        self._sources: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()  # by reason, since the start
        self.due_us = _NEVER_US  # when the window ends

    def note(self, reason: str, source: str = "") -> None:
        """Count a refusal."""
        assert reason in REASONS, reason
        now_us = self._clock.now_us()
        with self._lock:
            self.totals[reason] += 1
            self._add(Attempted(reason, source, 1, now_us))
            self.due_us = min(self.due_us, now_us + WINDOW_SECONDS * MICROSECONDS)

    def take(self) -> list[Attempted]:
        """Return the window's counts, and begin a new window."""
        with self._lock:
            found = [Attempted(*key, *entry) for key, entry in sorted(self._window.items())]
            self._window.clear()
            self._sources.clear()
            self.due_us = _NEVER_US
        return found

    def next_due_us(self) -> int | None:
        """When the window ends, for a timer; None while it is empty."""
        return self.due_us if self.due_us < _NEVER_US else None

    def give_back(self, taken: Iterable[Attempted]) -> None:
        """Put counts that could not be recorded into the open window (rule 4)."""
        with self._lock:
            for entry in taken:
                self._add(entry)
            self.due_us = min(self.due_us, self._clock.now_us() + WINDOW_SECONDS * MICROSECONDS)

    def events(self) -> list[Event]:
        """Return the events of the window."""
        return events_of(self._place, self.take(), self._clock.now_us())

    def _add(self, attempted: Attempted) -> None:
        key = (attempted.reason, attempted.source)
        entry = self._window.get(key)
        if entry is None and attempted.source != OTHERS:
            if self._sources[attempted.reason] < SOURCES_MAX:
                self._sources[attempted.reason] += 1
            else:
                key = (attempted.reason, OTHERS)
                entry = self._window.get(key)
        if entry is None:
            self._window[key] = [attempted.attempts, attempted.from_us]
        else:
            entry[0] += attempted.attempts
            entry[1] = min(entry[1], attempted.from_us)


class AttemptsReporter:
    """Attempts of a process without steps: `record` is called at the end of each window, on its own thread."""

    def __init__(
        self,
        attempts: Attempts,
        record: Callable[[Sequence[Attempted]], object],
        *,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        """`ended` is called once nothing is recorded any more."""
        self.attempts = attempts
        self._record = record
        self._ended = ended
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False

    def note(self, reason: str, source: str = "") -> None:
        """Count a refusal."""
        self.attempts.note(reason, source)
        if self._timer is None:
            self._arm()

    def flush(self) -> None:
        """Record the window; counts that cannot be recorded wait for the next one."""
        with self._lock:
            self._timer = None
        taken = self.attempts.take()
        if not taken:
            return
        try:
            self._record(taken)
        except Exception as error:  # whatever it was: they are recorded later
            self.attempts.give_back(taken)
            _log.error("refused identities are not recorded yet", reason=str(error))
            self._arm()

    def close(self) -> None:
        """Record the last window, and stop."""
        with self._lock:
            self._closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self.flush()
        self._ended()

    def _arm(self) -> None:
        with self._lock:
            if self._timer is None and not self._closed:
                self._timer = threading.Timer(WINDOW_SECONDS, self.flush)
                self._timer.daemon = True
                self._timer.start()


def events_of(place: str, taken: Iterable[Attempted], now_us: int, *, of_worker: str = "") -> list[Event]:
    """Return the events of a window that ends now."""
    return [
        AttemptsRefused(now_us, place, one.reason, one.source, one.attempts, one.from_us, of_worker) for one in taken
    ]


def network_of(address: str) -> str:
    """Return an address's network: /24, or /48 for IPv6; empty for anything else, such as a local socket (rule 3)."""
    try:
        found = ip_address(address)
    except ValueError:
        return ""
    mapped = getattr(found, "ipv4_mapped", None) or found
    return str(ip_network((mapped, _PREFIX_BITS[mapped.version]), strict=False))


def reason_of_answer(status: int, refusal: str) -> str | None:
    """Return why a door refused a request, as one of few reasons; None for a merely wrong one (400, 413).

    `not-served`: somebody known asks for a path that is not theirs (403); `not-found`: for what is another's, or
    nobody's (404).
    """
    return reason_of(refusal) if status == _NOBODY else _OF_STATUS.get(status)


def reason_of(refusal: str) -> str:
    """Return one of few reasons for a door's own words about a rejected credential."""
    if refusal == "no credential":
        return "missing"
    return "expired" if "expired" in refusal or "past its date" in refusal else "invalid"
