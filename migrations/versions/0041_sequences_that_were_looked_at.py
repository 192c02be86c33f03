"""The ranges of sequences that were found whole: none yet, the next look puts them there."""

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sequence_spans",
        sa.Column("incarnation", sa.Integer, nullable=False),
        sa.Column("first_sequence", sa.BigInteger, nullable=False),
        sa.Column("last_sequence", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("incarnation", "first_sequence"),
    )
