"""Find rules of the declared tables that the database does not enforce: CHECKs of keys, and foreign keys to logs.

A rule that an upgrade could not validate, for a row that breaks it, is kept for every row to come: it is there. The row
is found where rows are looked at (`audit.verify.ledger.fsck_ledger`).
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import CheckConstraint, Connection, ForeignKeyConstraint, MetaData

from kvcustody.audit.store.database.create_schema import tables_of_postgres
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.ledger import metadata


def missing_rules(connection: Connection) -> Iterator[str]:
    """Yield rules that are missing or differ."""
    in_file = dialect_of(connection).in_file
    query = (
        "SELECT name, sql FROM sqlite_master WHERE type = 'table'"
        if in_file
        else "SELECT conrelid::regclass::text, 'CONSTRAINT ' || conname || ' ' || pg_get_constraintdef(oid)"
        " FROM pg_constraint WHERE connamespace = current_schema()::regnamespace AND contype IN ('c', 'f')"
    )
    said: dict[str, str] = {}
    for table, text in connection.exec_driver_sql(query):
        said[table] = f"{said.get(table, '')} {_plain(text)} "
    for table, name, rule in _declared(metadata if in_file else tables_of_postgres()):
        if f" CONSTRAINT {name} {_plain(rule)} " not in said.get(table, ""):
            yield f"the rule `{name}` of `{table}` is missing or differs"


def _declared(tables: MetaData) -> Iterator[tuple[str, str, str]]:
    for table in tables.sorted_tables:
        for rule in sorted(table.constraints, key=lambda each: str(each.name)):
            if isinstance(rule, CheckConstraint):
                yield table.name, str(rule.name), f"CHECK ({rule.sqltext})"
            elif isinstance(rule, ForeignKeyConstraint):
                (target,) = rule.elements
                of = f"{target.column.table.name} ({target.column.name})"
                yield table.name, str(rule.name), f"FOREIGN KEY ({rule.column_keys[0]}) REFERENCES {of}"


def _plain(text: str) -> str:
    """Without what the databases write differently: brackets, commas and line ends."""
    return " ".join(text.translate(_MARKS).split())


_MARKS = str.maketrans("(),", "   ")
