"""Add erase epochs: the numbers that erasures raised, their followers, and rows of the two kinds of leaves about
them.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None

_WRITERS = ("writer", "worker")
_READERS = ("auditor", "signer", "retention", "reader")


def upgrade() -> None:
    op.add_column("service_workers", sa.Column("role", sa.String(8), nullable=False, server_default="worker"))
    op.create_table(
        "erase_epochs",
        sa.Column("number", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("tag", sa.LargeBinary, nullable=False),
        sa.Column("shared", sa.LargeBinary, nullable=True),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("raised_us", sa.BigInteger, nullable=False),
        sa.Column("deadline_us", sa.BigInteger, nullable=True),
        sa.Column("ends_us", sa.BigInteger, nullable=False),
        sa.Column("erasure", sa.String(64), nullable=False),
        sa.Column("key", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_erase_epochs"),
    )
    op.create_index("ix_erase_epochs_shared", "erase_epochs", ["shared", "kind", "raised_us"])
    op.create_index("ix_erase_epochs_deadline_us", "erase_epochs", ["deadline_us"])
    op.create_table(
        "service_epoch_takers",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("role", sa.String(8), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("heard_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_service_epoch_takers"),
    )
    _rows_of_leaves(
        "epoch_raises",
        sa.Column("erasure", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=True),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_epoch_raises_erasure", "epoch_raises", ["erasure"])
    _rows_of_leaves(
        "epochs_taken",
        sa.Column("incarnation", sa.Integer, nullable=False),
        sa.Column("door", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
    )
    op.create_index("ix_epochs_taken_version", "epochs_taken", ["incarnation", "version"])


def _rows_of_leaves(table: str, *columns: "sa.Column[Any]") -> None:
    """A table of rows by the place of their leaf; with the rights of the roles, where there are roles."""
    connection = op.get_bind()
    on_postgres = connection.dialect.name == "postgresql"
    numbers = "typeof(log) = 'integer' AND typeof(idx) = 'integer'"
    op.create_table(
        table,
        sa.Column("log", sa.Integer, nullable=False),
        sa.Column("idx", sa.BigInteger, nullable=False),
        *columns,
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=f"pk_{table}"),
        sa.ForeignKeyConstraint(["log"], ["logs.id"], name=f"fk_{table}_log"),
        sa.CheckConstraint("log >= 0 AND idx >= 0", name=f"ck_{table}_place"),
        *([] if on_postgres else [sa.CheckConstraint(numbers, name=f"ck_{table}_numbers")]),
    )
    if not on_postgres:
        return
    known = sa.text(
        "SELECT rolname FROM pg_roles WHERE rolname LIKE 'kvcustody_%' AND has_table_privilege(oid, 'events', 'SELECT')"
    )
    roles = {*connection.scalars(known)}
    for role in (f"kvcustody_{name}" for name in (*_WRITERS, *_READERS)):
        if role in roles:
            rights = "SELECT, INSERT" if role.removeprefix("kvcustody_") in _WRITERS else "SELECT"
            op.execute(f"GRANT {rights} ON {table} TO {role}")
    if "kvcustody_retention" in roles:
        op.execute(f"GRANT DELETE ON {table} TO kvcustody_retention")
    if "kvcustody_reader" in roles:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY of_tenant ON {table} FOR SELECT TO kvcustody_reader USING (log = (SELECT kvcustody_log()))"
        )
