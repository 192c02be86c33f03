"""Several writer processes on one PostgreSQL ledger against one, from each writer's second thousand of events.

Each has tenants of its own; on SQLite, writers take turns.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from kvcustody.audit.kinds import Event
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events as events_table
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
from kvcustody.clock import SystemClock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import alternate
from ledger_stores import fresh_store
from ledger_workload import BATCH, workload


def one_of_many(place: str, uri: str, name: str, events: list[Event], start: Any, ended: Any) -> None:
    """A process with a writer of its own; all begin together, when each has written its first thousand events."""
    engine = open_store(uri, timeout_seconds=60)
    settings = WriterSettings(batch=BATCH, capacity=1 << 22)
    folder = Path(place) / name
    folder.mkdir()
    writer = EventWriter(
        engine, worker=name, clock=SystemClock(), spill_directory=folder, settings=settings, clear_names=True
    )
    writer.submit(events[:BATCH])  # logs are made and statements prepared once, not in a steady state
    assert writer.flush(300)
    start.wait()
    for first in range(BATCH, len(events), BATCH):
        writer.submit(events[first : first + BATCH])
    assert writer.flush(300)
    ended.wait()
    writer.close()


def events_per_second(folder: Path, uri: str, writers: int, residencies: int) -> float:
    """What so many worker processes write into one PostgreSQL ledger together; each has tenants of its own."""
    engine = fresh_store(uri, folder, f"scale_{writers}_{time.monotonic_ns()}")
    url = engine.url.render_as_string(False)
    spawn = multiprocessing.get_context("spawn")
    start, ended = spawn.Barrier(writers + 1), spawn.Barrier(writers + 1)
    processes, count = [], 0
    for number in range(writers):
        own = workload(residencies // writers, 100, scattered=False, of=f"-of-{number}")
        count += len(own) - BATCH
        name = f"writer-{number}-{time.monotonic_ns()}"
        processes.append(spawn.Process(target=one_of_many, args=(str(folder), url, name, own, start, ended)))
        processes[-1].start()
    start.wait(300)
    begun = time.perf_counter()
    ended.wait(300)
    seconds = time.perf_counter() - begun
    for process in processes:
        process.join()
        assert process.exitcode == 0
    with engine.connect() as connection:
        for log, size in connection.execute(select(logs.c.id, logs.c.size)):  # gapless, or nothing is measured
            query = select(func.count(), func.min(events_table.c.idx), func.max(events_table.c.idx))
            found = tuple(connection.execute(query.where(events_table.c.log == log)).one())
            assert found == (size, 0, size - 1)
    engine.dispose()
    return count / seconds


def four_to_one(folder: Path, uri: str, residencies: int, pairs: int) -> dict[str, Any]:
    """Four writer processes against one, each pair one after the other with the same number of events in all."""
    sides = {str(count): partial(events_per_second, folder, uri, count, residencies) for count in (4, 1)}
    four, one = alternate(sides, pairs).values()
    ratios = [many / alone for many, alone in zip(four, one, strict=True)]
    return {
        "one_writer_events_per_s": round(max(one)),
        "four_writers_events_per_s": round(max(four)),
        "four_writers_to_one": round(statistics.median(ratios), 3),
        "pairs": [round(ratio, 3) for ratio in ratios],
    }
