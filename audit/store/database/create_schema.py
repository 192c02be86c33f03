"""Create the schema of an empty database from the tables that `audit.store.schema` declares.

A new ledger gets the newest schema at once; revisions of `migrations` are for ledgers that are there already. So the
tables are said in one place, and a revision says only what changes.

1. On PostgreSQL each table that grows with traffic (`MONTHLY`) is partitioned by its leaves' time. PostgreSQL asks that
   every unique key of such a table contains that time, so it is added to the declared keys.
2. Months come afterwards (`monthly_partitions`): each table begins with the rest, which takes every time.
"""

from __future__ import annotations

import secrets
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    ForeignKeyConstraint,
    MetaData,
    PrimaryKeyConstraint,
    UniqueConstraint,
    create_mock_engine,
    insert,
)
from sqlalchemy.schema import ExecutableDDLElement

from kvcustody.audit.leaf.merkle import EMPTY
from kvcustody.audit.store.database.append_only_triggers import create_triggers
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.monthly_partitions import create_rest, partitioned
from kvcustody.audit.store.schema.all_tables import MONTHLY, ONLY_IN_FILE, every_table
from kvcustody.audit.store.schema.ledger import metadata
from kvcustody.audit.store.schema.trees import root_log


def create_schema(connection: Connection) -> None:
    """Create every table, index, trigger and function of a ledger, and the root log's single row."""
    for statement in _table_statements(is_postgres=dialect_of(connection).partitions):
        connection.exec_driver_sql(statement)
    create_triggers(connection)
    for table in partitioned(connection):
        create_rest(connection, table)
    root = {"id": 1, "frontier": EMPTY.to_bytes(), "identity": secrets.token_hex(8)}
    connection.execute(insert(root_log), root)


def table_statements(connection: Connection, table: str) -> tuple[str, ...]:
    """Return the statements that create one table and its indexes, as in a new ledger."""
    return _table_statements(is_postgres=dialect_of(connection).partitions, only=table)


@cache
def _table_statements(*, is_postgres: bool, only: str = "") -> tuple[str, ...]:
    """What makes the tables and indexes, of all or of one.

    SQLite runs them faster than they compile, so a process compiles once.
    """
    statements: list[str] = []

    def add(statement: ExecutableDDLElement, *_: Any, **__: Any) -> None:
        statements.append(str(statement.compile(dialect=engine.dialect)))

    engine = create_mock_engine("postgresql+psycopg://" if is_postgres else "sqlite://", add)
    tables = tables_of_postgres() if is_postgres else metadata
    tables.create_all(engine, [tables.tables[only]] if only else None, checkfirst=False)
    return tuple(statements)


def tables_of_postgres() -> MetaData:
    """Return the declared tables in PostgreSQL's form: with months (rule 1), and without rules that its types
    enforce.
    """
    tables = MetaData(naming_convention=metadata.naming_convention)
    for declared in every_table():
        table = declared.to_metadata(tables)
        for rule in [*table.constraints]:
            if rule.info.get(ONLY_IN_FILE) or (isinstance(rule, ForeignKeyConstraint) and table.name in MONTHLY):
                table.constraints.discard(rule)
        if time := MONTHLY.get(table.name):
            table.dialect_options["postgresql"]["partition_by"] = f"RANGE ({time})"
            table.c[time].primary_key = True
            for key in [*table.constraints]:
                if isinstance(key, (PrimaryKeyConstraint, UniqueConstraint)):
                    table.constraints.discard(key)
                    table.append_constraint(type(key)(*key.columns.keys(), time))
    return tables
