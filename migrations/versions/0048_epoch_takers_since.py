"""Record since when each door and worker acts by its version of the erase epochs."""

import sqlalchemy as sa
from alembic import op

revision = "0048"
down_revision = "0046"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("service_epoch_takers", sa.Column("since_us", sa.BigInteger, nullable=False, server_default="0"))
    op.execute("UPDATE service_epoch_takers SET since_us = heard_us")
