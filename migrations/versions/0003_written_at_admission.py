"""Blocks handed out at admission are counted where a residency opens.

Before this, written blocks were listed at release only, so the blocks of a process that died while its
requests ran were unknown. Leaves of earlier versions list none at opening, so their count is exactly 0.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("residencies", sa.Column("written_blocks", sa.BigInteger(), nullable=True))
    op.execute("UPDATE residencies SET written_blocks = 0")
    with op.batch_alter_table("residencies") as batch:
        batch.alter_column("written_blocks", existing_type=sa.BigInteger(), nullable=False)
