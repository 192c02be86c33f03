"""Rows that no leaf proves: of a log or a leaf that is not there, at a place that no log has, or one row too many.

1. The tables come from the schema: a table that is added is looked at too.
2. Rows of a leaf that is there are compared with it elsewhere (`fsck_log`); here are those that nothing leads to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Select,
    Table,
    Text,
    and_,
    exists,
    func,
    literal,
    or_,
    select,
    union_all,
)
from sqlalchemy.dialects.sqlite.base import SQLiteDialect

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.all_tables import every_table, projections, tables_of_one_row
from kvcustody.audit.store.schema.counters import ALL_LOGS, counters, coverage_hours
from kvcustody.audit.store.schema.ledger import events, logs, subject_unlinkings, tenants
from kvcustody.audit.store.schema.trees import ROOT, root_leaves, tree_nodes

_SHOWN = 100  # rows of each table: what one INSERT made, another can have made a million times
_OF_ALL = {tree_nodes: ROOT, counters: ALL_LOGS, coverage_hours: ALL_LOGS}  # in place of a log's id
_COMPARED = {tenants, root_leaves}  # every row of theirs is derived again
Stray = tuple[int | None, int | None, str]  # the ids of log and leaf that the row names, and what is wrong


def keys_of_no_number(connection: Connection) -> Iterator[str]:
    """Keys that are no integers, which SQLite keeps: nothing can be compared where a row has one (3.5, a text)."""
    if not dialect_of(connection).in_file:
        return
    for table, name, value in connection.exec_driver_sql(_odd_keys()):
        yield f"`{table}` has a row whose `{name}` is `{value}`"


@cache
def _odd_keys() -> str:
    """One such row of each key of each table: its table, its column, its value as SQL writes it.

    A text, as to compile a statement of so many parts takes longer than to ask a small ledger.
    """
    keys = [(table, key) for table in every_table() for key in table.primary_key.columns]
    query = union_all(
        *(
            select(literal(table.name, Text), literal(key.name, Text), func.quote(key))
            .where(func.typeof(key) != "integer")
            .limit(1)
            .subquery()
            .select()
            for table, key in keys
            if isinstance(key.type, Integer)
        )
    )
    return str(query.compile(dialect=SQLiteDialect(), compile_kwargs={"literal_binds": True}))


def stray_rows(connection: Connection) -> Iterator[Stray]:
    """Every one of them, or the first of each table where there are many."""
    for table in every_table():
        if table is events:
            yield from _off_their_places(connection)
        elif table in projections():
            yield from _without_leaf(connection, table)
        elif "log" in table.columns and table not in _COMPARED:
            yield from _without_log(connection, table)
        if table in tables_of_one_row() and table is not subject_unlinkings:  # which is no evidence
            others = connection.scalars(select(table.c.id).where(table.c.id != 1).limit(_SHOWN)).all()
            yield from ((None, None, f"`{table.name}` has one row, 1, and another: `{other}`") for other in others)


def _off_their_places(connection: Connection) -> Iterator[Stray]:
    """Leaves in no log, or where no log has a place; those beyond its end are found from its own size."""
    off = or_(events.c.idx < 0, _has_no_log(events))
    for log, idx in connection.execute(select(events.c.log, events.c.idx).where(off).limit(_SHOWN)):
        yield log, idx, "`events` has a leaf here, which is no place of a log that is there"


def _without_leaf(connection: Connection, table: Table) -> Iterator[Stray]:
    for log, idx in connection.execute(_rows_without_leaf(table)):
        yield log, idx, f"`{table.name}` has a row of this leaf, which is not there"


@cache
def _rows_without_leaf(table: Table) -> Select[Any]:
    its = and_(events.c.log == table.c.log, events.c.idx == table.c.idx)
    return select(table.c.log, table.c.idx).where(~exists().where(its)).distinct().limit(_SHOWN)


def _without_log(connection: Connection, table: Table) -> Iterator[Stray]:
    query = select(table.c.log).where(_has_no_log(table)).distinct().limit(_SHOWN)
    if table in _OF_ALL:
        query = query.where(table.c.log != _OF_ALL[table])
    for log in connection.scalars(query):
        yield log, None, f"`{table.name}` has a row of a log that is not there"


def _has_no_log(table: Table) -> ColumnElement[bool]:
    return ~exists().where(logs.c.id == table.c.log)
