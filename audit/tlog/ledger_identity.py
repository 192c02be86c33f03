"""A ledger's identity: a random text from its creation, and the names derived from it.

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
    """Return the name for a new key of this ledger: `origin`, or a unique name if that is the default."""
    if origin != DEFAULT_ORIGIN:
        return origin
    with engine.connect() as connection:
        return f"{origin}/{ledger_identity(connection)}"
