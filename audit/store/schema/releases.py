"""Tables of policy releases: the signed records of the workflow, in order.

1. `number` is a record's place, from 1 without a gap; a record is inserted once and never changed.
2. `record` holds the canonical bytes that its author signed; the other columns repeat what they say, for queries.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, LargeBinary, String, Table, Text

from kvcustody.audit.store.schema.ledger import metadata

policy_release = Table(
    "policy_release",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(32), nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Index("ix_policy_release_revision", "revision"),
)
