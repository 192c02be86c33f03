"""Leaves and trees are only ever inserted: the database itself refuses to change or delete them.

1. On both databases a trigger (migrations 0010, 0012, 0023) refuses every UPDATE and DELETE of leaves, nodes, root
   leaves and checkpoints (and TRUNCATE, which SQLite has not), and every change of a log but its growth. Nobody is
   exempt, the owner included, short of dropping the trigger, which leaves the trees to tell.
2. Retention alone deletes leaves, and the hashes inside tiles whose leaves are gone, inside `triggers_lifted`, for one
   transaction; on PostgreSQL its role needs the right to it, and no other level of a tree is let go (migration 0024).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from kvcustody.audit.database.dialect import dialect_of


@contextmanager
def triggers_lifted(connection: Connection) -> Iterator[None]:
    """Rule 2 holds inside this block of the caller's transaction, and for nobody else meanwhile."""
    run = connection.exec_driver_sql
    if not dialect_of(connection).in_file:
        run("SET LOCAL kvcustody.retention = 'on'")
        yield
        run("SET LOCAL kvcustody.retention = 'off'")
        return
    named = "type = 'trigger' AND name IN ('events_no_delete', 'tree_nodes_no_delete')"
    triggers = run(f"SELECT name, sql FROM sqlite_master WHERE {named}").all()  # noqa: S608 - our own names
    for name, _ in triggers:
        run(f"DROP TRIGGER {name}")
    yield
    for _, made in triggers:
        run(made)
