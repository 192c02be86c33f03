"""Where the leaves of a recount come from: the database. They are handed on as written, and no column is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from sqlalchemy import Connection, select

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events


def leaves_in_database(connection: Connection, as_of: AsOf | None = None) -> Iterator[bytes]:
    """Every leaf of the ledger, or of a state of it; those of one log in their order."""
    query = select(events.c.leaf).where(is_in(as_of, events), has_leaf(events))
    if not dialect_of(connection).in_file:
        query = query.order_by(events.c.log, events.c.idx)
        return map(bytes, connection.execute(query, execution_options={"yield_per": 10_000}).scalars())
    # From the driver itself, which reads row by row: a row object for each of a million leaves costs more than they do.
    # And as the file has them, which is as they were written: in any other order pages are read many times over.
    text = str(query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))
    driver: Any = connection.connection.driver_connection
    return chain.from_iterable(driver.execute(text))
