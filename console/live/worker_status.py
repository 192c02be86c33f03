"""Every worker as it last said it is: of a control plane, or as the ledger has it. Nothing is asked of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine

from kvcustody.clock import Clock, SystemClock
from kvcustody.console.opening import control_plane, reading
from kvcustody.console.options import Source
from kvcustody.errors import CustodyError
from kvcustody.governance.observability.serving_summary import SeenWorker
from kvcustody.governance.service.fleet.workers import Fleet, WorkerRun
from kvcustody.times import SECOND_US

_PAGE, _OPEN_MAX = 1000, 10_000


@contextmanager
def worker_statuses(source: Source) -> Iterator[Callable[[], list[SeenWorker]]]:
    """What looks up all running workers that said anything, ten seconds old at most."""
    clock = SystemClock()
    if source.plane.server is not None:
        with control_plane(source) as plane:

            def ask() -> list[SeenWorker]:
                latest: dict[str, Any] = {}
                cursor = None
                while True:
                    found = plane.get("/v1/workers", limit=_PAGE, cursor=cursor)
                    latest |= {row["worker"]: row for row in found["items"] if row["ended_us"] is None}
                    cursor = found["next"]
                    if cursor is None:
                        rows = [latest[name] for name in sorted(latest)]
                        return [_seen(row, clock.utc_us()) for row in rows if row["status"]]

            yield ask
        return
    with reading(source.ledger) as engine:
        fleet = _looking(engine, clock)

        def read() -> list[SeenWorker]:
            return [_seen(one._asdict(), clock.utc_us()) for one in fleet.running() if one.status]

        yield read


def open_runs(engine: Engine) -> list[WorkerRun]:
    """The processes of a ledger whose end is not on record, as a control plane sees them."""
    return [run for _, run in _looking(engine, SystemClock()).listed(limit=_OPEN_MAX, only_open=True)]


def _looking(engine: Engine, clock: Clock) -> Fleet:
    return Fleet(engine, clock, _closes_nothing, apart_us=0)


def _closes_nothing(worker: str, incarnation: str) -> None:
    """Whoever looks registers nobody."""
    raise CustodyError(f"`{worker}` was registered by somebody who only looks")


def _seen(row: dict[str, Any], now_us: int) -> SeenWorker:
    age = max(0, now_us - row["seen_us"]) // SECOND_US
    return SeenWorker(row["worker"], age, row["silent"], row["status"], row["charged"], row["tenants"])
