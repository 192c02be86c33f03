"""How long `fsck` takes, and what memory and temporary disk: a whole ledger, and one of which 40 % was purged.

    python benchmarks/evidence/fsck_scale.py                                   # 100,000 leaves, both databases
    python benchmarks/evidence/fsck_scale.py --leaves 1000000 --against f6818e1f --json FILE
    python benchmarks/evidence/fsck_scale.py --leaves 20000 --lives 1205 --purged 0

1. The product's writer fills each ledger with `--leaves` residencies, of a leaf or somewhat more each, from `--lives`
   processes, one after the other. Those of the first 40 % ended in January and are purged (`purge_to`), on PostgreSQL
   by months. The others are of March.
2. Each check is a process of its own; on PostgreSQL it acts as the auditor's role. Checks of the two ledgers, and of
   both sides under `--against`, take turns. The median of the rounds counts.
3. `memory_mib` is the peak of the checking process. `temporary_mib` is the most that its temporary files took at once
   (SQLite), or all that its queries wrote to temporary files (PostgreSQL).
4. `--against COMMIT` measures that commit's code as well, on ledgers that its own writer filled.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).resolve().parents[1]
JANUARY, FEBRUARY, MARCH = (int(datetime(2026, month, 1, tzinfo=UTC).timestamp()) * 1_000_000 for month in (1, 2, 3))
BLOCKS, TENANTS = 4, 20
KEY_SEED = bytes(range(32))


# -- in a process of the measured code ---------------------------------------------------------------------------


def module(name: str) -> Any:
    """A module of the measured code, under the name that it has now."""
    return import_module(f"kvcustody.{name}")


def verify_code() -> None:
    """Stop where the code is another tree's than PYTHONPATH names."""
    found, wanted = import_module("kvcustody.errors").__file__, os.environ["PYTHONPATH"].split(os.pathsep)[0]
    if not str(found).startswith(wanted):
        raise RuntimeError(f"`{found}` is measured, and not the code in `{wanted}`")


def key() -> Any:
    signing, kinds = module("audit.tlog.signing_key"), module("audit.tlog.signed_note")
    return signing.SigningKey.from_seed("ledger.example/fsck", kinds.KeyKind.ED25519, KEY_SEED)


def fill(target: str, folder: Path, leaves: int, lives: int, purged: int) -> dict[str, Any]:
    """A ledger of so many residencies, of which so many percent are gone; how many leaves there were and are."""
    engine = module("audit.store.database.engine").open_store(target, timeout_seconds=60)
    module("migrations.upgrade").upgrade(engine)
    if engine.dialect.name == "postgresql":
        with engine.begin() as connection:
            module("audit.store.database.monthly_partitions").create_partitions(connection, JANUARY, 3)
        module("audit.store.database.postgres_roles").set_up_roles(engine)
    old = max(1, lives * purged // 100) if purged else 0
    for number in range(lives):
        share = leaves * purged // 100 // old if number < old else leaves * (100 - purged) // 100 // (lives - old)
        _live(engine, folder, number, JANUARY if number < old else MARCH, share)
    clock = module("clock").SystemClock()
    signer = module("audit.tlog.checkpoint_signer").CheckpointSigner(
        engine, [key()], memory=folder / "signed", clock=clock
    )
    assert signer.sign_once()
    before = _count(engine)
    if purged:
        purge_to = module("audit.keep.streamed_purge").purge_to
        people = {"actor": "ops", "approver": "dpo", "reason": "benchmark"}
        purge_to(engine, FEBRUARY, folder / "export", [str(key().verifier)], **people)
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")
    after = _count(engine)
    engine.dispose()
    return {"leaves": before, "leaves_left": after}


def _live(engine: Any, folder: Path, number: int, begun_us: int, leaves: int) -> None:
    """A process from its start to its stop, with at least so many leaves."""
    from ledger_workload import BATCH, workload

    writer = module("audit.write.event_writer").EventWriter(
        engine,
        worker="bench",
        clock=module("clock").VirtualClock(1, begun_us + number),
        spill_directory=folder / f"spill-{number}",
        clear_names=True,
    )
    made = workload(max(1, leaves), BLOCKS, scattered=False, tenants=TENANTS)
    for first in range(0, len(made), BATCH):
        writer.submit(made[first : first + BATCH])
        assert writer.flush(600)
    stopped = module("audit.kinds").WorkerStopped(made[-1].at_us + 1, "bench", "stopped", 0, (0,))
    writer.submit([stopped])
    assert writer.flush(600)
    writer.close()


def _count(engine: Any) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM events").scalar_one())


def check(target: str) -> dict[str, Any]:
    """One `fsck`: its seconds, processor seconds, and the memory and temporary disk of it."""
    engine = module("audit.store.database.engine").open_store(target, read_only=True, statement_seconds=3600)
    fsck = module("audit.verify.ledger.fsck_ledger").fsck
    with engine.connect() as connection, _temporary_files(connection) as temporary:
        begun, busy = time.perf_counter(), time.process_time()
        report = fsck(connection, keys=[key().verifier])
        took, processor = time.perf_counter() - begun, time.process_time() - busy
    assert report.ok, report.problems[:3]
    engine.dispose()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return {
        "seconds": took,
        "processor_seconds": processor,
        "memory_mib": peak / 1024,
        "temporary_mib": temporary[0] / 2**20,
    }


@contextlib.contextmanager
def _temporary_files(connection: Any) -> Iterator[list[int]]:
    """Bytes of temporary files (rule 3 of the head): the only item, whole once the block has ended."""
    most, ended = [0], threading.Event()
    if connection.dialect.name == "postgresql":
        written = "SELECT temp_bytes FROM pg_stat_database WHERE datname = current_database()"
        connection.exec_driver_sql("SET stats_fetch_consistency = none")
        before = connection.exec_driver_sql(written).scalar_one()
        yield most
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
        connection.rollback()
        most[0] = connection.exec_driver_sql(written).scalar_one() - before
        return

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], _deleted_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def _deleted_bytes() -> int:
    """Bytes of files that this process has open and that have no name: SQLite's temporary ones."""
    total = 0
    for place in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(place.readlink()).endswith(" (deleted)"):
                total += place.stat().st_blocks * 512
    return total


