"""What leaves by month cost and save on PostgreSQL: a ledger whose `events` is one table against one with months.

Three tables get the same rows by binary COPY, in batches of 1,000, one after the other in every round: one table,
months without the trigger that keeps places, months with it. The rest is asked of the first and the last of them; each
question is another tenant's or another place's each time. `server_us` is the processor time of the server's own
process, for a leaf or a question: the steadier figure on a busy machine.
Run: `python benchmarks/evidence/partitions.py [--leaves 200000] [--rounds 3] [--out FILE]`.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, insert

from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.database.monthly_partitions import REST, create_partitions, partitions
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.migrations.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from ledger_stores import postgres
from plain_driver import plain_copy

MONTHS = 24
TENANTS = 32
LEAF_BYTES = 330
TOGETHER = 1000
ASKED = 40
DAY_US = 86_400_000_000
START_US = 1_704_067_200_000_000  # 2024-01-01
SPAN_US = (366 + 365) * DAY_US  # to the end of 2025
KINDS = ("residency-opened", "residency-released", "custody-ended", "receipt")
TABLES = ("one_table", "months", "months_and_trigger")


def batches(leaves: int) -> Iterator[list[tuple[Any, ...]]]:
    """Rows of `events`: every tenant's leaves spread evenly over the months."""
    chance, sizes = random.Random(1), [0] * TENANTS
    for first in range(0, leaves, TOGETHER):
        rows = []
        for number in range(first, min(first + TOGETHER, leaves)):
            log = number // len(KINDS) % TENANTS
            at_us = START_US + number * SPAN_US // leaves
            kind = KINDS[number % len(KINDS)]
            leaf = chance.randbytes(LEAF_BYTES)
            rows.append((log + 1, sizes[log], 1, number + 1, 1, 1, kind, "B", at_us, leaf))
            sizes[log] += 1
        yield rows


def made_ready(uri: str, name: str, variant: str) -> Engine:
    """A database with the variant's table and the logs."""
    import psycopg

    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    engine = open_store(uri.replace("/postgres?", f"/{name}?"), timeout_seconds=600)
    upgrade(engine)
    with engine.connect().execution_options(**WRITE) as opened, opened.begin():
        rows = [
            {"id": number, "name": f"tenant/{number}", "size": 0, "frontier": b""} for number in range(1, TENANTS + 1)
        ]
        opened.execute(insert(logs), rows)
        if variant == "one_table":
            opened.exec_driver_sql("DROP TABLE events")
            events.create(opened)
        else:
            create_partitions(opened, START_US, MONTHS - 1)
        if variant == "months":
            opened.exec_driver_sql("ALTER TABLE events DISABLE TRIGGER places")
    return engine


class Server:
    """Wall time, and processor time of the server's process behind a connection."""

    def __init__(self, connection: Connection) -> None:
        self._stat = Path(f"/proc/{connection.exec_driver_sql('SELECT pg_backend_pid()').scalar_one()}/schedstat")

    def took(self, act: Callable[[], object]) -> tuple[float, float]:
        """Seconds: by the clock, and of the server."""
        begun, busy = time.perf_counter(), self._busy()
        act()
        return time.perf_counter() - begun, self._busy() - busy

    def _busy(self) -> float:
        return int(self._stat.read_text().split()[0]) / 1e9


def copied(engine: Engine, leaves: int) -> tuple[float, float]:
    """What it takes to copy all rows in; making them is not part of it."""
    wall = server = 0.0
    with engine.connect() as connection:
        behind = Server(connection)
        raw = connection.connection.driver_connection
        for rows in batches(leaves):

            def write(rows: list[tuple[Any, ...]] = rows) -> None:
                plain_copy(raw, events, rows)
                connection.connection.commit()

            taken, busy = behind.took(write)
            wall, server = wall + taken, server + busy
    return wall, server


