"""Whose events wait for the ledger: where tenants are kept apart, each has a share of the queue and of the spill.

1. Half of both is divided, by a share that the caller gives for each tenant; the other half is for the ends of what was
   admitted, which are taken from everybody at any time.
2. A tenant beyond its share is in `over`: nothing more of it is admitted, and everything of everybody else.
3. `over` is read without a lock. While little waits nothing is counted, and where nothing is divided it stays empty.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from kvcustody.audit.evidence.subjects.subject_table import Row
from kvcustody.audit.kinds import Event
from kvcustody.audit.leaf.batch_encoder import Entry

ShareOf = Callable[[str], float]
Item = tuple[int, Event]
_DIVIDED = 0.5  # rule 1
_WATCHED = 0.125  # of the queue's capacity: below it nobody can be over a share that matters


class TenantShares:
    """The shares of one ledger's queue of `events` and spill of `spill_bytes`; thread-safe."""

    def __init__(self, *, events: int = 65_536, spill_bytes: int = 2 << 30) -> None:
        self._events = events * _DIVIDED
        self._bytes = spill_bytes * _DIVIDED
        self._watched = max(1, int(events * _WATCHED))
        self._share_of: ShareOf | None = None
        self._queued: Counter[str] | None = None  # None: too little waits to be counted
        self._spilled: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self.over: frozenset[str] = frozenset()

    def divide(self, share_of: ShareOf | None) -> None:
        """From now on a tenant's share is what `share_of` says, from 0 to 1; None: nothing is divided.

        `share_of` is called on any thread.
        """
        with self._lock:
            self._share_of = share_of
            self._queued = None
            self._judge()

    def queued(self, queue: Collection[Item], added: Iterable[Event]) -> None:
        """These were added to the queue; called under the queue's own lock."""
        if self._share_of is None or (self._queued is None and len(queue) <= self._watched):
            return
        with self._lock:
            if self._queued is None:
                self._queued = Counter(map(_tenant, (event for _, event in queue)))
            else:
                self._queued.update(map(_tenant, added))
            self._judge()

    def taken(self, queue: Collection[Item], items: Iterable[Item]) -> None:
        """These left the queue; called under the queue's own lock."""
        if self._queued is None:
            return
        with self._lock:
            if len(queue) <= self._watched // 2:
                self._queued = None
            elif self._queued is not None:
                self._queued.subtract(map(_tenant, (event for _, event in items)))
            self._judge()

    def spilled(self, sizes: Iterable[tuple[str, float]]) -> None:
        """So many bytes of these tenants went to the spill."""
        with self._lock:
            for tenant, size in sizes:
                self._spilled[tenant] += size
            self._judge()

    def replayed(self) -> None:
        """The spill is empty."""
        with self._lock:
            self._spilled.clear()
            self._judge()

    def _judge(self) -> None:
        share_of = self._share_of
        if share_of is None:
            self.over = frozenset()
            return
        held: tuple[tuple[Mapping[str, float], float], ...]
        held = ((self._queued or Counter(), self._events), (self._spilled, self._bytes))
        self.over = frozenset(
            tenant
            for counts, whole in held
            for tenant, count in counts.items()
            if tenant and count > share_of(tenant) * whole
        )


def sizes_of(entries: Iterable[Entry], names: Iterable[Row]) -> Iterator[tuple[str, int]]:
    """What entries and the names that came with them take in a spill, by tenant."""
    for entry in entries:
        yield _tenant(entry.event), sum(map(len, entry.leaves))
    for row in names:
        yield row[1], len(str(row))


def _tenant(event: Event) -> str:
    return getattr(event, "tenant", None) or ""
