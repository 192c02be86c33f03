"""The ledger's price: events through the writer against the same rows through the plain driver, in the same run.

Both sides write identical rows to the same tables with the same indexes and the same settings (SQLite: WAL,
synchronous=FULL, the same cache; PostgreSQL: synchronous commit), in batches of 1,000. The plain side has the rows
ready, encoded, and writes them with `executemany`, or with binary COPY on PostgreSQL, there without the trigger that
keeps leaves at their places; its write-ahead log is copied when SQLite does it by itself, every 1,000 pages. The
writer's side starts from event tuples and adds what makes it a ledger: the queue and its thread, canonical leaf
bytes, pseudonyms, contiguous idx, projections, trees, the root log and its checkpoints; events come in batches of
1,000 too, at most eight thousand wait, and where several batches do it commits up to four together. What is there
before a side begins (events, rows) is frozen out of garbage collection on both sides, as engines do with what they
have loaded. Rounds alternate, so that a busy machine slows both; a ratio is the median over pairs of rounds. `cpu` is
processor time of the whole process: with other work on the machine it is the steadier figure, but it counts as cost
what the writer does on a second core while a commit runs. Four writers and one are separate processes on one
PostgreSQL server, measured from each writer's second thousand of events; on SQLite, writers take turns.
Run: `python benchmarks/ledger.py [--rounds 5] [--postgres] [--engine 9] [--out benchmarks/results/ledger-cpu.json]`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.kinds import Event
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.leaf.merkle import leaf_hashes
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
from kvcustody.clock import SystemClock
from kvcustody.migrations.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).resolve().parent / "evidence"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "fleet"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench, frozen
from ledger_cost import compared, prompts
from ledger_stores import fresh_store, postgres
from ledger_workload import BATCH, workload
from many_writers import four_to_one
from plain_driver import Cost, plain, rows_of


def through_the_writer(engine: Engine, folder: Path, events: list[Event]) -> Cost:
    """The cost until everything is durable, and what the submitting thread spent of it."""
    settings = WriterSettings(batch=BATCH, capacity=1 << 22)
    writer = EventWriter(
        engine,
        worker="bench",
        clock=SystemClock(),
        spill_directory=folder,
        settings=settings,
        clear_names=True,
    )
    start, cpu = time.perf_counter(), time.process_time()
    submitting = 0.0
    for first in range(0, len(events), BATCH):
        batch = events[first : first + BATCH]
        before = time.thread_time()
        writer.submit(batch)
        submitting += time.thread_time() - before
        while writer.status().backlog > 8 * BATCH:
            time.sleep(0.001)  # an engine does other things than submit
    assert writer.flush(120)
    spent = Cost(time.perf_counter() - start, time.process_time() - cpu, submitting)
    writer.close()
    return spent


def enqueue_microseconds(events: list[Event]) -> float:
    """What one event costs the submitting thread in batches of 16, the writer catching up every thousand events."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_store(Path(folder) / "ledger.db")
        upgrade(engine)
        writer = EventWriter(
            engine, worker="bench", clock=SystemClock(), spill_directory=Path(folder), clear_names=True
        )
        seconds = 0.0
        for first in range(0, len(events), BATCH):
            batches = [events[start : start + 16] for start in range(first, min(first + BATCH, len(events)), 16)]
            start = time.thread_time()
            for batch in batches:
                writer.submit(batch)
            seconds += time.thread_time() - start
            writer.flush(120)
        writer.close(120)
        engine.dispose()
    return seconds / len(events) * 1e6


def leaf_microseconds(events: list[Event]) -> dict[str, float]:
    """What one event costs on its way to a leaf; its leaf's hash; its leaf's check where a worker hands it in."""
    context = Context("0" * 32, 0, lambda tenant, subject, session="": "p")
    items = list(enumerate(events, 1))
    batches = [items[first : first + BATCH] for first in range(0, len(items), BATCH)]
    encoder = BatchEncoder(context)
    done = [encoder.encode(batch).batch for batch in batches]

    def cost(act: Callable[[], Any]) -> float:
        start = time.thread_time()
        act()
        return round((time.thread_time() - start) / len(events) * 1e6, 2)

    return {
        "leaf_in_a_batch_us": cost(lambda: [encoder.encode(batch) for batch in batches]),
        "leaf_hash_us": cost(lambda: [leaf_hashes(batch.data) for batch in done]),
        "leaf_check_us": cost(lambda: [read_leaves(batch.data, canonical=True) for batch in done]),
    }


