"""The new form of a table beside the old one: its creation, its swap, and its removal.

1. It is made by what makes the table of a new ledger: its statements, triggers, months, grants and row walls. On
   PostgreSQL it is in a separate schema, under the same names as in a new ledger, so the swap renames nothing. In a
   file the names have an ending, which the swap removes.
2. Columns that the new form has more are added to the old one for the time of the change: one program reads and writes
   both. No row is rewritten by that. A change that takes a column away is refused.
3. Nothing here commits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from sqlalchemy import Column, Connection, Table, inspect
from sqlalchemy.schema import DefaultClause

from kvcustody.audit.store.database.append_only_triggers import triggers_of
from kvcustody.audit.store.database.create_schema import table_statements
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.monthly_partitions import create_months, create_rest, partitioned
from kvcustody.audit.store.database.open_changes import NEW_ENDING, NEW_FORMS
from kvcustody.audit.store.database.postgres_roles import ROLES, row_grants, row_walls, walled
from kvcustody.errors import LedgerError

_TABLE = re.compile(r"^\s*CREATE TABLE (\w+)")
_INDEX = re.compile(r"^\s*CREATE( UNIQUE)? INDEX (\w+) ON (\w+)")


def make(connection: Connection, table: Table) -> None:
    """Make an empty new form of a declared table (rule 1)."""
    statements = [*table_statements(connection, table.name), *triggers_of(connection, table.name)]
    if dialect_of(connection).in_file:
        for statement in statements:
            connection.exec_driver_sql(_with_ending(statement))
        return
    connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {NEW_FORMS}")
    with _in_schema_of_new_forms(connection):
        for statement in statements:
            connection.exec_driver_sql(statement.replace("%", "%%"))
        if table.name in partitioned(connection):
            create_rest(connection, table.name)
            create_months(connection, table.name)
    wall_off(connection, [table])


def wall_off(connection: Connection, tables: Iterable[Table]) -> None:
    """Give the new forms the grants and row walls of the old ones, if roles were set up."""
    if not dialect_of(connection).roles:
        return
    names = [table.name for table in tables if walled(connection, table.name)]
    if not names:
        return
    connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {NEW_FORMS} TO {', '.join(ROLES)}")
    with _in_schema_of_new_forms(connection):
        for statement in (*row_grants(names), *row_walls(names)):
            connection.exec_driver_sql(statement)


def add_columns(connection: Connection, table: Table) -> list[str]:
    """Add to the old form the columns that only the new one has (rule 2); return their names."""
    old_columns = {column["name"] for column in inspect(connection).get_columns(table.name)}
    if taken := sorted(old_columns.difference(table.columns.keys())):
        raise LedgerError(
            f"an online change takes no column away, and `{table.name}` has `{', '.join(taken)}`",
            table=table.name,
            columns=taken,
        )
    more = [column for column in table.columns if column.name not in old_columns]
    for column in more:
        connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {_loose(connection, column)}")
    return [column.name for column in more]


def take_columns(connection: Connection, table: str, columns: Iterable[str]) -> None:
    """Remove from the old form what `add_columns` added."""
    for name in columns:
        connection.exec_driver_sql(f'ALTER TABLE {table} DROP COLUMN "{name}"')


def drop(connection: Connection, tables: Iterable[str]) -> None:
    """Drop the new forms of all tables that have one."""
    for name in tables:
        connection.exec_driver_sql(f"DROP TABLE {_place(connection, name)}")
    if not dialect_of(connection).in_file:
        connection.exec_driver_sql(f"DROP SCHEMA {NEW_FORMS}")


def lock(connection: Connection, tables: Iterable[str], *, both: bool = True) -> None:
    """Lock these tables and the record of open changes until the transaction ends."""
    if dialect_of(connection).in_file:  # a writing transaction is alone, and readers see what was before
        return
    names = [form for name in tables for form in ((name, _place(connection, name)) if both else (name,))]
    listed = ", ".join(("schema_changes", *names))
    connection.exec_driver_sql(f"LOCK TABLE {listed} IN ACCESS EXCLUSIVE MODE")


def swap(connection: Connection, tables: Iterable[Table]) -> None:
    """Put each new form in the place of the old one, which is dropped with its rows."""
    tables = list(tables)
    if dialect_of(connection).in_file:
        for table in tables:
            _swap_in_file(connection, table.name)
        return
    wall_off(connection, tables)  # roles may have been set up since
    home = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
    for table in tables:
        parts = _parts(connection, f"{NEW_FORMS}.{table.name}")
        connection.exec_driver_sql(f"DROP TABLE {table.name}")
        for name in (table.name, *parts):
            connection.exec_driver_sql(f'ALTER TABLE {NEW_FORMS}.{name} SET SCHEMA "{home}"')
    connection.exec_driver_sql(f"DROP SCHEMA {NEW_FORMS}")


def has_same_months(connection: Connection, table: str) -> bool:
    """Return whether the new form has the months of the old one; more may have been created meanwhile."""
    if table not in partitioned(connection):
        return True
    return _parts(connection, table) == _parts(connection, f"{NEW_FORMS}.{table}")


def add_months(connection: Connection, table: str) -> None:
    """Create the months that only the old form has."""
    with _in_schema_of_new_forms(connection):
        create_months(connection, table)


def _swap_in_file(connection: Connection, name: str) -> None:
    """The texts that SQLite keeps are then those of a new ledger; no row and no index is written anew."""
    run = connection.exec_driver_sql
    run(f"DROP TABLE {name}")
    run(f"ALTER TABLE {name}{NEW_ENDING} RENAME TO {name}")
    version = run("PRAGMA schema_version").scalar_one()
    run("PRAGMA writable_schema = ON")
    change = "UPDATE sqlite_schema SET name = ?, sql = ? WHERE name = ?"
    for statement in table_statements(connection, name):
        if index := _INDEX.match(statement):
            run(change, (index[2], statement.strip(), index[2] + NEW_ENDING))
        else:
            run(change, (name, statement.strip(), name))
    run(f"PRAGMA schema_version = {version + 1}")
    run("PRAGMA writable_schema = RESET")


def _with_ending(statement: str) -> str:
    statement = _TABLE.sub(rf"CREATE TABLE \1{NEW_ENDING}", statement)
    return _INDEX.sub(rf"CREATE\1 INDEX \2{NEW_ENDING} ON \3{NEW_ENDING}", statement)


def _place(connection: Connection, name: str) -> str:
    return f"{name}{NEW_ENDING}" if dialect_of(connection).in_file else f"{NEW_FORMS}.{name}"


def _parts(connection: Connection, table: str) -> list[str]:
    query = (
        "SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid"
        " WHERE inhparent = %s::regclass ORDER BY relname"
    )
    return list(connection.exec_driver_sql(query, (table,)).scalars())


def _loose(connection: Connection, column: Column[object]) -> str:
    """Return a column's name, type and default, which is the value of older rows."""
    kind = column.type.compile(dialect=connection.dialect)
    default = column.server_default
    given = f" DEFAULT {default.arg}" if isinstance(default, DefaultClause) else ""
    return f'"{column.name}" {kind}{given}'


@contextmanager
def _in_schema_of_new_forms(connection: Connection) -> Iterator[None]:
    """A table's own name means its new form, where it has one."""
    path = connection.exec_driver_sql("SHOW search_path").scalar_one()
    home = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
    connection.exec_driver_sql(f'SET LOCAL search_path = {NEW_FORMS}, "{home}"')
    yield
    connection.exec_driver_sql("SELECT set_config('search_path', %s, true)", (path,))