def questions(leaves: int) -> dict[str, Callable[[int], str]]:
    """Statements by what they ask, given a tenant's log; places and times in the second half."""
    middle, places = START_US + SPAN_US // 2, leaves // TENANTS
    return {
        "a_tenants_day": lambda log: (
            f"SELECT at_us, idx, kind, leaf FROM events WHERE log = {log} AND at_us >= {middle + log * DAY_US}"
            f" AND at_us < {middle + (log + 1) * DAY_US} ORDER BY at_us, idx LIMIT 1000"
        ),
        "first_leaf_since": lambda log: f"SELECT min(idx) FROM events WHERE log = {log} AND at_us >= {middle}",
        "one_leaf_by_place": lambda log: f"SELECT leaf FROM events WHERE log = {log} AND idx = {places // 2 + log}",
        "512_leaves_by_place": lambda log: (
            f"SELECT idx, leaf FROM events WHERE log = {log} AND idx >= {places // 2}"
            f" AND idx < {places // 2 + 512} ORDER BY idx"
        ),
    }


def asked(engine: Engine, leaves: int) -> dict[str, dict[str, float]]:
    """The median of each question."""
    figures = {}
    with engine.connect() as connection:
        connection.exec_driver_sql("ANALYZE events")
        behind = Server(connection)
        for name, statement in questions(leaves).items():
            taken = [behind.took(partial(_all, connection, statement(number % TENANTS + 1))) for number in range(ASKED)]
            walls, busy = zip(*taken[1:], strict=True)  # the first one plans and loads the catalogue
            figures[name] = {
                "ms": round(statistics.median(walls) * 1e3, 2),
                "server_us": round(statistics.median(busy) * 1e6),
            }
    return figures


def _all(connection: Connection, query: str) -> None:
    connection.exec_driver_sql(query).all()


def half_dropped(engine: Engine) -> dict[str, float]:
    """How leaves of the first half of the time go, and what comes back to the disk."""
    with engine.connect() as connection, connection.begin(), triggers_lifted(connection):
        before = _bytes(connection)
        months = [part for part in partitions(connection) if part.name != REST][: MONTHS // 2]
        if months:
            act = f"TRUNCATE {', '.join(part.of('events') for part in months)}"
        else:
            act = f"DELETE FROM events WHERE at_us < {START_US + SPAN_US // 2}"
        begun = time.perf_counter()
        connection.exec_driver_sql(act)
        dropped = time.perf_counter() - begun
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        begun = time.perf_counter()
        if not months:
            connection.exec_driver_sql("VACUUM events")
        vacuumed = time.perf_counter() - begun
        back = before - _bytes(connection)
    return {"drop_s": round(dropped, 2), "vacuum_s": round(vacuumed, 2), "megabytes_back": round(back / 1e6)}


def _bytes(connection: Connection) -> int:
    names = [part.of("events") for part in partitions(connection)] or ["events"]
    every = ", ".join(f"pg_total_relation_size('{name}')" for name in names)
    return sum(connection.exec_driver_sql(f"SELECT {every}").one())


def measured(uri: str, leaves: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Every figure by variant."""
    taken: dict[str, list[tuple[float, float]]] = {variant: [] for variant in TABLES}
    last = {}
    for number in range(rounds):
        for variant in sorted(TABLES, reverse=bool(number % 2)):
            engine = made_ready(uri, f"{variant}_{number}", variant)
            taken[variant].append(copied(engine, leaves))
            last[variant] = engine
    by_variant: dict[str, dict[str, Any]] = {}
    for variant, times in taken.items():
        wall, server = (min(each) for each in zip(*times, strict=True))
        by_variant[variant] = {"copy_s": round(wall, 2), "copy_server_us": round(server / leaves * 1e6, 1)}
        if variant != "months":
            by_variant[variant] |= asked(last[variant], leaves) | half_dropped(last[variant])
        last[variant].dispose()
    return by_variant


def main() -> None:
    """Print one JSON object: best rounds of COPY, medians of questions."""
    bench = Bench(__doc__, "SQLAlchemy", "psycopg", rounds=3, facts="hardware")
    bench.add("--leaves", type=int, default=200_000)
    options = bench.parse()
    figures: dict[str, Any] = {"leaves": options.leaves, "months": MONTHS, "tenants": TENANTS}
    with postgres() as uri:
        figures["tables"] = measured(uri, options.leaves, options.rounds)
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