# -- the command ---------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A ledger of one side in one database."""

    side: str
    database: str
    purged: int

    @property
    def name(self) -> str:
        return f"{self.side}_{self.database}_{self.purged}"


def ask(tree: Path, step: str, *arguments: object) -> dict[str, Any]:
    """What a step answers in a process that has the code of a tree."""
    earlier = BENCHMARKS / "harness" / "earlier_names"
    paths = map(str, (tree / "src", tree / "benchmarks" / "harness", earlier))
    command = [sys.executable, __file__, step, *map(str, arguments)]  # PYTHONPATH precedes what is installed
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{step} with the code in {tree} failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Print one JSON object."""
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "harness")]
    from bench import Bench, turned
    from in_turns import resolve, unpack
    from ledger_stores import postgres

    bench = Bench(__doc__, "SQLAlchemy", "psycopg", rounds=3, facts="hardware")
    bench.add("--leaves", type=int, default=100_000)
    bench.add("--lives", type=int, default=5, help="processes that write them (default: %(default)s)")
    bench.add("--purged", type=int, nargs="*", default=[0, 40], help="percent, a ledger each (default: 0 40)")
    bench.add("--databases", nargs="*", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    bench.add("--against", metavar="COMMIT", help="measure this commit's code too")
    options = bench.parse()
    figures: dict[str, Any] = {"leaves": options.leaves, "lives": options.lives, "rounds": options.rounds}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcustody-fsck-")))
        trees = {"this_tree": BENCHMARKS.parent}
        if options.against:
            trees["commit"] = folder / "commit"
            unpack(resolve(options.against), trees["commit"])
        server = stack.enter_context(postgres()) if "postgresql" in options.databases else ""
        cases, targets = {}, {}
        for side, tree in trees.items():
            for database in options.databases:
                for purged in options.purged:
                    case = Case(side, database, purged)
                    place = folder / case.name
                    place.mkdir()
                    target = _new_ledger(server, case, place)
                    asked = (target, place, options.leaves, options.lives, purged)
                    figures[case.name] = ask(tree, "fill", *asked)
                    as_auditor = "&options=-c%20role%3Dkvcustody_auditor"
                    targets[case.name] = target + (as_auditor if database == "postgresql" else "")
                    cases[case.name] = case
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
        for number in range(options.rounds):
            for name in turned(list(cases), number):
                taken[name].append(ask(trees[cases[name].side], "check", targets[name]))
    for name, rounds in taken.items():
        figures[name] |= {what: round(median(each[what] for each in rounds), 2) for what in rounds[0]}
    bench.keep(figures, show=True)


def _new_ledger(server: str, case: Case, folder: Path) -> str:
    if case.database == "sqlite":
        return str(folder / "ledger.db")
    import psycopg

    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {case.name}")  # type: ignore[arg-type] # a name of ours
    return server.replace("/postgres?", f"/{case.name}?")


if __name__ == "__main__":
    if sys.argv[1:2] in (["fill"], ["check"]):
        verify_code()
    if sys.argv[1:2] == ["fill"]:
        _, _, place, scratch, *numbers = sys.argv
        print(json.dumps(fill(place, Path(scratch), *map(int, numbers))))
    elif sys.argv[1:2] == ["check"]:
        print(json.dumps(check(sys.argv[2])))
    else:
        main()
