"""Tables of an online change of the schema: the tables with two forms, and the progress of each log's copy.

1. A row of `schema_changes` is a table whose new form stands beside the old one. Whoever writes or drops rows of that
   table does it in both forms (`audit.store.database.open_changes`). Both tables are empty while no change is open.
2. A row of `schema_change_logs` is one log of such a table. Rows of leaves below `below` are copied from leaves, up to
   `copied` so far; rows of later leaves were written in both forms. `compared` is how far the copy was compared.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, PrimaryKeyConstraint, String, Table, Text

from kvcustody.audit.store.schema.ledger import metadata

schema_changes = Table(
    "schema_changes",
    metadata,
    Column("of_table", String(63), primary_key=True),
    Column("revision", Text, nullable=False),  # of the new form
    Column("before", Text, nullable=False),  # the revision that an undo goes back to; empty: there is no undo
    Column("added", Text, nullable=False),  # columns that the old form has meanwhile, separated by spaces
)

schema_change_logs = Table(
    "schema_change_logs",
    metadata,
    Column("of_table", String(63), nullable=False),
    Column("log_id", Integer, nullable=False),
    Column("below", BigInteger, nullable=False),
    Column("copied", BigInteger, nullable=False),
    Column("compared", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),  # that the copy got, of these:
    Column("leafless", BigInteger, nullable=False),  # rows whose leaf is gone
    PrimaryKeyConstraint("of_table", "log_id"),
)
