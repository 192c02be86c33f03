"""What the Governor needs from a ledger, and a ledger that only counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from kvcustody.audit.kinds import Event
from kvcustody.audit.write.event_queue import TenantShares
from kvcustody.tenants import Issuers


class Ledger(Protocol):
    """`audit.write.LedgerWriter` is the real one."""

    @property
    def admitting(self) -> bool:
        """False while new custody could not be recorded."""

    @property
    def recording(self) -> bool:
        """False while events reach the ledger only later, from a spill; some policies do not permit that."""

    @property
    def shares(self) -> TenantShares:
        """The waiting events by tenant, and tenants with too many waiting to be admitted."""

    def issuers(self) -> Issuers:
        """Return the issuers that the ledger knows now; raises `LedgerUnavailable` where it does not answer."""

    def submit(self, events: Sequence[Event], /) -> int:
        """Queue events of class B and C; never waits."""

    def submit_durable(self, event: Event, /) -> int:
        """Record a class A event; returns when it is committed, otherwise raises `LedgerUnavailable`."""


class CountingLedger:
    """Counts events by kind and keeps nothing: for benchmarks and replays that measure the cache alone."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._sequence = 0
        self.shares = TenantShares()

    @property
    def admitting(self) -> bool:
        """True: counting never fails."""
        return True

    @property
    def recording(self) -> bool:
        """True: counting is never late."""
        return True

    def issuers(self) -> Issuers:
        """Return no issuer."""
        return Issuers()

    def submit(self, events: Sequence[Event], /) -> int:
        """Count events."""
        self.counts.update(type(event).__name__ for event in events)
        self._sequence += len(events)
        return self._sequence

    def submit_durable(self, event: Event, /) -> int:
        """Count an event."""
        return self.submit([event])
