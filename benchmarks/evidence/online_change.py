"""An online change of a large ledger: how long a worker and a reader wait for it, and how long it takes.

    python benchmarks/evidence/online_change.py [--leaves 100000] [--months 20] [--json FILE]

The ledger is PostgreSQL's, in months, with roles and row walls. Its `residencies` lack a column and an index, which
a revision that is made for this gives them. A worker hands in batches of twenty events, and a reader asks as one tenant
for that tenant's newest requests, each in a process of its own: first while nothing happens, then while `upgrade` runs.
The longest hand-in and read are reported, with the median, how many reads failed, and how many bytes were spilled.
Proofs of a sample of leaves under one signed checkpoint are compared byte by byte before and after, and `fsck` ends it.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.kinds import WorkerStopped
from kvcustody.audit.store.database import engine as store
from kvcustody.audit.store.database import open_changes
from kvcustody.audit.store.database.engine import SCHEMA_REVISION, open_store
from kvcustody.audit.store.database.monthly_partitions import create_partitions, months_from
from kvcustody.audit.store.database.postgres_roles import set_up_roles
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.audit.store.schema.trees import signed_checkpoints
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.governance.service.row_level_security import restrict_to_tenant
from kvcustody.migrations import upgrade as upgrading

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from ledger_stores import fresh_store, postgres
from ledger_workload import BATCH, workload

KEY = SigningKey.generate("ledger.example/change")
START_US = 1_704_067_200_000_000  # 2024-01-01
BLOCKS, TENANTS = 4, 20
NEXT = f"{int(SCHEMA_REVISION) + 1:04d}"
REVISION = f"""
revision, down_revision, ONLINE = "{NEXT}", "{SCHEMA_REVISION}", ("residencies",)


def upgrade() -> None:
    pass
"""
TAKEN = ("DROP INDEX ix_residencies_log_subject", "ALTER TABLE residencies DROP COLUMN revision")
PAUSE_SECONDS = 0.02
FORK = multiprocessing.get_context("fork")


def fill(engine: Engine, folder: Path, leaves: int, months: int) -> None:
    """A process a month, each of as many leaves."""
    with engine.connect() as connection, connection.begin():
        create_partitions(connection, START_US, months)
    for number, month in enumerate(months_from(START_US, months)):
        assert month.first_us is not None
        clock = VirtualClock(1, month.first_us)
        events = workload(leaves // months, BLOCKS, scattered=False, tenants=TENANTS)
        with EventWriter(
            engine, worker="bench", clock=clock, spill_directory=folder / str(number), clear_names=True
        ) as writer:
            for first in range(0, len(events), BATCH):
                writer.submit(events[first : first + BATCH])
                assert writer.flush(600)
            writer.submit([WorkerStopped(events[-1].at_us + 1, "bench", "stopped", 0, (0,))])
            assert writer.flush(600)
    assert CheckpointSigner(engine, [KEY], memory=folder / "signed", clock=SystemClock()).sign_once()


def become_next(folder: Path) -> None:
    """From here on this process, and those that it forks, are the program of the next revision."""
    shutil.copytree(upgrading.VERSIONS, folder / "versions")
    (folder / "versions" / f"{NEXT}_next.py").write_text(REVISION)
    upgrading.VERSIONS = folder / "versions"
    store.SCHEMA_REVISION = open_changes.SCHEMA_REVISION = NEXT


class Repeated:
    """A process that does something again and again, and says how long each time took."""

    def __init__(self, work: Callable[[Any, Any], None], *given: Any) -> None:
        self._end = FORK.Event()
        self._answer, sending = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=work, args=(self._end, sending, *given))
        self._process.start()

    def figures(self) -> dict[str, Any]:
        """End it: the longest and the median in milliseconds, and what else it counted."""
        self._end.set()
        taken, counted = self._answer.recv()
        self._process.join()
        return {
            "times": len(taken),
            "longest_ms": round(max(taken) * 1e3, 1),
            "median_ms": round(median(taken) * 1e3, 1),
            **counted,
        }


def hand_in(end: Any, answer: Any, url: str, folder: Path) -> None:
    """Batches of a worker; what waited for the spill is counted as spilled."""
    engine, taken, spilled, number = open_store(url), [], 0, 0
    made = workload(20_000, BLOCKS, scattered=False, tenants=TENANTS)
    with EventWriter(engine, worker="bench", clock=SystemClock(), spill_directory=folder, clear_names=True) as writer:
        while not end.is_set():
            begun = time.perf_counter()
            writer.submit(made[number : number + 20])
            assert writer.flush(60)
            taken.append(time.perf_counter() - begun)
            number += 20
            spilled = max(spilled, writer.status().spilled_bytes)
            time.sleep(PAUSE_SECONDS)
    answer.send((taken, {"spilled_bytes": spilled}))


def ask(end: Any, answer: Any, url: str) -> None:
    """A tenant's newest requests, behind the row walls."""
    engine, taken, failed = open_store(url, read_only=True), [], 0
    newest = select(residencies.c.residency).order_by(residencies.c.opened_us.desc()).limit(20)
    while not end.is_set():
        begun = time.perf_counter()
        try:
            with engine.connect() as connection, connection.begin():
                restrict_to_tenant(connection, "tenant-1")
                connection.execute(newest).all()
        except SQLAlchemyError:
            failed += 1
        taken.append(time.perf_counter() - begun)
        time.sleep(PAUSE_SECONDS)
    answer.send((taken, {"failed": failed}))


