"""The ranges of sequences that were found whole: none yet, the next look puts them there.

Where the roles are set up they get their rights to the table.
"""

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

_RIGHTS = {
    "kvcustody_writer": "SELECT, INSERT, DELETE",
    "kvcustody_retention": "SELECT, INSERT, DELETE",
    "kvcustody_auditor": "SELECT",
    "kvcustody_signer": "SELECT",
}


def upgrade() -> None:
    op.create_table(
        "sequence_spans",
        sa.Column("incarnation", sa.Integer, nullable=False),
        sa.Column("first_sequence", sa.BigInteger, nullable=False),
        sa.Column("last_sequence", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("incarnation", "first_sequence"),
    )
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    known = set(connection.scalars(sa.text("SELECT rolname FROM pg_roles")))
    for role, rights in _RIGHTS.items():
        if role in known:
            connection.exec_driver_sql(f"GRANT {rights} ON sequence_spans TO {role}")
