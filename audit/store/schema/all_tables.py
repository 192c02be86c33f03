"""Every table of a ledger, in whichever room it is declared, for code that copies, grants or compares all of them."""

from __future__ import annotations

from functools import cache, lru_cache

from sqlalchemy import (
    Alias,
    BigInteger,
    CheckConstraint,
    ColumnElement,
    ForeignKeyConstraint,
    FromClause,
    Integer,
    Table,
    and_,
    cast,
    exists,
    literal,
    or_,
)

from kvcustody.audit.kinds import log_of
from kvcustody.audit.leaf.change_items import CHANGED
from kvcustody.audit.store.schema import counters as counter_schema
from kvcustody.audit.store.schema import leaf_tables
from kvcustody.audit.store.schema import releases as release_schema
from kvcustody.audit.store.schema import retention as keeping_schema
from kvcustody.audit.store.schema import schema_changes as change_schema
from kvcustody.audit.store.schema import sequences as sequence_schema
from kvcustody.audit.store.schema import service as service_schema
from kvcustody.audit.store.schema import trees as tree_schema
from kvcustody.audit.store.schema.ledger import events, logs, metadata

ROOMS = (
    counter_schema,
    leaf_tables,
    keeping_schema,
    sequence_schema,
    release_schema,
    change_schema,
    service_schema,
    tree_schema,
)

ONLY_IN_FILE = "only in file"  # a constraint that says what PostgreSQL sees to by a column's type
_KEPT = 128  # conditions: to build one takes longer than to ask a small table
MONTHLY = {"events": "at_us"} | {
    table.name: row.month for table in metadata.tables.values() if (row := table.info.get("row")) and row.month
}
"""Tables that grow with traffic, and the column that has the time of a row's leaf."""


@cache
def every_table() -> tuple[Table, ...]:
    """Return every table in an order in which they can be filled."""
    return tuple(metadata.sorted_tables)


@cache
def projections() -> tuple[Table, ...]:
    """Return tables whose rows are keyed by their leaf, or by an item of it."""
    return tuple(table for table in every_table() if "row" in table.info)


@cache
def tables_of_one_row() -> tuple[Table, ...]:
    """Return tables whose only key is a fixed `id`, 1."""
    return tuple(
        table
        for table in every_table()
        if [(column.name, column.autoincrement) for column in table.primary_key.columns] == [("id", False)]
        and isinstance(table.c.id.type, Integer)
    )


def kinds_of(table: Table) -> tuple[str, ...]:
    """Return the kinds of leaves, or of items, behind a projection's rows; empty if it takes every leaf."""
    kinds: tuple[str, ...] = table.info.get("kinds", ())
    return kinds


@lru_cache(_KEPT)
def has_leaf(table: FromClause) -> ColumnElement[bool]:
    """Return the condition that a projection's row has its leaf, or that a row of `events` lies in its log.

    Whoever draws a verdict or an order from a row asks for it, so that a row that somebody else inserted says nothing.
    """
    if table is events:
        return is_place(events)
    leaf = events.alias("its_leaf")
    return exists().where(is_leaf_of(table, leaf)).correlate_except(leaf)


@lru_cache(_KEPT)
def is_leaf_of(row: FromClause, leaf: FromClause = events) -> ColumnElement[bool]:
    """Return the condition that this leaf gave a projection's row: same place, month, kind and log."""
    table = row.element if isinstance(row, Alias) else row
    assert isinstance(table, Table)
    at_us = row.c[MONTHLY.get(table.name, "at_us")]
    same = [leaf.c.log == row.c.log, leaf.c.idx == row.c.idx, leaf.c.at_us == at_us, is_place(leaf)]
    kind = leaf.c.kind + ""  # no expression of an index: the leaf is found by its place, not among all of its kind
    if "item" in row.c:
        listed = and_(kind == CHANGED, row.c.item > 0)
        same.append(or_(listed, and_(kind.in_(kinds_of(table)), row.c.item == 0)))
    elif kinds := kinds_of(table):
        same.append(kind.in_(kinds))
    if acting := table.info.get("acting"):
        of = logs.alias("acting_log")
        own = literal(log_of("")) + row.c[acting]
        same.append(exists().where(of.c.id == row.c.log, of.c.name == own).correlate_except(of))
    return and_(*same)


def is_of_leaves(deltas: Table) -> ColumnElement[bool]:
    """Return the condition that a row of figures belongs to an existing log, at a size it has had (below 0: dropped
    leaves).
    """
    of = logs.alias("its_log")
    return exists().where(of.c.id == deltas.c.log, deltas.c.size <= of.c.size).correlate_except(of)


def is_place(leaf: FromClause) -> ColumnElement[bool]:
    """Return the condition that a row of `events` is at a place of its log."""
    of = logs.alias("its_log")
    inside = exists().where(of.c.id == leaf.c.log, leaf.c.idx < of.c.size).correlate_except(of)
    return and_(leaf.c.idx >= 0, cast(leaf.c.idx, BigInteger) == leaf.c.idx, inside)  # SQLite keeps 3.5


def _constrain() -> None:
    """The database refuses rows of evidence that no leaf can have given, whoever hands them in.

    1. A key is an integer (SQLite keeps 3.5, and texts), a place is not negative, and a table of one row has one.
    2. A leaf, and a row of a projection, is of a log that is there. On PostgreSQL the tables that are partitioned have
       no foreign key: triggers keep leaves and their rows to their logs there (`append_only_triggers`, rules 3 and 4).
    """
    one_row = tables_of_one_row()
    for table in [table for table in every_table() if not hasattr(service_schema, table.name)]:
        numbers = [column for column in table.primary_key.columns if isinstance(column.type, Integer)]
        of_log = [table.c.log] if "log" in table.c else []
        rules = [f"{column.name} >= 0" for column in numbers if column.name in ("log", "idx", "item")]
        rules += ["id = 1"] if table in one_row else []
        if rules:
            _check(table, "place", rules)
        if numbers:
            _check(table, "numbers", [f"typeof({column.name}) = 'integer'" for column in numbers])
        if of_log and (table is events or table in projections()):
            name = f"fk_{table.name}_log"
            table.append_constraint(ForeignKeyConstraint(of_log, [logs.c.id], name=name))


def _check(table: Table, name: str, rules: list[str]) -> None:
    rule = " AND ".join(rules)
    table.append_constraint(
        CheckConstraint(rule, name=f"ck_{table.name}_{name}", info={ONLY_IN_FILE: name == "numbers"})
    )


_constrain()
