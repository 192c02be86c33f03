"""A purge that streams its own export: how fast half a ledger goes, and what is left of it.

    python benchmarks/evidence/purge.py [--leaves 100000] [--tenants 20] [--database postgresql|sqlite] [--json FILE]

The ledger is written by the product's writer, with its projections and figures: residencies from opening to receipt,
half of them by a process that ended; the writer puts ends and receipts together, so there is about a leaf to each, with
four rows that are derived from it. That half is exported, read back and verified, and dropped (`purge_to`), in a
process of its own whose memory is reported; the server is on the same machine. `bytes_left` are rows of `tree_nodes`
over purged leaves, at what a row of it takes in a table that holds nothing else: over tiles that are gone whole, and
with the hashes in the tiles that still have leaves. Before and after, proofs of a sample of remaining leaves, and of
the first and last of a hundred logs, are made and checked under the same signed checkpoint, and have to be the same
bytes. `fsck` ends it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sqlite3
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, func, select

from kvcustody.audit.keep.streamed_purge import purge_to
from kvcustody.audit.kinds import WorkerStopped
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.monthly_partitions import create_partitions
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.store.schema.trees import tree_nodes
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import TILE_WIDTH
from kvcustody.audit.tlog.root_log import check_leaf
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock, VirtualClock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from ledger_stores import fresh_store, postgres
from ledger_workload import BATCH, workload

KEY = SigningKey.generate("ledger.example/purge")
JANUARY, FEBRUARY, MARCH = (int(datetime(2026, month, 1, tzinfo=UTC).timestamp()) * 1_000_000 for month in (1, 2, 3))
BLOCKS = 4
LOGS_MAX = 100  # whose first and last leaf is proved


def fill(engine: Engine, folder: Path, leaves: int, tenants: int) -> None:
    """Two processes of half the leaves each, the first of which ended."""
    with engine.connect() as connection, connection.begin():
        create_partitions(connection, JANUARY, 3)
    for name, begun in (("old", JANUARY), ("new", MARCH)):
        writer = EventWriter(
            engine,
            worker="bench",
            clock=VirtualClock(1, begun),
            spill_directory=folder / name,
            clear_names=True,
        )
        made = workload(leaves // 2, BLOCKS, scattered=False, tenants=tenants)
        for first in range(0, len(made), BATCH):
            writer.submit(made[first : first + BATCH])
            assert writer.flush(600)
        writer.submit([WorkerStopped(made[-1].at_us + 1, "bench", "stopped", 0, (0,))])
        assert writer.flush(600)
        writer.close()
        assert not writer.status().spilled_bytes
    assert CheckpointSigner(engine, [KEY], memory=folder / "signed", clock=SystemClock()).sign_once()


def proofs(engine: Engine, logs: dict[str, int], samples: int, as_of: int) -> dict[tuple[str, int], bytes]:
    """Checked proofs of remaining leaves: the first ones of each log, and a sample."""
    chance = random.Random(4)
    by_leaf = {}
    with engine.connect() as connection:
        stored = LedgerProofs(connection)
        sizes = stored.sizes(as_of)
        names = sorted(logs)
        some = chance.sample(names, min(len(names), LOGS_MAX))
        places = [(log, idx) for log in some for idx in (logs[log], sizes[log] - 1)]
        for _ in range(samples):
            log = chance.choice(names)
            places.append((log, chance.randrange(logs[log], sizes[log])))
        for log, idx in dict.fromkeys(places):
            leaf, proof = stored.proven(log, idx, as_of=as_of)
            check_leaf(proof, leaf, [KEY.verifier])
            by_leaf[log, idx] = proof.to_bytes()
    return by_leaf


def server_seconds(engine: Engine) -> float:
    """Processor time of the whole server so far, of its ended backends too; 0 for a file."""
    if engine.dialect.name != "postgresql":
        return 0.0
    with engine.connect() as connection:
        backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    postmaster = int(_stat(backend)[1])
    all_of_it = [_stat(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    live = [each for each in all_of_it if each and int(each[1]) == postmaster]
    ticks = sum(int(each[n]) for each in live for n in (11, 12)) + sum(map(int, _stat(postmaster)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_peak_mib() -> int:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) // 1024


def _stat(process: object) -> list[str]:
    """The fields of a process's `stat` from its state on; none where it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def purged(target: str, folder: Path, key: str, jobs: int) -> dict[str, Any]:
    """The purge, in a process of its own."""
    engine = open_store(target, timeout_seconds=60)
    idle = memory_peak_mib()
    server = server_seconds(engine)
    begun, busy = time.perf_counter(), time.process_time()
    phases: dict[str, float] = {}

    def tell(what: str, done: int, total: int) -> None:
        phases[what] = round(time.perf_counter() - begun, 2)

    people = {"actor": "ops", "approver": "dpo", "reason": "benchmark"}
    purge = purge_to(engine, FEBRUARY, folder, [key], jobs=jobs, progress=tell, **people)
    took = time.perf_counter() - begun
    leaves = sum(plan.leaves for plan in purge.plans)
    return {
        "leaves": leaves,
        "logs": len(purge.plans),
        "parts": len(purge.parts),
        "seconds": round(took, 2),
        "leaves_per_second": round(leaves / took),
        "processor_us_a_leaf": round((time.process_time() - busy) / leaves * 1e6, 1),
        "processor_us_a_leaf_of_the_server": round((server_seconds(engine) - server) / leaves * 1e6, 1),
        "last_of_each_phase_s": phases,
        "memory_peak_mib": memory_peak_mib(),
        "memory_before_it_mib": idle,
        "export_mb": round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6, 1),
    }


