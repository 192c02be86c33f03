"""A ledger of ten million leaves: one tenant's last day, and inclusion proofs, from the tables as a writer fills them.

Leaves go in through the writer's own `Appender`, 20,000 a transaction, with their trees, root leaves and checkpoints;
only waiting for the disk is left out meanwhile, for this measures reading. Rows of projections are left out too, as
neither question reads them. One tenant has half of all leaves, a hundred others share the rest, all spread evenly over
thirty days.
Before the first question, what was filled is on disk; PostgreSQL has 4 GB of shared buffers, and has vacuumed it;
then the machine rests.
Every question is asked of another tenant or leaf each time, on a connection that has answered none of them; what the
operating system's cache holds, it holds. Every proof is checked up to its signed checkpoint.
Run: `python benchmarks/evidence/ledger_scale.py [--leaves 10000000] [--database sqlite|postgresql|both] [--out FILE]`.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine, func, select

from kvcustody.audit.evidence.query.events import EventFilter, find_events
from kvcustody.audit.kinds import ReceiptRecorded, log_of
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.leaf import Context, leaf
from kvcustody.audit.leaf.batch import LeafBatch
from kvcustody.audit.leaf.merkle import leaf_hashes
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.database.monthly_partitions import create_partitions
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.root_log import check_leaf
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.write.append_leaves import Appender, register
from kvcustody.clock import SystemClock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from ledger_stores import fresh_store, postgres

TOGETHER = 20_000
OTHERS = 100
DAY_US = 86_400_000_000
DAYS = 30
MONTHS = 12  # of leaves on PostgreSQL, most of them empty: a lookup by place asks all of them
SHARED_BUFFERS = "4GB"  # PostgreSQL's manual would begin with a quarter of the memory; its default is 128 MB
REST_SECONDS = 120  # after ten million leaves: the disk that took 15 GB is busy with them for a while
START_US = 1_700_000_000_000_000
INCARNATION = "5" * 32
LARGE = "tenant-large"
TENANTS = [LARGE if number % 2 else f"tenant-{number // 2:03d}" for number in range(2 * OTHERS)]


def template() -> bytes:
    """A receipt's leaf with marks for its time, launch, log, sequence and tenant, in the order of their keys."""
    event = ReceiptRecorded(
        7770001, 7770002, 0, "T", "memset", "cpu", 65536, 1, 2, "full", 1.0, 1, "ok", (Run(np.array([5]), 9),)
    )
    made = leaf(event, Context(INCARNATION, 0, lambda *who: ""), 7770003).replace(b"%", b"%%")
    for mark in (b"7770001", b"7770002", b"7770003"):
        made = made.replace(mark, b"%d")
    return made.replace(b"tenant/T", b"%b").replace(b'"tenant":"T"', b'"tenant":"%b"')


def batch_at(first: int, count: int, step_us: int, form: bytes) -> LeafBatch:
    """The leaves `first` up to `first + count` of the ledger."""
    numbers = range(first, first + count)
    at_us = [START_US + number * step_us for number in numbers]
    tenants = [TENANTS[number % len(TENANTS)] for number in numbers]
    names = {tenant: (log_of(tenant).encode(), tenant.encode()) for tenant in TENANTS}
    data = []
    for number, moment, tenant in zip(numbers, at_us, tenants, strict=True):
        log, name = names[tenant]
        data.append(form % (moment, moment, number, log, number + 1, name))
    logs = [log_of(tenant) for tenant in tenants]
    ones, sequences = [1] * count, [number + 1 for number in numbers]
    constant = ([INCARNATION] * count, sequences, ones, ones, ["receipt"] * count, ["B"] * count)
    return LeafBatch(logs, *constant, at_us, data, [], {}, leaf_hashes(data))


def fill(engine: Engine, leaves: int) -> float:
    """Seconds that it took to append so many leaves."""
    begun = time.perf_counter()
    appender, form, step_us = Appender(), template(), DAYS * DAY_US // leaves
    with engine.connect().execution_options(**WRITE) as connection:
        if engine.dialect.name == "sqlite":
            raw = connection.connection.driver_connection  # no transaction may run meanwhile
            assert raw is not None
            raw.execute("PRAGMA synchronous=OFF")
        else:
            connection.exec_driver_sql("SET synchronous_commit=off")
            connection.commit()
        with connection.begin():
            create_partitions(connection, START_US, MONTHS)
            register(connection, INCARNATION, "scale", 0, START_US)
        for first in range(0, leaves, TOGETHER):
            with connection.begin():
                appender.append(connection, batch_at(first, min(TOGETHER, leaves - first), step_us, form))
            if first // TOGETHER % 50 == 0:
                print(f"{engine.dialect.name}: {first:,} of {leaves:,} leaves", file=sys.stderr, flush=True)
    if engine.dialect.name == "postgresql":
        settle(engine)
    engine.dispose()
    os.sync()
    taken = time.perf_counter() - begun
    time.sleep(REST_SECONDS * min(1.0, leaves / 10_000_000))
    return taken


