"""Leaves and trees are only ever inserted: the database itself refuses to change or delete them.

1. On both databases a trigger (migrations 0010, 0012, 0023) refuses every UPDATE and DELETE of leaves, nodes, root
   leaves and checkpoints (and TRUNCATE, which SQLite has not), and every change of a log but its growth. Nobody is
   exempt, the owner included, short of dropping the trigger, which leaves the trees to tell.
2. Retention alone deletes leaves, inside `triggers_lifted`, for one transaction; on PostgreSQL its role needs the
   right to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from kvcustody.audit.database.dialect import dialect_of


@contextmanager
def triggers_lifted(connection: Connection) -> Iterator[None]:
    """Leaves may be deleted inside this block of the caller's transaction, and by nobody else meanwhile (rule 2)."""
    run = connection.exec_driver_sql
    if not dialect_of(connection).in_file:
        run("SET LOCAL kvcustody.retention = 'on'")
        yield
        run("SET LOCAL kvcustody.retention = 'off'")
        return
    trigger = run(
        "SELECT sql FROM sqlite_master WHERE type = 'trigger' AND name = 'events_no_delete'"
    ).scalar_one()
    run("DROP TRIGGER events_no_delete")
    yield
    run(trigger)