def bytes_a_row(connection: Connection, folder: Path) -> float:
    """What a row of `tree_nodes` takes on disk, its key included, in a table of as many."""
    if connection.dialect.name == "postgresql":
        run = connection.exec_driver_sql
        run("CREATE TABLE measured (LIKE tree_nodes INCLUDING ALL)")
        run("INSERT INTO measured SELECT 1, 0, n, sha256(n::text::bytea) FROM generate_series(1, 100000) AS n")
        size = int(run("SELECT pg_total_relation_size('measured')").scalar() or 0)
        connection.rollback()
        return size / 100_000
    made = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = 'tree_nodes'").scalar_one()
    with sqlite3.connect(folder / "measured.db") as other:
        other.execute(made)
        other.executemany("INSERT INTO tree_nodes VALUES (1, 0, ?, randomblob(32))", ((n,) for n in range(100_000)))
    return (folder / "measured.db").stat().st_size / 100_000


def left(engine: Engine, folder: Path, purged_leaves: int) -> dict[str, Any]:
    """Rows of `tree_nodes` over leaves that are gone, and their bytes a leaf."""
    column = tree_nodes.c
    with engine.connect() as connection:
        bare = standing = whole = 0
        firsts = select(events.c.log, func.min(events.c.idx)).group_by(events.c.log)
        for log, below in connection.execute(firsts).all():
            whole += below // TILE_WIDTH * TILE_WIDTH
            for level, over in ((0, 1), (1, 256), (2, 65536), (16, 16), (17, 4096)):
                there = (column.log == log, column.level == level)
                tiles = below // TILE_WIDTH * TILE_WIDTH // over
                query = select(func.count()).select_from(tree_nodes).where(*there)
                bare += connection.scalar(query.where(column.idx < tiles)) or 0
                standing += connection.scalar(query.where(column.idx >= tiles, column.idx < below // over)) or 0
        row_bytes = bytes_a_row(connection, folder)
    return {
        "bytes_a_row": round(row_bytes, 1),
        "leaves_in_tiles_that_are_gone": whole,
        "bytes_left_a_leaf_in_those": round(bare * row_bytes / max(1, whole), 3),
        "bytes_left_a_leaf_of_all": round((bare + standing) * row_bytes / purged_leaves, 3),
        "bytes_a_leaf_by_its_own_hash": round(row_bytes, 1),
    }


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "SQLAlchemy", "psycopg", facts="hardware")
    bench.add("--leaves", type=int, default=100_000)
    bench.add("--tenants", type=int, default=20)
    bench.add("--jobs", type=int, default=2)
    bench.add("--samples", type=int, default=2000)
    bench.add("--database", choices=("postgresql", "sqlite"), default="postgresql")
    options = bench.parse()
    with ExitStack() as stack:
        uri = stack.enter_context(postgres()) if options.database == "postgresql" else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = fresh_store(uri, folder, "purge")
        begun = time.perf_counter()
        fill(engine, folder, options.leaves, options.tenants)
        figures: dict[str, Any] = {"leaves": options.leaves, "tenants": options.tenants, "jobs": options.jobs}
        figures |= {"database": options.database, "fill_s": round(time.perf_counter() - begun, 1)}
        with engine.connect() as connection:
            size = LedgerProofs(connection).signed().size
            sizes = LedgerProofs(connection).sizes(size)
        assert sum(sizes.values()) >= options.leaves
        half = {log: count // 2 for log, count in sizes.items() if log != "system"}
        before = proofs(engine, half, options.samples, size)
        target = engine.url.render_as_string(False) if uri else str(folder / "purge.db")
        engine.dispose()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            asked = (target, folder / "export", str(KEY.verifier), options.jobs)
            figures["purge"] = pool.submit(purged, *asked).result()
        assert proofs(engine, half, options.samples, size) == before
        figures["proofs_the_same"] = len(before)
        figures["tree_nodes"] = left(engine, folder, figures["purge"]["leaves"])
        with engine.connect() as connection:
            report = fsck(connection, keys=[KEY.verifier])
        assert report.ok, report.problems[:3]
        figures["fsck"] = {"ok": report.ok, "purged": report.purged, "segmented": report.segmented}
        engine.dispose()
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
