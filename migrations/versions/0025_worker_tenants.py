"""What a worker says of each tenant, by measure, beside what it charges them. No row that is there changes."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("service_workers", sa.Column("tenants", sa.Text, nullable=True))
