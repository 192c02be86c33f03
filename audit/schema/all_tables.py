"""Every table of a ledger, whichever room declares it: for what copies, grants or compares all of them."""

from __future__ import annotations

from sqlalchemy import BigInteger, ColumnElement, Integer, Table, and_, cast, exists

from kvcustody.audit.schema import cases as case_schema
from kvcustody.audit.schema import copies as copy_schema
from kvcustody.audit.schema import counters as counter_schema
from kvcustody.audit.schema import erasures as erasure_schema
from kvcustody.audit.schema import releases as release_schema
from kvcustody.audit.schema import retention as keeping_schema
from kvcustody.audit.schema import sequences as sequence_schema
from kvcustody.audit.schema import service as service_schema
from kvcustody.audit.schema import traces as trace_schema
from kvcustody.audit.schema import trees as tree_schema
from kvcustody.audit.schema.ledger import events, logs, metadata

ROOMS = (
    case_schema,
    copy_schema,
    counter_schema,
    erasure_schema,
    keeping_schema,
    sequence_schema,
    release_schema,
    service_schema,
    trace_schema,
    tree_schema,
)

MONTHLY = {  # tables that grow with traffic, and the column that has the time of a row's leaf
    "events": "at_us",
    "residencies": "opened_us",
    "attachments": "at_us",
    "releases": "at_us",
    "custody_ends": "at_us",
    "receipts": "at_us",
    "decisions": "at_us",
    "hit_counters": "at_us",
    "event_traces": "at_us",
    "copy_steps": "at_us",
    "transfer_decisions": "at_us",
}


def every_table() -> list[Table]:
    """In an order in which each can be filled."""
    return metadata.sorted_tables


def projections() -> list[Table]:
    """Tables whose rows are keyed by the leaf they came from, or by an item of it."""
    return [
        table
        for table in every_table()
        if [column.name for column in table.primary_key.columns][:2] == ["log", "idx"]
        and table.name != "events"
    ]


def tables_of_one_row() -> list[Table]:
    """Tables whose only key is an `id` that somebody states: it is 1."""
    return [
        table
        for table in every_table()
        if [(column.name, column.autoincrement) for column in table.primary_key.columns] == [("id", False)]
        and isinstance(table.c.id.type, Integer)
    ]


def has_leaf(table: Table) -> ColumnElement[bool]:
    """A row of a projection has its leaf; a row of `events` is a leaf of a log: at a place that the log has.

    Whoever draws a verdict or an order from a row asks for it, so that a row that somebody else inserted says nothing.
    """
    if table is not events:
        leaf = events.alias("its_leaf")
        at_us = table.c[MONTHLY.get(table.name, "at_us")]
        same = and_(leaf.c.log == table.c.log, leaf.c.idx == table.c.idx, leaf.c.at_us == at_us)
        return exists().where(same, _is_place(leaf.c.log, leaf.c.idx))
    return _is_place(events.c.log, events.c.idx)


def _is_place(log: ColumnElement[int], idx: ColumnElement[int]) -> ColumnElement[bool]:
    of = logs.alias("its_log")
    inside = exists().where(of.c.id == log, idx < of.c.size)
    return and_(idx >= 0, cast(idx, BigInteger) == idx, inside)  # SQLite keeps 3.5 in a column of integers


def is_leaf_of(table: Table) -> ColumnElement[bool]:
    """The leaf in `events` is the one that a row of a projection came from: by its place, and in its month alone."""
    at_us = table.c[MONTHLY.get(table.name, "at_us")]
    return and_(events.c.log == table.c.log, events.c.idx == table.c.idx, events.c.at_us == at_us)