def proofs(engine: Engine, as_of: int, samples: int = 200) -> list[bytes]:
    """Proofs of a sample of leaves under one root."""
    chance = random.Random(4)
    with engine.connect() as connection:
        stored = LedgerProofs(connection)
        sizes = sorted(item for item in stored.sizes(as_of).items() if item[1])
        places = [chance.choice(sizes) for _ in range(samples)]
        return [stored.proven(log, chance.randrange(size), as_of=as_of)[1].to_bytes() for log, size in places]


def quiet(url: str, folder: Path, seconds: float) -> dict[str, Any]:
    """What a worker and a reader meet while nothing happens."""
    worker, reader = Repeated(hand_in, url, folder), Repeated(ask, url)
    time.sleep(seconds)
    return {"hand_in": worker.figures(), "read": reader.figures()}


def changing(engine: Engine, url: str, folder: Path) -> dict[str, Any]:
    """What they meet during a change. The worker is of the next version: it may start once the change is open."""
    steps: dict[str, float] = {}
    workers: list[Repeated] = []
    reader = Repeated(ask, url)
    time.sleep(1.0)
    begun = time.perf_counter()

    def reached(step: str) -> None:
        steps[step] = round(time.perf_counter() - begun, 2)
        if step == "opened":
            workers.append(Repeated(hand_in, url, folder))

    upgrading.upgrade(engine, leaves_max=None, step=reached)
    time.sleep(1.0)
    return {
        "opened_seconds": steps["opened"],
        "copied_seconds": round(steps["copied"] - steps["opened"], 2),
        "compared_seconds": round(steps["compared"] - steps["copied"], 2),
        "swapped_seconds": round(steps["swapped"] - steps["compared"], 2),
        "hand_in": workers[0].figures(),
        "read": reader.figures(),
    }


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "SQLAlchemy", "psycopg", facts="hardware")
    bench.add("--leaves", type=int, default=100_000)
    bench.add("--months", type=int, default=20)
    bench.add("--quiet-seconds", type=float, default=5.0, help="without a change (default: %(default)s)")
    options = bench.parse()
    with postgres() as uri, tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        engine = fresh_store(uri, folder, "online")
        url = engine.url.render_as_string(hide_password=False)
        set_up_roles(engine)
        fill(engine, folder, options.leaves, options.months)
        figures: dict[str, Any] = {"months": options.months}
        engine.dispose()
        figures["quiet"] = quiet(url, folder / "quiet", options.quiet_seconds)
        with engine.begin() as connection:
            figures["leaves"] = sum(connection.scalars(select(logs.c.size)))
            as_of = connection.scalar(select(func.max(signed_checkpoints.c.size)))
            assert as_of is not None
            for statement in TAKEN:
                connection.exec_driver_sql(statement)
        before = proofs(engine, as_of)
        become_next(folder)
        engine.dispose()
        figures["changing"] = changing(engine, url, folder / "changing")
        figures["proofs_equal"] = proofs(engine, as_of) == before
        with engine.connect() as connection:
            figures["fsck_problems"] = len(fsck(connection).problems)
        engine.dispose()
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
