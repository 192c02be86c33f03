"""What openings of many subjects cost as a SQLite ledger grows, and what it costs to find a subject's again.

Two ledgers take the same batches in turns, from empty to `--leaves`: one whose index of residencies by subject has
spans (`by_subject`, B2), and one with the index that was before (tenant, subject). A transaction is seven batches of
1,000 openings, each of another worker; who opens is drawn at random. By tenths of the run: processor and elapsed time
for a leaf in each, and the first to the second. At the end, the bytes that the system writes for a leaf, copies of the
write-ahead log included, and the time of one look-up.
Run: `python benchmarks/evidence/openings.py [--leaves 840000] [--json benchmarks/results/openings-cpu.json]`.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Engine, select

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.evidence.subjects.subject_filter import of_subjects
from kvcustody.audit.kinds import ResidencyOpened, WorkerStarted
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch import LeafBatch
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.write.committer import Committer
from kvcustody.migrations.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, frozen

TENANTS, SUBJECTS = 50, 20_000
WORKERS, TOGETHER, BATCH = 24, 7, 1000
TENTHS = 10
BEFORE = (
    "DROP INDEX ix_residencies_log_subject",
    "CREATE INDEX ix_residencies_tenant_subject ON residencies (tenant, subject)",
)


class Group(NamedTuple):
    """What one transaction takes."""

    batches: list[LeafBatch]
    names: list[Any]


class Ledger:
    """One ledger, and what its transactions took."""

    def __init__(self, folder: Path, name: str, statements: tuple[str, ...]) -> None:
        self.engine: Engine = open_store(folder / f"{name}.db", timeout_seconds=30.0)
        upgrade(self.engine)
        with self.engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
            connection.commit()
        self.committer = Committer(self.engine, SubjectDirectory(clear_names=True))
        self.cpu: list[float] = []  # µs a leaf
        self.wall: list[float] = []

    def take(self, group: Group) -> None:
        """Commit a group."""
        cpu, wall = time.thread_time(), time.perf_counter()
        added = self.committer.write(group.batches[0], rest=group.batches[1:], given=group.names)
        self.cpu.append((time.thread_time() - cpu) / added * 1e6)
        self.wall.append((time.perf_counter() - wall) / added * 1e6)

    def copied(self) -> int:
        """Everything is in the file; what this process has written so far, in bytes."""
        with self.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
        return int(Path("/proc/self/io").read_text().split("write_bytes: ")[1].split()[0])


def groups(leaves: int) -> Iterator[Group]:
    """Batches of workers in turns, encoded when asked for."""
    draw = random.Random(5)
    encoders, directories, reached = [], [], [0] * WORKERS
    for _ in range(WORKERS):
        directories.append(SubjectDirectory(clear_names=True))
        encoders.append(BatchEncoder(Context(uuid.uuid4().hex, 1_790_000_000_000_000, directories[-1])))
    for number in range(leaves // (TOGETHER * BATCH)):
        batches, names = [], []
        for each in range(TOGETHER):
            worker = (number * TOGETHER + each) % WORKERS
            first, reached[worker] = reached[worker] + 1, reached[worker] + BATCH
            items = [(place, _event(worker, place, draw)) for place in range(first, first + BATCH)]
            batches.append(encoders[worker].encode(items).batch)
            fresh = directories[worker].fresh()
            directories[worker].settle(fresh)
            names += fresh
        yield Group(batches, names)


def _event(worker: int, place: int, draw: random.Random) -> Any:
    if place == 1:
        return WorkerStarted(1, f"w{worker}", 1000, 1, 4096, "cpu", "benchmark")
    who = draw.randrange(SUBJECTS)
    run = Run(np.arange(4, dtype=np.int64), 4 * place)
    return ResidencyOpened(
        place, place, f"tenant-{who % TENANTS}", f"user-{who}", None, False, "internal", (), (), ("own-scope",), 1,
        place + 10**9, (run,),
    )  # fmt: skip


def tenths(ledgers: dict[str, Ledger]) -> list[dict[str, Any]]:
    """The medians of each tenth of the run."""
    rows = []
    count = len(next(iter(ledgers.values())).cpu)
    for tenth in range(TENTHS):
        part = slice(tenth * count // TENTHS, (tenth + 1) * count // TENTHS)
        row: dict[str, Any] = {"leaves": (part.stop or 0) * TOGETHER * BATCH}
        for name, ledger in ledgers.items():
            row[f"{name}_cpu_us"] = round(statistics.median(ledger.cpu[part]), 1)
            row[f"{name}_wall_us"] = round(statistics.median(ledger.wall[part]), 1)
        row["ratio"] = round(row["spans_cpu_us"] / row["subjects_cpu_us"], 2)
        rows.append(row)
    return rows


def look_ups(ledger: Ledger, spans: bool) -> dict[str, float]:
    """Milliseconds to find the residencies of one pseudonym, of a hundred of one tenant; how many it has."""
    column, times, counts = residencies.c, [], []
    with ledger.engine.connect() as connection:
        some = select(column.subject).where(column.tenant == "tenant-7", column.subject.is_not(None))
        names = list(connection.scalars(some.distinct().limit(100)))
        for name in names:
            begun = time.perf_counter()
            where = (
                of_subjects(connection, "tenant-7", [name])
                if spans
                else [column.tenant == "tenant-7", column.subject == name]
            )
            counts.append(len(connection.execute(select(column.opened_us).where(*where)).all()))
            times.append(time.perf_counter() - begun)
    return {"median_ms": round(1000 * statistics.median(times), 2), "found": statistics.median(counts)}


def main() -> None:
    bench = Bench(__doc__, "SQLAlchemy", facts="hardware")
    bench.add("--leaves", type=int, default=840_000)
    options = bench.parse()
    figures: dict[str, Any] = {"leaves": options.leaves}
    with tempfile.TemporaryDirectory(prefix="kvcustody-openings-") as text:
        ledgers = {
            "spans": Ledger(Path(text), "spans", ()),
            "subjects": Ledger(Path(text), "subjects", BEFORE),
        }
        some = groups(options.leaves + 5 * TOGETHER * BATCH)
        for number in range(options.leaves // (TOGETHER * BATCH)):
            group = next(some)
            with frozen():
                for ledger in list(ledgers.values())[:: 1 if number % 2 else -1]:
                    ledger.take(group)
        figures["tenths"] = tenths(ledgers)
        for row in figures["tenths"]:
            print(row, flush=True)
        last = list(some)
        for name, ledger in ledgers.items():
            before = ledger.copied()
            for group in last:
                ledger.take(group)
            written = (ledger.copied() - before) / (len(last) * TOGETHER * BATCH)
            figures[name] = {
                "written_bytes_a_leaf": round(written),
                "look_up": look_ups(ledger, name == "spans"),
            }
            print(name, figures[name], flush=True)
            ledger.committer.close()
            ledger.engine.dispose()
    bench.keep(figures)


if __name__ == "__main__":
    main()
