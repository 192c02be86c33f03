"""A ledger of a chosen size, for measuring pages: 30 days of a fleet's custody, denials, reuse, tiers and routes.

    fill(engine, folder, leaves=1_000_000, tenants=40, until_us=now)

1. The product's writer writes every leaf, and its figures are folded as a service's keeper folds them.
2. Requests are spread evenly over the days up to `until_us`. Of 100 requests, two are denied, two cross tenants, five
   move copies, five have route receipts and one is scrubbed late.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sqlalchemy import Engine, func, select

from kvcustody.audit.kinds import (
    CopiesEnded,
    CopiesStored,
    CustodyEnded,
    Event,
    HitCounters,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    RouteFound,
    RouteSent,
    TransferDecided,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.clock import VirtualClock
from kvcustody.times import DAY_US

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from ledger_stores import write

DAYS, BLOCKS = 30, 4
LEAVES_OF_100_REQUESTS = 227  # the writer puts several ends and receipts of a tenant into one leaf
_SECOND_US = 1_000_000


def events(requests: int, tenants: int, span_us: int) -> Iterator[Event]:
    """Return the events of so many requests, evenly over a span of the worker's boot clock."""
    step = span_us // max(1, requests)
    generation = 1
    yield WorkerStarted(1, "bench", 1 << 20, 1, 65536, "cpu", "bench")
    for number in range(1, requests + 1):
        at, tenant = number * step, f"tenant-{number % tenants:02d}"
        end, lag = at + 20_000, 3 * _SECOND_US if number % 100 == 7 else 1_000 + number % 900
        run = (Run(np.arange(BLOCKS) + number % (1 << 19), generation),)
        generation += BLOCKS
        yield ResidencyOpened(
            at, number, tenant, f"user-{number // tenants % 31}", f"chat-{number}", False, "internal", (), (),
            ("own-scope",), 1, at + 10**9, run,
        )  # fmt: skip
        yield ResidencyReleased(end, number, tenant, "finish", (), end + 10)
        yield CustodyEnded(
            end + 20, tenant, "internal", run, "expired", end + 10, end + 20, end, _SECOND_US, at + 10**9
        )
        yield ReceiptRecorded(
            end + lag, number, 0, tenant, "memset", "cpu", BLOCKS * 65536, end + 30, end + lag, "full", 1.0, BLOCKS,
            "ok", run,
        )  # fmt: skip
        yield from _beside(number, at, tenant, f"tenant-{(number + 1) % tenants:02d}")


def _beside(number: int, at: int, tenant: str, other: str) -> Iterator[Event]:
    """What only some requests have."""
    if number % 50 == 0:
        rule = ("no-restricted", "default-deny")[number // 50 % 2]
        yield HitCounters(at, tenant, other, "reuse", "deny", rule, 1, at, 3, 1, 16)
    if number % 50 == 1:
        yield HitCounters(at, tenant, other, "reuse", "permit", "partners", 1, at, 2, 4, 64)
    if number % 20 == 2:
        action = ("store", "restore")[number // 20 % 2]
        asked = 0 if action == "store" else number
        moved = ("transfer", "done", 900) if number // 20 % 5 else ("recompute", "", 0)
        yield TransferDecided(
            at, action, "host", tenant, asked, BLOCKS, BLOCKS * 65536, 1_000, 4_000, *moved[:2], moved[2],
            "fits" if moved[2] else "slower",
        )  # fmt: skip
    if number % 40 == 2:
        copy = (f"{number:032x}",), (number,), (1,), (65536,)
        yield CopiesStored(at, "host", tenant, "internal", *copy, (at + 10**8,), (at,), _SECOND_US)
        if number % 80 == 2:
            yield CopiesEnded(
                at + 10, "host", tenant, "internal", "expired", *copy, (at + 10**8,), (at + 10,), _SECOND_US
            )  # fmt: skip
    if number % 20 == 3:
        receipt = f"{number:032x}"
        yield RouteSent(at, tenant, receipt, "tenant", 0, 0, 0, "bench", "bench", 200, 5, 1, 1, 64, 500_000)
        yield RouteFound(at, tenant, receipt, True, 128, 64, 2, 1_000, False, True)


def fill(engine: Engine, folder: Path, *, leaves: int, tenants: int, until_us: int, days: float = DAYS) -> int:
    """Write about so many leaves, the last one at `until_us`; return how many there are."""
    period_us = int(days * DAY_US)
    written = events(leaves * 100 // LEAVES_OF_100_REQUESTS, tenants, period_us - 2 * _SECOND_US * 60)
    write(engine, folder, written, VirtualClock(1, until_us - period_us))
    with engine.connect() as connection:
        return int(connection.scalar(select(func.sum(logs.c.size))) or 0)
