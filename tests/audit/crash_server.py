"""Forks a ledger writer on request, so that a test can kill -9 one every few moments.

Commands on stdin: `go LEDGER SPILL PROGRESS SEED` forks and prints the child's id; `wait` reaps it. The
child submits events for ever, with the database locked now and then, and keeps in PROGRESS the last
sequence it was told is durable (and the one it had merely submitted, for the positive control).

Progress is written through a mapping and replies through writev, so that the calls which a test injects faults into
(pwrite64, fsync, fdatasync, ftruncate, rename, unlink) are the ledger's alone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import sqlite3
import sys
import time
from pathlib import Path

import numpy as np

from kvcustody.audit.events import (
    KeyEvent,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.runs import Run
from kvcustody.audit.store import open_store
from kvcustody.audit.writer import EventWriter, WriterSettings
from kvcustody.clock import SystemClock
from kvcustody.errors import LedgerUnavailable


def child(ledger: str, spill: str, progress: str, seed: int) -> None:
    chance = random.Random(seed)
    engine = open_store(ledger, timeout_seconds=0.02)
    settings = WriterSettings(batch=50, interval_seconds=0.001, retry_seconds=0.01, durable_seconds=0.2)
    clock = SystemClock()
    writer = EventWriter(engine, worker="victim", clock=clock, spill_directory=Path(spill), settings=settings)
    Path(progress).write_bytes(b" " * 80)
    descriptor = os.open(progress, os.O_RDWR)
    file = mmap.mmap(descriptor, 80)
    intruder = sqlite3.connect(ledger, isolation_level=None, timeout=0.5)
    writer.submit([WorkerStarted(clock.now_us(), "victim", 64, 1, 4096, "cpu", "test")])
    residency = generation = 0
    locked = False
    while True:
        batch = []
        for _ in range(chance.randrange(1, 40)):
            residency += 1
            blocks = Run(np.arange(4) + residency, generation + 1)
            generation += 4
            now, tenant = clock.now_us(), f"tenant-{residency % 3}"
            batch += [
                ResidencyOpened(
                    now,
                    residency,
                    tenant,
                    f"user-{residency % 7}",
                    None,
                    False,
                    "internal",
                    (),
                    (),
                    ("own",),
                    1,
                    9,
                ),
                ResidencyReleased(now, residency, tenant, "finish", (blocks,), now),
                ReceiptRecorded(
                    now,
                    residency,
                    0,
                    tenant,
                    "memset",
                    "cpu",
                    16384,
                    now,
                    now,
                    "full",
                    1.0,
                    4,
                    "ok",
                    (blocks,),
                ),
            ]
        submitted = writer.submit(batch)
        if chance.random() < 0.1:
            with contextlib.suppress(LedgerUnavailable):
                writer.submit_durable(KeyEvent(clock.now_us(), None, "made", residency, "operator"))
        if chance.random() < 0.15:
            with contextlib.suppress(sqlite3.OperationalError):
                intruder.execute("ROLLBACK" if locked else "BEGIN EXCLUSIVE")
                locked = not locked
        time.sleep(chance.random() * 0.004)
        line = f"{writer.incarnation} {writer.durable_sequence} {submitted}"
        file[:] = line.ljust(80).encode()


def main() -> None:
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "go":
            found = os.fork()
            if not found:
                child(arguments[0], arguments[1], arguments[2], int(arguments[3]))
            os.writev(1, [b"%d\n" % found])
        else:
            os.wait()
            os.writev(1, [b"dead\n"])


if __name__ == "__main__":
    main()
