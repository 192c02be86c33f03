"""Tables of signatures and timestamps by others, and of the retention of content.

`cosignatures` and `timestamps` are evidence that came from outside: they are in no leaf, are checked when they are
stored and again by whoever reads them, and are only inserted. The other two are projections of leaves.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, LargeBinary, PrimaryKeyConstraint, Table, Text

from kvcustody.audit.store.schema.ledger import metadata

cosignatures = Table(
    "cosignatures",
    metadata,
    Column("size", BigInteger, nullable=False),  # root leaves of the signed checkpoint
    Column("witness", Text, nullable=False),
    Column("line", LargeBinary, nullable=False),
    Column("at_us", BigInteger, nullable=False),  # as the witness states it
    PrimaryKeyConstraint("size", "witness"),
)

timestamps = Table(
    "timestamps",
    metadata,
    Column("size", BigInteger, nullable=False),
    Column("authority", Text, nullable=False),
    Column("token", LargeBinary, nullable=False),  # an RFC 3161 TimeStampResp over the checkpoint's text
    Column("at_us", BigInteger, nullable=False),  # as the authority states it
    PrimaryKeyConstraint("size", "authority"),
)
