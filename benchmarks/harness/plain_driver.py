"""The other side of the comparison: the rows of a ledger, ready, through the database's driver alone."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ledger_workload import BATCH
from sqlalchemy import BigInteger, Boolean, ColumnElement, Engine, Integer, LargeBinary, Table, select

from kvcustody.audit.store.database.engine import WRITER_CACHE_KIB
from kvcustody.audit.store.schema.leaf_tables import custody_ends, receipts, releases, residencies
from kvcustody.audit.store.schema.ledger import events as events_table
from kvcustody.audit.store.schema.ledger import subjects

TABLES = (events_table, residencies, releases, custody_ends, receipts, subjects)


class Cost(NamedTuple):
    """Seconds: by the clock, of processor time, and of the submitting thread."""

    wall: float
    cpu: float
    submitting: float


def rows_of(engine: Engine) -> dict[Table, list[Any]]:
    """Every row that the events of the workload led to, in the order in which it was written."""
    with engine.connect() as connection:
        order: dict[Table, list[ColumnElement[Any]]] = {subjects: [], events_table: [events_table.c.sequence]}
        return {
            table: [tuple(row) for row in connection.execute(select(table).order_by(*order.get(table, [])))]
            for table in TABLES
        }


def plain(engine: Engine, rows: dict[Table, list[Any]]) -> Cost:
    """The cost of the same rows, table by table within each batch, through the driver alone."""
    batches = max(1, len(rows[events_table]) // BATCH)
    with engine.connect() as pooled:
        connection = pooled.connection.driver_connection
        assert connection is not None
        write = plain_insert if engine.dialect.name == "sqlite" else plain_copy
        if engine.dialect.name == "sqlite":
            connection.execute("PRAGMA wal_autocheckpoint=1000")
            connection.execute(f"PRAGMA cache_size=-{WRITER_CACHE_KIB}")
            connection.execute("PRAGMA foreign_keys=OFF")  # what keeps places is the ledger's price
        else:
            connection.execute("ALTER TABLE events DISABLE TRIGGER places")
            connection.commit()
        start, cpu = time.perf_counter(), time.process_time()
        for number in range(batches):
            if engine.dialect.name == "sqlite":
                connection.execute("BEGIN IMMEDIATE")
            for table, every in rows.items():
                share = every[len(every) * number // batches : len(every) * (number + 1) // batches]
                if share:
                    write(connection, table, share)
            connection.execute("COMMIT")
        return Cost(time.perf_counter() - start, time.process_time() - cpu, 0.0)


def names_of(table: Table) -> str:
    return ", ".join(f'"{column.name}"' for column in table.columns)


def plain_insert(connection: Any, table: Table, rows: list[Any]) -> None:
    marks = ", ".join("?" * len(rows[0]))
    connection.executemany(f"INSERT INTO {table.name} ({names_of(table)}) VALUES ({marks})", rows)


def plain_copy(connection: Any, table: Table, rows: list[Any]) -> None:
    wire = {BigInteger: "int8", Integer: "int4", Boolean: "bool", LargeBinary: "bytea"}
    types = [next((wire[kind] for kind in wire if isinstance(c.type, kind)), "text") for c in table.columns]
    with connection.cursor().copy(f"COPY {table.name} ({names_of(table)}) FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)
