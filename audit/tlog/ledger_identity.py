"""What tells one ledger from every other: a random text that it was made with, and the names that follow from it.

A copy of a ledger has the identity of the original: it holds the same leaves. No evidence rests on it.
"""

from __future__ import annotations

from sqlalchemy import Connection, Engine, select

from kvcustody.audit.store.schema.trees import root_log
from kvcustody.audit.tlog.signed_note import DEFAULT_ORIGIN


def ledger_identity(connection: Connection) -> str:
    """Return the identity of this ledger: 16 hexadecimal digits."""
    return connection.scalars(select(root_log.c.identity)).one() or ""


def own_origin(engine: Engine, origin: str) -> str:
    """Return the name for a new key of this ledger: `origin`, or where that is the default, one that no other ledger
    has.
    """
    if origin != DEFAULT_ORIGIN:
        return origin
    with engine.connect() as connection:
        return f"{origin}/{ledger_identity(connection)}"
