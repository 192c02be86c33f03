"""Forks a whole process's custody on request, so that a test can kill -9 one every few moments.

Commands on stdin: `go FOLDER NUMBER` forks and prints the child's id; `wait` reaps it. The child works on the ledger,
spill and keyring in FOLDER for ever. In FOLDER/progress-NUMBER it keeps its incarnation, the sequence reported to it as
durable, the one that it had merely submitted, and the findings of `check()`.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.clock import VirtualClock
from standins.fork_server import serve
from standins.robust.custody_world import TENANTS, CustodyWorld

HASTY = WriterSettings(batch=50, interval_seconds=0.001, retry_seconds=0.01, durable_seconds=5.0)
CANARY = np.arange(1, 65, dtype=np.int32) * 7919 % 30_011 + 1_000_003


def child(folder: Path, number: int) -> None:
    """Work until killed."""
    ledger = folder / "ledger.db"
    clock = VirtualClock(utc_us=time.time_ns() // 1000)
    world = CustodyWorld(
        open_store(ledger, timeout_seconds=0.03),
        folder,
        seed=number,
        worker="victim",
        clock=clock,
        settings=HASTY,
    )
    file = os.open(folder / f"progress-{number}", os.O_RDWR | os.O_CREAT, 0o600)
    intruder = sqlite3.connect(ledger, isolation_level=None, timeout=0.2)
    locked = False
    problems = list(world.governor.check())
    acts = 0
    while True:
        world.act()
        acts += 1
        if acts % 9 == 1 and world.admit(TENANTS[acts % 3], CANARY) is not None:
            world.decode()
        if acts % 20 == 0:
            problems += world.governor.check()
        if world.random.random() < (0.04 if locked else 0.12):
            with suppress(sqlite3.OperationalError):
                intruder.execute("ROLLBACK" if locked else "BEGIN EXCLUSIVE")
                locked = not locked
        status = world.writer.status()
        line = f"{world.writer.incarnation} {status.durable_sequence} {status.submitted_sequence} {len(problems)}"
        os.pwrite(file, line.ljust(80).encode(), 0)


if __name__ == "__main__":
    serve(child)