def coverage_seconds(path: Path) -> tuple[float, int]:
    """How long coverage of a whole ledger takes, and over how many units."""
    engine = open_store(path, read_only=True)
    start = time.perf_counter()
    with engine.connect() as connection:
        found = coverage(connection)
    seconds = time.perf_counter() - start
    assert found.total.coverage == 1.0, found.total
    return seconds, found.total.due


def paired(events: list[Event], folder: Path, rounds: int, uri: str | None) -> list[tuple[Cost, Cost]]:
    """What the ledger and the plain driver cost, one after the other, several times."""
    pairs = []
    for number in range(rounds):
        place = folder / str(number)
        place.mkdir()
        ours, theirs = (fresh_store(uri, place, f"{name}_{number}") for name in ("writer", "plain"))
        with frozen():
            spent = through_the_writer(ours, place, events)
        rows = rows_of(ours)
        with frozen():
            pairs.append((spent, plain(theirs, rows)))
        copied = rows_of(theirs)
        for table, every in rows.items():  # the same rows, or nothing is compared
            assert sorted(every, key=repr) == sorted(copied[table], key=repr), table.name
        ours.dispose()
        theirs.dispose()
    return pairs


def summary(pairs: list[tuple[Cost, Cost]], count: int) -> dict[str, float]:
    """Rates of the best rounds, ratios as medians over pairs."""
    return {
        "writer_events_per_s": round(count / min(ours.wall for ours, _ in pairs)),
        "plain_events_per_s": round(count / min(theirs.wall for _, theirs in pairs)),
        "ratio": round(statistics.median(theirs.wall / ours.wall for ours, theirs in pairs), 3),
        "best_ratio": round(max(theirs.wall / ours.wall for ours, theirs in pairs), 3),
        "cpu_ratio": round(statistics.median(theirs.cpu / ours.cpu for ours, theirs in pairs), 3),
        "writer_cpu_us": round(min(ours.cpu for ours, _ in pairs) / count * 1e6, 1),
        "plain_cpu_us": round(min(theirs.cpu for _, theirs in pairs) / count * 1e6, 1),
        "enqueue_us_while_writing": round(min(ours.submitting for ours, _ in pairs) / count * 1e6, 3),
    }


def main() -> None:
    """Print one JSON object with every figure; times and costs are for one event."""
    bench = Bench(__doc__, "SQLAlchemy", "psycopg", "orjson", "numpy", rounds=5, facts="hardware")
    bench.add("--residencies", type=int, default=10_000)
    bench.add("--blocks", type=int, default=100)
    bench.add("--scattered", action="store_true")
    bench.add("--postgres", action="store_true")
    bench.add("--engine", type=int, default=0, help="pairs of `ledger_cost.py`, here too")
    options = bench.parse()
    events = workload(options.residencies, options.blocks, scattered=options.scattered)
    figures: dict[str, Any] = {
        "events": len(events),
        "batch": BATCH,
        "same_rows": "identical rows, columns, tables, indexes and settings; the plain side has the rows ready",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures["sqlite"] = summary(paired(events, folder, options.rounds, None), len(events))
        proof_seconds, units = coverage_seconds(folder / "0" / "writer_0.db")
        if options.postgres:
            with postgres() as uri:
                (folder / "postgres").mkdir()
                found = paired(events, folder / "postgres", options.rounds, uri)
                figures["postgresql"] = summary(found, len(events))
                pairs = max(1, options.rounds // 2)
                figures["postgresql"] |= four_to_one(folder, uri, 2 * options.residencies, pairs)
    figures["enqueue_us"] = round(enqueue_microseconds(events), 3)
    figures |= leaf_microseconds(events)
    if options.engine:
        trace = prompts(150)
        figures["engine_steps_of_ms"] = {
            f"{step_ms:g}": compared(trace, step_ms, options.engine) for step_ms in (0.0, 20.0)
        }
    figures |= {"coverage_units": units, "coverage_s": round(proof_seconds, 2)}
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
