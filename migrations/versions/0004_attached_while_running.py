"""A running request that came to refer to another's blocks: the use is on record, beside what admission attached.

Before this, only what a request attached at admission was listed. No earlier leaf tells of such a use, so the
table begins empty.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "attachments",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("residency", sa.BigInteger(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("attached_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("attached_blocks", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_attachments")),
    )
    op.create_index("ix_attachments_residency", "attachments", ["incarnation", "residency"], unique=False)
