"""Forks a ledger writer on request, so that a test can kill -9 one every few moments.

Commands on stdin: `go LEDGER SPILL PROGRESS SEED PACE` forks and prints the child's id; `wait` reaps it. The child does
random operations for ever, with the database locked now and then. In PROGRESS it keeps three sequences: the last one
reported to it as durable, the last one refused, and, for the positive control, the last one merely submitted. At the
pace `steady` it commits small batches and rests. At `hurried` it does as many operations as the disk permits. Its
operations are a function only of SEED (`Operations`, `durable_act`), so that a test can repeat and compare them.

Progress is written through a mapping and replies through writev. So only the ledger makes the calls into which a test
injects faults: pwrite64, write, fsync, fdatasync, ftruncate, rename, unlink.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import sqlite3
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog

from kvcustody.audit.kinds import (
    BlocksAttached,
    CustodyEnded,
    DecisionRecorded,
    Event,
    HitCounted,
    KeyEvent,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
from kvcustody.clock import SystemClock
from kvcustody.errors import LedgerUnavailable


class Pace(NamedTuple):
    """How a child works: events a commit, operations a burst, longest rest, and how often it meets trouble."""

    batch: int
    burst: int
    rest_seconds: float
    durable: float
    locked: float


PACES = {
    "steady": Pace(50, 120, 0.004, 0.1, 0.15),
    "hurried": Pace(500, 1500, 0.0, 0.02, 0.02),
}
AHEAD = 8000  # operations that may wait for the disk
SHOWN_BYTES, REFUSED_SHOWN = 256, 8


class Operations:
    """Random acts of one life; each residency is opened once and each launch reported once."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"operations of {seed}")
        self._residency = self._generation = self._launch = 0
        self._open: deque[tuple[int, str, Run]] = deque()
        self._dirty: deque[tuple[str, Run]] = deque()

    def next(self, now: int) -> Event:
        """One operation, whichever is possible."""
        lot = self._chance.random()
        if lot < 0.05 and self._open:
            residency, tenant, run = self._chance.choice(self._open)
            return BlocksAttached(now, residency, tenant, (run,))
        if lot < 0.08:
            return HitCounted(now, "tenant-0", "tenant-0", "reuse", "permit", "own-scope", 1)
        if lot < 0.1:  # in the logs of both
            reader = f"tenant-{self._residency % 2}"
            return DecisionRecorded(now, "reuse", "deny", reader, "tenant-2", "internal", ("no-grant",), 1)
        if lot < 0.3 and self._open:
            return self._release(now)
        if lot < 0.4 and self._dirty:
            tenant, run = self._dirty[0]
            return CustodyEnded(now, tenant, "internal", (run,), "expired", now, now, now, 1_000_000, now + 10**9)
        if lot < 0.6 and self._dirty:
            return self._receipt(now)
        return self._enter(now) if len(self._open) < 50 else self._release(now)

    def _enter(self, now: int) -> Event:
        self._residency += 1
        count = self._chance.randrange(1, 6)
        run = Run(np.arange(count) + self._residency % 4000, self._generation + 1)
        self._generation += count
        tenant = f"tenant-{self._residency % 3}"
        self._open.append((self._residency, tenant, run))
        subject = f"user-{self._residency % 7}"
        rest = (None, False, "internal", (), (), ("own",), 1, now + 10**9, (run,))
        return ResidencyOpened(now, self._residency, tenant, subject, *rest)

    def _release(self, now: int) -> Event:
        residency, tenant, run = self._open.popleft()
        self._dirty.append((tenant, run))
        return ResidencyReleased(now, residency, tenant, "finish", (), now)

    def _receipt(self, now: int) -> Event:
        self._launch += 1
        tenant, run = self._dirty.popleft()
        size = len(run.blocks)
        rest = ("memset", "cpu", 4096 * size, now, now, "full", 1.0, size, "ok", (run,))
        return ReceiptRecorded(now, self._launch, 0, tenant, *rest)


def durable_act(number: int, now: int) -> Event:
    """The n-th act of a life that waits for its record: a grant is used for the first time, or a key is made."""
    if number % 2:
        reader, grant = f"tenant-{number % 3}", (f"grant-{number}",)
        return DecisionRecorded(now, "reuse", "permit", reader, "owner", "internal", grant, 1, "grant", number)
    return KeyEvent(now, None, "made", number, "operator")


def child(ledger: str, spill: str, progress: str, seed: int, pace: Pace) -> None:
    chance = random.Random(seed)
    engine = open_store(ledger, timeout_seconds=0.02)
    settings = WriterSettings(batch=pace.batch, interval_seconds=0.001, retry_seconds=0.01, durable_seconds=0.2)
    clock = SystemClock()
    writer = EventWriter(
        engine, worker="victim", clock=clock, spill_directory=Path(spill), settings=settings, clear_names=True
    )
    Path(progress).touch()
    os.truncate(progress, SHOWN_BYTES)
    file = mmap.mmap(os.open(progress, os.O_RDWR), SHOWN_BYTES)
    file[:] = f"{writer.incarnation} 0 0".ljust(SHOWN_BYTES).encode()  # before it does anything
    intruder = sqlite3.connect(ledger, isolation_level=None, timeout=0.5)
    writer.submit([WorkerStarted(clock.now_us(), "victim", 4096, 1, 4096, "cpu", "test")])
    operations, acts = Operations(seed), 0
    locked = False
    refused: deque[int] = deque(maxlen=REFUSED_SHOWN)
    while True:
        now = clock.now_us()
        submitted = writer.submit([operations.next(now) for _ in range(chance.randrange(1, pace.burst))])
        if chance.random() < pace.durable:
            try:
                acts += 1
                writer.submit_durable(durable_act(acts, clock.now_us()))
            except LedgerUnavailable as error:
                refused.append(int(error.operands["sequence"]))
        if chance.random() < pace.locked:
            with contextlib.suppress(sqlite3.OperationalError):
                intruder.execute("ROLLBACK" if locked else "BEGIN EXCLUSIVE")
                locked = not locked
        time.sleep(chance.random() * pace.rest_seconds)
        while True:
            told = f"{writer.incarnation} {writer.durable_sequence} {submitted} {' '.join(map(str, refused))}"
            file[:] = told.ljust(SHOWN_BYTES).encode()
            if submitted - writer.durable_sequence < AHEAD:
                break
            time.sleep(0.001)


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is the answers
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "go":
            found = os.fork()
            if not found:
                ledger, spill, progress, seed, pace = arguments
                child(ledger, spill, progress, int(seed), PACES[pace])
            os.writev(1, [b"%d\n" % found])
        else:
            os.wait()
            os.writev(1, [b"dead\n"])


if __name__ == "__main__":
    main()
