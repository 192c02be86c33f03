"""How many blocks of a restore came, where it brought a part; 0 in rows from before, of which no leaf says it."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("part_blocks", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("transfer_decisions", column)
