"""Every worker's latest status, from a control plane or the ledger. It sends no request to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from sqlalchemy import Engine

from kvcustody.clock import Clock, SystemClock
from kvcustody.console.api.client import asking, call, every_page
from kvcustody.console.options import ServiceSource
from kvcustody.errors import CustodyError
from kvcustody.governance.observability.serving_summary import SeenWorker
from kvcustody.governance.service.fleet.workers import Fleet, WorkerRun
from kvcustody.times import SECOND_US

_PAGE, _OPEN_MAX = 1000, 10_000


@contextmanager
def worker_statuses(source: ServiceSource) -> Iterator[Callable[[], list[SeenWorker]]]:
    """Yield the function that returns all running workers with a status, at most ten seconds old."""
    clock = SystemClock()
    with asking(source, "listWorkers") as asker:

        def look() -> list[SeenWorker]:
            wanted = {"limit": _PAGE}
            every = every_page(asker, "listWorkers", wanted, call(asker, "listWorkers", wanted))
            found = {row["worker"]: row for row in orjson.loads(every.body)["items"] if row["ended_us"] is None}
            return [_seen(found[name], clock.utc_us()) for name in sorted(found) if found[name]["status"]]

        yield look


def open_runs(engine: Engine) -> list[WorkerRun]:
    """Return a ledger's processes whose end is not on record, as a control plane sees them."""
    return [run for _, run in _looking(engine, SystemClock()).listed(limit=_OPEN_MAX, only_open=True)]


def _looking(engine: Engine, clock: Clock) -> Fleet:
    return Fleet(engine, clock, _closes_nothing, apart_us=0)


def _closes_nothing(worker: str, incarnation: str) -> None:
    """Do nothing: reading registers nothing."""
    raise CustodyError(f"`{worker}` was registered by somebody who only looks")


def _seen(row: dict[str, Any], now_us: int) -> SeenWorker:
    age = max(0, now_us - row["seen_us"]) // SECOND_US
    return SeenWorker(row["worker"], age, row["silent"], row["status"], row["charged"], row["tenants"])
