"""The ledger's price: events through the writer against the same rows through plain sqlite3, in the same run.

Both sides write the same rows to the same tables with the same indexes, WAL, synchronous=FULL, batches of 1,000. The
writer's side adds what makes it a ledger: canonical leaf bytes, contiguous idx, projections, the queue and the thread.
The rounds alternate, so that a busy machine slows both; costs per event are processor time of their thread.
Run: `python benchmarks/ledger.py [--rounds 3]`.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np

from kvcustody.audit.coverage import coverage
from kvcustody.audit.events import (
    Context,
    CustodyEnded,
    Event,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
    leaves,
)
from kvcustody.audit.runs import Run
from kvcustody.audit.store import open_store
from kvcustody.audit.writer import EventWriter, WriterSettings
from kvcustody.clock import SystemClock
from kvcustody.migrations.upgrade import upgrade

BATCH = 1000


def workload(residencies: int, blocks: int, *, scattered: bool, tenants: int = 32) -> list[Event]:
    """Residencies that open, release, end and are scrubbed, each with its own run of blocks."""
    chance = np.random.default_rng(7)
    events: list[Event] = [WorkerStarted(1, "bench", 1 << 20, 1, 65536, "cpu", "bench")]
    generation = 1
    for number in range(1, residencies + 1):
        indices = chance.integers(0, 1 << 20, blocks) if scattered else np.arange(blocks) + number
        run = (Run(indices, generation),)
        generation += blocks
        tenant = f"tenant-{number % tenants}"
        at = 1_000_000 + number * 100
        events += [
            ResidencyOpened(
                at,
                number,
                tenant,
                f"user-{number % 997}",
                f"chat-{number}",
                False,
                "internal",
                (1, 2),
                (),
                ("own-scope",),
                1,
                at + 10_000_000,
            ),
            ResidencyReleased(at + 20, number, tenant, "finish", run, at + 40),
            CustodyEnded(at + 40, tenant, "internal", run, "expired", at + 40, at + 40, at + 30, 1_000_000),
            ReceiptRecorded(
                at + 60,
                number,
                0,
                tenant,
                "memset",
                "cpu",
                blocks * 65536,
                at + 50,
                at + 60,
                "full",
                1.0,
                blocks,
                "ok",
                run,
            ),
        ]
    return events


def through_the_writer(path: Path, events: list[Event]) -> tuple[float, float]:
    """Seconds until everything is durable, and seconds that the submitting thread spent."""
    engine = open_store(path)
    upgrade(engine)
    settings = WriterSettings(batch=BATCH, capacity=1 << 22)
    writer = EventWriter(
        engine, worker="bench", clock=SystemClock(), spill_directory=path.parent, settings=settings
    )
    start = time.perf_counter()
    submitting = 0.0
    for first in range(0, len(events), BATCH):
        batch = events[first : first + BATCH]
        before = time.thread_time()
        writer.submit(batch)
        submitting += time.thread_time() - before
        if first % (8 * BATCH) == 0:
            writer.flush()  # an engine does other things than submit
    assert writer.flush(120)
    seconds = time.perf_counter() - start
    writer.close()
    engine.dispose()
    return seconds, submitting


def plain(source: Path, path: Path) -> float:
    """Seconds to insert the rows of `source`, table by table within each batch, with sqlite3 alone."""
    engine = open_store(path)
    upgrade(engine)
    engine.dispose()
    tables = ("events", "residencies", "releases", "custody_ends", "receipts", "subjects")
    reader = sqlite3.connect(source)
    rows = {name: reader.execute(f"SELECT * FROM {name}").fetchall() for name in tables}
    reader.close()
    batches = max(1, len(rows["events"]) // BATCH)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    start = time.perf_counter()
    for number in range(batches):
        connection.execute("BEGIN IMMEDIATE")
        for name, all_rows in rows.items():
            share = all_rows[len(all_rows) * number // batches : len(all_rows) * (number + 1) // batches]
            if share:
                marks = ", ".join("?" * len(share[0]))
                connection.executemany(f"INSERT INTO {name} VALUES ({marks})", share)
        connection.execute("COMMIT")
    seconds = time.perf_counter() - start
    connection.close()
    return seconds


def enqueue_microseconds(events: list[Event]) -> float:
    """What one event costs the submitting thread in batches of 16, the writer catching up every thousand events."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_store(Path(folder) / "ledger.db")
        upgrade(engine)
        writer = EventWriter(engine, worker="bench", clock=SystemClock(), spill_directory=Path(folder))
        seconds = 0.0
        for first in range(0, len(events), BATCH):
            batches = [
                events[start : start + 16] for start in range(first, min(first + BATCH, len(events)), 16)
            ]
            start = time.thread_time()
            for batch in batches:
                writer.submit(batch)
            seconds += time.thread_time() - start
            writer.flush(120)
        writer.close(120)
        engine.dispose()
    return seconds / len(events) * 1e6


def leaf_microseconds(events: list[Event]) -> float:
    """What turning one event into canonical bytes costs."""
    context = Context("0" * 32, 0, lambda tenant, subject, session="": "p")
    start = time.thread_time()
    for event in events:
        leaves(event, context, 1)
    return (time.thread_time() - start) / len(events) * 1e6


def coverage_seconds(path: Path) -> tuple[float, int]:
    """How long coverage of a whole ledger takes, and over how many units."""
    engine = open_store(path, read_only=True)
    start = time.perf_counter()
    with engine.connect() as connection:
        found = coverage(connection)
    seconds = time.perf_counter() - start
    assert found.total.coverage == 1.0, found.total
    return seconds, found.total.due


def main() -> None:
    """Print one JSON object with every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--residencies", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scattered", action="store_true")
    options = parser.parse_args()
    events = workload(options.residencies, options.blocks, scattered=options.scattered)
    ours, theirs, submitting = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            place = Path(folder) / str(number)
            place.mkdir()
            seconds, caller = through_the_writer(place / "writer.db", events)
            ours.append(seconds)
            submitting.append(caller)
            theirs.append(plain(place / "writer.db", place / "plain.db"))
        proof_seconds, units = coverage_seconds(Path(folder) / "0" / "writer.db")
    count = len(events)
    figures = {
        "events": count,
        "writer_events_per_s": round(count / min(ours)),
        "plain_sqlite3_events_per_s": round(count / min(theirs)),
        "ratio": round(min(theirs) / min(ours), 3),
        "enqueue_us_per_event": round(enqueue_microseconds(events), 3),
        "enqueue_us_per_event_while_writing": round(min(submitting) / count * 1e6, 3),
        "leaf_us_per_event": round(leaf_microseconds(events), 2),
        "coverage_units": units,
        "coverage_s": round(proof_seconds, 2),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
