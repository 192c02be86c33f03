"""Coverage by period: custody ends get their due time in UTC, and a log can be read by time.

Before this, a period could only be found by decoding every leaf of it. The due time is derived from the
boot time and the offset of the incarnation that held the custody, both of which the ledger already has.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("custody_ends", sa.Column("due_us", sa.BigInteger(), nullable=True))
    op.execute(
        "UPDATE custody_ends SET due_us = due_boot_us + "
        "(SELECT offset_us FROM incarnations WHERE incarnations.id = custody_ends.incarnation)"
    )
    with op.batch_alter_table("custody_ends") as batch:
        batch.alter_column("due_us", existing_type=sa.BigInteger(), nullable=False)
    op.create_index("ix_custody_ends_due", "custody_ends", ["due_us"])
    op.create_index("ix_events_log_at", "events", ["log", "at_us"])
