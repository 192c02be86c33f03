"""What derived rows by month cost and save on PostgreSQL: the same ledger with its rows in one month and in 24.

The questions are those of the writer's recovery, of coverage, of fsck and of the console; each is asked several times,
of one after the other, and the best counts. `drop` is what a purge does with the rows of one month of the 24, in its
four largest derived tables: emptying their partitions, against deleting the rows, with what comes back to the disk.
Run: `python benchmarks/evidence/rows_by_month.py [--requests 100000] [--rounds 7] [--out FILE]`.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, select

from kvcustody.audit.evidence.query.custody import block_history, custody_of
from kvcustody.audit.evidence.query.evidence_columns import read
from kvcustody.audit.evidence.query.orphans import disagreements
from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.database.monthly_partitions import create_partitions, months_from
from kvcustody.audit.store.schema.all_tables import MONTHLY
from kvcustody.audit.store.schema.leaf_tables import custody_ends, receipts, releases, residencies
from kvcustody.migrations.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from ledger_stores import postgres

MONTHS = 24
START_US = 1_704_067_200_000_000  # 2024-01-01
SPAN_US = (366 + 365) * 86_400_000_000
LARGE: tuple[Table, ...] = (residencies, releases, custody_ends, receipts)
LAST = f"{MONTHS:032d}"  # the process of the last month
SUBJECT = hashlib.md5(b"7").hexdigest()

Question = Callable[[Connection], object]


def filling(requests: int) -> list[str]:
    """Statements for a ledger of so many requests: 32 tenants, 200 subjects of each, one process a month."""
    at = f"{START_US} + n::bigint * {SPAN_US} / {requests}"
    blocks, high = "3, n * 3 + 1, n * 3 + 3", "n * 3 + 3"
    leaf = """('{"runs":[[' || (3 * n + 1) || ',[1],[3]]],"written":[],"x":"' || repeat('y', 280) || '"}')::bytea"""
    kinds = "'residency-opened', 'residency-released', 'custody-ended', 'receipt'"

    def insert(table: Table, values: str) -> str:
        return f"INSERT INTO {table.name} ({', '.join(table.c.keys())}) SELECT {values} FROM request"

    return [
        "INSERT INTO logs SELECT n, 'tenant/t' || n, 0, '' FROM generate_series(2, 33) n",
        "INSERT INTO workers VALUES (1, 'w')",
        "INSERT INTO incarnations (id, uuid, worker, offset_us, started_us, shards)"
        f" SELECT n, lpad(n::text, 32, '0'), 1, 0, {START_US}, 1 FROM generate_series(1, {MONTHS}) n",
        "CREATE TEMP TABLE request AS SELECT n, 2 + n % 32 AS log, n / 32 * 4 AS idx,"
        f" 1 + (n::bigint * {MONTHS} / {requests})::int AS life, {at} AS at, md5((n / 32 % 200)::text) AS subject"
        f" FROM generate_series(0, {requests} - 1) n",
        "ALTER TABLE events DISABLE TRIGGER places",
        f"INSERT INTO events SELECT log, idx + k, life, 4 * n + k + 1, 1, 1, (ARRAY[{kinds}])[k + 1], 'B', at + k,"
        f" {leaf} FROM request, generate_series(0, 3) k",
        "UPDATE logs SET size = (SELECT count(*) FROM events WHERE log = logs.id)",
        insert(
            residencies,
            "log, idx, life, n, 1, 't' || log, subject, NULL, false, 'internal', 1, at, at, at + 1000000, 3, 0,"
            f" n * 3 + 1, {high}",
        ),
        insert(
            releases,
            f"log, idx + 1, 0, life, n, 1, true, true, 't' || log, 'finish', at + 1, at + 1, at + 2, {blocks}, at + 1",
        ),
        insert(
            custody_ends,
            "log, idx + 2, 0, life, 't' || log, 'internal', 'expired', at + 2, at + 2, at + 2, at + 2, at + 2, 9,"
            f" {blocks}, at + 2",
        ),
        insert(
            receipts,
            "log, idx + 3, 0, life, n, 0, 't' || log, 'memset', 'cpu', 9, at + 2, at + 3, 'full', 1000000, 3, 'ok',"
            f" {blocks}, at + 3",
        ),
    ]


def filled(uri: str, name: str, requests: int, months: int) -> Engine:
    """The ledger, in so many months; in none, all of it is in the rest."""
    import psycopg

    with psycopg.connect(uri, autocommit=True) as made:
        made.execute(f"CREATE DATABASE {name}")
    engine = open_store(uri.replace("/postgres?", f"/{name}?"), timeout_seconds=600)
    upgrade(engine)
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        if months:
            create_partitions(connection, START_US, months - 1)
        driver: Any = connection.connection.driver_connection
        for statement in filling(requests):
            driver.execute(statement)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE")
    return engine


def questions(requests: int) -> dict[str, Question]:
    """By what they ask."""
    generation, day = requests * 3 - 10, START_US + SPAN_US // 2
    ends, row = custody_ends.c, releases.c
    due = select(ends.log).where(ends.due_us.between(day, day + 86_400_000_000))
    some = select(releases).where(row.log == 5, row.idx < 4096)
    named = select(receipts.c.log).where(receipts.c.incarnation == MONTHS, receipts.c.high >= generation)
    return {
        "a_subjects_custody": lambda connection: custody_of(connection, "t5", [SUBJECT]),
        "a_blocks_history": lambda connection: block_history(connection, LAST, 5, generation),
        "releases_of_a_process_with_runs": lambda connection: read(
            connection, releases, (row.residency,), row.incarnation == MONTHS, ordered=False
        ),
        "ends_of_a_process_with_runs_in_order": lambda connection: read(
            connection, custody_ends, (ends.tenant,), ends.incarnation == MONTHS
        ),
        "a_process_against_its_books": lambda connection: disagreements(connection, LAST, frozenset(), {}, 0),
        "receipts_of_a_generation": lambda connection: connection.execute(named).all(),
        "custody_due_in_a_day": lambda connection: connection.execute(due).all(),
        "rows_of_some_leaves": lambda connection: connection.execute(some).all(),
    }


def milliseconds(engine: Engine, ask: Question, rounds: int) -> float:
    taken = []
    with engine.connect() as connection:
        for _ in range(rounds):
            begun = time.perf_counter()
            ask(connection)
            taken.append(time.perf_counter() - begun)
    return round(min(taken) * 1e3, 2)


def dropped(engine: Engine, statements: list[str]) -> dict[str, float]:
    """How the rows of the second month go, and what comes back to the disk."""
    month = months_from(START_US, 2)[1]
    sizes = " + ".join(f"pg_total_relation_size('{month.of(table.name)}')" for table in LARGE)
    with engine.connect() as connection, connection.begin() as whole:
        before = int(connection.exec_driver_sql(f"SELECT {sizes}").scalar_one())
        begun = time.perf_counter()
        with triggers_lifted(connection):
            for statement in statements:
                connection.exec_driver_sql(statement)
        taken = time.perf_counter() - begun
        after = int(connection.exec_driver_sql(f"SELECT {sizes}").scalar_one())
        whole.rollback()
    return {"ms": round(taken * 1e3, 1), "kilobytes_before": before // 1000, "kilobytes_after": after // 1000}


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "SQLAlchemy", "psycopg", rounds=7, facts="hardware")
    bench.add("--requests", type=int, default=100_000)
    options = bench.parse()
    figures: dict[str, Any] = {"requests": options.requests, "months": MONTHS}
    with postgres() as uri:
        stores = {name: filled(uri, name, options.requests, count) for name, count in (("one", 0), ("months", MONTHS))}
        for name, ask in questions(options.requests).items():
            figures[name] = {
                f"{store}_ms": milliseconds(engine, ask, options.rounds) for store, engine in stores.items()
            }
        month = months_from(START_US, 2)[1]
        inside = f">= {month.first_us} AND {{0}} < {month.below_us}"
        deletes = [
            f"DELETE FROM {table.name} WHERE {MONTHLY[table.name]} {inside.format(MONTHLY[table.name])}"
            for table in LARGE
        ]
        empty = [f"TRUNCATE {', '.join(month.of(table.name) for table in LARGE)}"]
        figures["drop"] = {
            "delete": dropped(stores["months"], deletes),
            "truncate": dropped(stores["months"], empty),
        }
        for engine in stores.values():
            engine.dispose()
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
