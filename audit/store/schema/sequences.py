"""The table of complete sequence ranges: which of a process's sequences are on record with every part.

It is a function of the leaves as long as they exist. Of leaves that retention dropped, only this remains, so that they
are not mistaken for lost ones.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, PrimaryKeyConstraint, Table

from kvcustody.audit.store.schema.ledger import metadata

sequence_spans = Table(
    "sequence_spans",
    metadata,
    Column("incarnation", Integer, nullable=False),
    Column("first_sequence", BigInteger, nullable=False),
    Column("last_sequence", BigInteger, nullable=False),
    PrimaryKeyConstraint("incarnation", "first_sequence"),
)
