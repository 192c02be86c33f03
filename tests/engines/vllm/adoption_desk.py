"""Whoever adopts a policy on a running engine: gives orders through its ledger, and reads there what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders
import orjson
from deployment import Deployment
from sqlalchemy import select

from kvcustody.audit.database.engine import open_store
from kvcustody.audit.events import Event
from kvcustody.audit.processes.enforcement import newest_order, worker_enforcement
from kvcustody.audit.schema.ledger import events
from kvcustody.clock import SystemClock
from kvcustody.governance.monitoring.ordering import enforcement_order

CLOCK = SystemClock()


class Desk:
    """Whoever gives orders, in the same ledger."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self._deployment = deployment
        self._spill = folder / "desk"

    def read(self, ask: Callable[[Any], Any]) -> Any:
        """An answer of the ledger as it is now."""
        store = open_store(self._deployment.ledger_url, read_only=True)
        try:
            with store.connect() as connection:
                return ask(connection)
        finally:
            store.dispose()

    def order(self, mode: str, tenants: tuple[str, ...] = (), share: str = "") -> None:
        """Put an order on record, and wait for nothing."""
        until_us = None if mode == "enforce" else CLOCK.utc_us() + 3_600_000_000
        made: Event = enforcement_order(
            self.read(newest_order),
            mode,
            at_us=CLOCK.now_us(),
            now_utc_us=CLOCK.utc_us(),
            tenants=tenants,
            share=share,
            until_us=until_us,
            actor="olga",
            reason="adoption",
        )
        store = open_store(self._deployment.ledger_url)
        writer = builders.writer(store, self._spill, worker="desk", clock=CLOCK)
        writer.submit_durable(made)
        writer.close()
        store.dispose()

    def await_mode(self, mode: str) -> None:
        """Until the engine says that it does so; nobody sends it a request."""
        deadline = time.monotonic() + 60
        while [one.mode for one in self.read(worker_enforcement)] != [mode]:
            assert time.monotonic() < deadline, f"the engine did not hear of `{mode}`"
            time.sleep(0.05)

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        """Every leaf of a kind."""
        query = select(events.c.leaf).where(events.c.kind == kind).order_by(events.c.at_us, events.c.idx)
        return [orjson.loads(bytes(leaf)) for leaf in self.read(lambda c: list(c.scalars(query)))]

    def await_leaves(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Until the ledger has so many."""
        deadline = time.monotonic() + 60
        while len(found := self.bodies(kind)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} `{kind}`"
            time.sleep(0.05)
        return found
