"""What the Governor asks of a ledger, and a ledger that only counts."""

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
        """False while the ledger has what is submitted only later, from a spill: some policies do not wait for that."""

    @property
    def shares(self) -> TenantShares:
        """Whose events wait, and who has too many waiting to be admitted."""

    def issuers(self) -> Issuers:
        """Whose tenants the ledger names, as it is now; raises `LedgerUnavailable` where it cannot be asked."""

    def submit(self, events: Sequence[Event], /) -> int:
        """Queue events of class B and C; never waits."""

    def submit_durable(self, event: Event, /) -> int:
        """Record a class A event; returns once committed, else raises `LedgerUnavailable`."""


class CountingLedger:
    """Counts events by kind and keeps nothing: for benchmarks and replays that measure the cache alone."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._sequence = 0
        self.shares = TenantShares()

    @property
    def admitting(self) -> bool:
        """Counting never fails."""
        return True

    @property
    def recording(self) -> bool:
        """Nor is it late."""
        return True

    def issuers(self) -> Issuers:
        """It keeps nothing."""
        return Issuers()

    def submit(self, events: Sequence[Event], /) -> int:
        """Count them."""
        self.counts.update(type(event).__name__ for event in events)
        self._sequence += len(events)
        return self._sequence

    def submit_durable(self, event: Event, /) -> int:
        """Count it."""
        return self.submit([event])
