"""One observer: a stream, an engine's state, and its history in the ledger; opened in order, closed in reverse.

1. That an observer watches, under which policy, is on record before anything that it saw.
2. What it saw is handed to the ledger once a second and at the end. The ledger's own limits apply: a spill when the
   database is away, a recorded gap when that is full too.
3. It announces no memory, so its end claims nothing about any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcustody._version import __version__
from kvcustody.audit.kinds import ObservationStarted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import MICROSECONDS, Clock, SystemClock
from kvcustody.files import private_folder
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.integrations.events.observed_engine import ObservedEngine
from kvcustody.integrations.events.subscriber import Reading, Subscriber
from kvcustody.migrations.upgrade import upgrade
from kvcustody.policies.table.decision_table import DecisionTable

_OVERDUE_SHOWN = 20


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What to observe and how. `ledger` None: nothing is recorded."""

    endpoint: str
    table: DecisionTable
    name: str = "observed-0"
    replay_endpoint: str | None = None
    topic: str = ""
    tenants_by_salt: Mapping[str, str] = field(default_factory=dict, repr=False)
    scope_trusted: bool = False
    unattributed_as: str | None = None
    blocks_max: int = 1_000_000
    ledger: str | None = None
    spill: Path = Path("kvcustody-observe.spill")
    reading: Reading | None = None


class EngineObserver:
    """An open observer; call `step` repeatedly."""

    def __init__(
        self,
        watch: WatchOptions,
        subscriber: Subscriber,
        engine: ObservedEngine,
        ledger: Ledger | None,
        clock: Clock,
    ) -> None:
        self.watch = watch
        self.engine = engine
        self._subscriber = subscriber
        self._ledger = ledger
        self._clock = clock
        self._flush_at_us = 0

    def step(self, timeout_ms: int) -> None:
        """Take what arrived within `timeout_ms`, and record what is due."""
        for arrival in self._subscriber.poll(timeout_ms):
            self.engine.arrive(arrival)
        if self._clock.now_us() >= self._flush_at_us:
            self.flush()

    def flush(self) -> None:
        """Record everything up to now (rule 2)."""
        self._flush_at_us = self._clock.now_us() + MICROSECONDS
        made = self.engine.drain()
        if made and self._ledger is not None:
            self._ledger.submit(made)

    def status(self) -> dict[str, Any]:
        """Return all known facts as plain values for people and machines."""
        now_us = self._clock.now_us()
        overdue = self.engine.overdue()
        return {
            "engine": self.engine.name,
            "observed": True,
            "enforced": False,
            "endpoint": self.watch.endpoint,
            "policy": self.watch.table.policy.name,
            "policy_digest": self.watch.table.digest,
            **self.engine.stats()._asdict(),
            "connection": self._subscriber.stats()._asdict(),
            "tenants": [share._asdict() for share in self.engine.shares()],
            "overdue": [
                {
                    "residency": residency.number,
                    "tenant": residency.tenant,
                    "classification": residency.classification,
                    "blocks": residency.blocks,
                    "overdue_seconds": (now_us - residency.deadline_us) // MICROSECONDS,
                }
                for residency in overdue[:_OVERDUE_SHOWN]
            ],
            "recording": None if self._ledger is None else self._ledger.admitting,
        }


@contextmanager
def open_observer(watch: WatchOptions, *, clock: Clock | None = None) -> Iterator[EngineObserver]:
    """Open an observer; its last observations are recorded at the end.

    Raises:
        CustodyError: a part cannot be opened; the message names it.
    """
    clock = clock or SystemClock()
    with ExitStack() as stack:
        engine = ObservedEngine(
            watch.name,
            watch.table,
            clock,
            tenants_by_salt=watch.tenants_by_salt,
            scope_trusted=watch.scope_trusted,
            unattributed_as=watch.unattributed_as,
            blocks_max=watch.blocks_max,
        )
        writer = _open_ledger(watch, stack, clock) if watch.ledger is not None else None
        reading = (watch.endpoint, watch.replay_endpoint)
        subscriber = stack.enter_context(Subscriber(*reading, topic=watch.topic, reading=watch.reading))
        observer = EngineObserver(watch, subscriber, engine, writer, clock)
        try:
            yield observer
        finally:
            observer.flush()


def _open_ledger(watch: WatchOptions, stack: ExitStack, clock: Clock) -> EventWriter:
    assert watch.ledger is not None
    store = open_store(watch.ledger)
    stack.callback(store.dispose)
    upgrade(store)
    private_folder(watch.spill)
    writer = stack.enter_context(EventWriter(store, worker=watch.name, clock=clock, spill_directory=watch.spill))
    software = f"kvcustody {__version__}"
    table = watch.table
    writer.submit(
        [ObservationStarted(clock.now_us(), watch.name, watch.endpoint, table.policy.name, table.digest, software)]
    )
    return writer
