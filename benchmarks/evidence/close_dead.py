"""What closing a dead process costs: seconds and peak memory, by how many residencies it left open.

python benchmarks/evidence/close_dead.py --residencies 100000
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from kvcustody.audit.kinds import DECLARED, ResidencyOpened, WorkerStarted
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import Closing, close_process
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.migrations.upgrade import upgrade

_AT_ONCE = 5000
_BLOCKS = 8


def opened(number: int) -> ResidencyOpened:
    """One of a thousand tenants' requests, handed eight blocks."""
    first = number * _BLOCKS
    run = Run(np.arange(first, first + _BLOCKS, dtype=np.int64), first + 1)
    tenant = f"tenant-{number % 1000}"
    made = ResidencyOpened(1, number, tenant, None, None, False, "internal", (), (), ("own",), 1, 9)
    return made._replace(written=(run,))


def peak_mib() -> float:
    """The most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Write a ledger, close its process, print figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--residencies", type=int, default=100_000)
    count = parser.parse_args().residencies
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "ledger.db", timeout_seconds=30)
        upgrade(store)
        clock = SystemClock()
        writer = EventWriter(store, worker="gone", clock=clock, spill_directory=Path(folder) / "spill")
        writer.submit([WorkerStarted(1, "gone", count * _BLOCKS, 1, 4096, "cpu", "benchmark")])
        for first in range(0, count, _AT_ONCE):
            writer.submit([opened(number) for number in range(first, min(count, first + _AT_ONCE))])
            writer.flush(120)
        writer.close(120)
        before_mib, began = peak_mib(), time.perf_counter()
        with closing_committer(store, clock) as committer:
            why = Closing(DECLARED, 90, 0, "a", "b", "benchmark", spill_lost=True)
            assert close_process(committer, store, clock, writer.incarnation, why, "benchmark:closing")
        seconds = time.perf_counter() - began
        store.dispose()
    figures = {
        "residencies": count,
        "seconds": round(seconds, 2),
        "mib_before": round(before_mib),
        "mib_peak": round(peak_mib()),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
