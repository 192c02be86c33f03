"""Allow two forms of a table of leaves' rows: two tables record which, and how far the copy is."""

import sqlalchemy as sa
from alembic import op

revision = "0045"
down_revision = "0044"
branch_labels = None
depends_on = None

_ROLES = ("writer", "worker", "reader", "auditor", "signer", "retention")
_NUMBERS = "typeof(log_id) = 'integer'"


def upgrade() -> None:
    connection = op.get_bind()
    on_postgres = connection.dialect.name == "postgresql"
    op.create_table(
        "schema_changes",
        sa.Column("of_table", sa.String(63), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("revision", "before", "added")),
        sa.PrimaryKeyConstraint("of_table", name="pk_schema_changes"),
    )
    numbers = [] if on_postgres else [sa.CheckConstraint(_NUMBERS, name="ck_schema_change_logs_numbers")]
    op.create_table(
        "schema_change_logs",
        sa.Column("of_table", sa.String(63), nullable=False),
        sa.Column("log_id", sa.Integer, nullable=False),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in ("below", "copied", "compared", "rows", "leafless")
        ),
        sa.PrimaryKeyConstraint("of_table", "log_id", name="pk_schema_change_logs"),
        *numbers,
    )
    if on_postgres:
        allowed = sa.text(
            "SELECT rolname FROM pg_roles WHERE rolname = ANY (:roles) AND has_table_privilege(oid, 'events', 'SELECT')"
        )
        for role in connection.scalars(allowed, {"roles": [f"kvcustody_{role}" for role in _ROLES]}):
            op.execute(f"GRANT SELECT ON schema_changes TO {role}")
