"""Requests of people as cases with their steps; and legal holds on what is held of one subject.

No leaf of theirs is from before, so the tables are empty. Where the roles are set up they get their rights.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

_TABLES = ("cases", "case_steps")
_WALLED = "SELECT 1 FROM pg_policies WHERE tablename = 'events' AND policyname = 'of_tenant'"
_RIGHTS = {
    "kvcustody_writer": "SELECT, INSERT",
    "kvcustody_retention": "SELECT, DELETE",
    "kvcustody_auditor": "SELECT",
    "kvcustody_signer": "SELECT",
    "kvcustody_reader": "SELECT",
}


def upgrade() -> None:
    _table(
        "cases",
        *map(_text, ("case_id", "tenant")),
        sa.Column("subject", sa.Text(), nullable=True),
        *map(_text, ("subject_right", "channel")),
        sa.Column("received_us", sa.BigInteger(), nullable=False),
        *map(_text, ("zone", "holidays", "actor")),
    )
    _table(
        "case_steps",
        *map(_text, ("case_id", "step", "outcome", "ground", "about", "reason", "digest", "actor")),
    )
    op.add_column("legal_holds", sa.Column("subject", sa.Text(), nullable=True))
    if op.get_bind().dialect.name != "sqlite":
        _grant(op.get_bind())


def _grant(connection: sa.Connection) -> None:
    known = set(connection.scalars(sa.text("SELECT rolname FROM pg_roles")))
    for role, rights in _RIGHTS.items():
        if role in known:
            connection.exec_driver_sql(f"GRANT {rights} ON {', '.join(_TABLES)} TO {role}")
    if "kvcustody_reader" in known and connection.scalar(sa.text(_WALLED)):
        for table in _TABLES:
            connection.exec_driver_sql(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            connection.exec_driver_sql(
                f"CREATE POLICY of_tenant ON {table} FOR SELECT TO kvcustody_reader"
                " USING (log = (SELECT kvcustody_log()))"
            )


def _text(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=False)


def _table(name: str, *columns: sa.Column[Any]) -> None:
    op.create_table(
        name,
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        *columns,
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f(f"pk_{name}")),
    )
    op.create_index(f"ix_{name}_case_id", name, ["case_id"], unique=False)
