"""Every table of a ledger, whichever room declares it: for what copies, grants or compares all of them."""

from __future__ import annotations

from sqlalchemy import Table

from kvcustody.audit.schema import counters as counter_schema
from kvcustody.audit.schema import erasures as erasure_schema
from kvcustody.audit.schema import releases as release_schema
from kvcustody.audit.schema import retention as keeping_schema
from kvcustody.audit.schema import service as service_schema
from kvcustody.audit.schema import traces as trace_schema
from kvcustody.audit.schema import trees as tree_schema
from kvcustody.audit.schema.ledger import metadata

ROOMS = (
    counter_schema,
    erasure_schema,
    keeping_schema,
    release_schema,
    service_schema,
    trace_schema,
    tree_schema,
)


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