def settle(engine: Engine) -> None:
    """What a server does by itself in the minutes after, and would do under the questions."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("SET statement_timeout = 0")
        connection.exec_driver_sql("VACUUM ANALYZE")
        connection.exec_driver_sql("CHECKPOINT")


def milliseconds(asked: Sequence[Any], answer: Callable[[Any], Any]) -> dict[str, float]:
    """Wall time of one question each, the median and the slowest; processor time here, without a server's."""
    taken, cpu = [], []
    for question in asked:
        before, busy = time.perf_counter(), time.thread_time()
        answer(question)
        cpu.append((time.thread_time() - busy) * 1e3)
        taken.append((time.perf_counter() - before) * 1e3)
    middle = statistics.median
    return {
        "median_ms": round(middle(taken), 2),
        "max_ms": round(max(taken), 2),
        "median_cpu_ms": round(middle(cpu), 2),
    }


def days(engine: Engine, leaves: int) -> dict[str, Any]:
    """A tenant's last day: how many leaves it has, its first page of a hundred, all of it."""
    chance = random.Random(5)
    until = START_US + leaves * (DAYS * DAY_US // leaves)
    asked = chance.sample(sorted(set(TENANTS) - {LARGE}), 30)
    figures: dict[str, Any] = {}
    sizes: set[int] = set()

    def last_day(tenant: str) -> EventFilter:
        return EventFilter(tenant=tenant, since_us=until - DAY_US, until_us=until)

    with engine.connect() as connection:

        def page(tenant: str) -> None:
            assert find_events(connection, last_day(tenant), limit=100).rows

        def whole(tenant: str) -> None:
            sizes.add(len(find_events(connection, last_day(tenant), limit=1_000_000).rows))

        find_events(connection, EventFilter(tenant="nobody"))  # the statements' compilation is not the question
        page(TENANTS[0])
        figures["first_page_of_100"] = milliseconds(asked[:15], page)
        figures["whole_day"] = milliseconds(asked[15:], whole)
        figures["first_page_of_the_large_tenant"] = milliseconds([LARGE], page)
    figures["leaves_of_a_day"] = sorted(sizes)
    return figures


def proofs(engine: Engine, folder: Path) -> dict[str, Any]:
    """Inclusion proofs, of the largest log and of others, each checked under the signed checkpoint."""
    key = SigningKey.generate("ledger.example/scale")
    signer = CheckpointSigner(engine, [key], clock=SystemClock(), memory=folder / "signed")
    assert signer.sign_once() is not None
    chance = random.Random(6)
    with engine.connect() as connection:
        stored = LedgerProofs(connection)
        large = stored.head(log_of(LARGE)).size
        others = [(log_of(name), stored.head(log_of(name)).size) for name in sorted(set(TENANTS) - {LARGE})]

        def prove(place: tuple[str, int]) -> None:
            leaf, proof = stored.proven(*place)
            check_leaf(proof, leaf, [key.verifier])

        prove((log_of(LARGE), 0))
        of_large = [(log_of(LARGE), chance.randrange(large)) for _ in range(50)]
        of_others = [(log, chance.randrange(size)) for log, size in others[:50]]
        return {
            "leaves_of_the_large_log": large,
            "large_log": milliseconds(of_large, prove),
            "other_logs": milliseconds(of_others, prove),
        }


def stored_bytes(connection: Connection) -> int:
    """What the database takes on disk."""
    if connection.dialect.name == "sqlite":
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())
    return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())


def measured(uri: str | None, folder: Path, leaves: int) -> dict[str, Any]:
    """Every figure of one database."""
    engine = fresh_store(uri, folder, "scale")
    seconds = fill(engine, leaves)
    found = {"last_day": days(engine, leaves), "inclusion_proof": proofs(engine, folder)}
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(events)) == leaves
        size = stored_bytes(connection)
    engine.dispose()
    return {"leaves": leaves, "filled_in_s": round(seconds), "gigabytes": round(size / 1e9, 2), **found}


def main() -> None:
    """Print one JSON object; every time is wall time of one question, its answer decoded or checked."""
    bench = Bench(__doc__, facts="hardware")
    bench.add("--leaves", type=int, default=10_000_000)
    bench.add("--database", choices=("sqlite", "postgresql", "both"), default="both")
    options = bench.parse()
    figures: dict[str, Any] = {}
    if options.database != "postgresql":
        with tempfile.TemporaryDirectory() as name:
            figures["sqlite"] = measured(None, Path(name), options.leaves)
    if options.database != "sqlite":
        with tempfile.TemporaryDirectory() as name, postgres(shared_buffers=SHARED_BUFFERS) as uri:
            figures["postgresql"] = measured(uri, Path(name), options.leaves)
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
