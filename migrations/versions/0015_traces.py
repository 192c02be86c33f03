"""The leaves of a trace: a table that is empty at first, because no leaf from before carries one.

Where the roles are set up they have the rights on it that they have on every projection, and readers its wall.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Connection

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_RIGHTS = {
    "kvcustody_writer": "SELECT, INSERT",
    "kvcustody_auditor": "SELECT",
    "kvcustody_signer": "SELECT",
    "kvcustody_retention": "SELECT, DELETE",
    "kvcustody_reader": "SELECT",
}
_WALLED = "SELECT 1 FROM pg_policies WHERE tablename = 'events' AND policyname = 'of_tenant'"


def upgrade() -> None:
    op.create_table(
        "event_traces",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("trace", sa.String(length=32), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_event_traces")),
    )
    op.create_index("ix_event_traces_trace", "event_traces", ["trace", "log", "at_us", "idx"])
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        _grant(connection)


def _grant(connection: Connection) -> None:
    known = set(connection.scalars(sa.text("SELECT rolname FROM pg_roles")))
    for role, rights in _RIGHTS.items():
        if role in known:
            connection.exec_driver_sql(f"GRANT {rights} ON event_traces TO {role}")
    if "kvcustody_reader" in known and connection.scalar(sa.text(_WALLED)):
        connection.exec_driver_sql("ALTER TABLE event_traces ENABLE ROW LEVEL SECURITY")
        connection.exec_driver_sql(
            "CREATE POLICY of_tenant ON event_traces FOR SELECT TO kvcustody_reader"
            " USING (log = (SELECT kvcustody_log()))"
        )
