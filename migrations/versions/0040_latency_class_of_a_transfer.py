"""The latency class of the request that a decision about copies was for; empty in rows from before."""

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("latency_class", sa.Text, nullable=False, server_default=sa.text("''"))
    op.add_column("transfer_decisions", column)
