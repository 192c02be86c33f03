"""Scans that workers are asked for, what tenants are charged for at a worker, and keys bound to a certificate.

Rows from before have neither charges nor certificates: their workers report again, and their keys stay bound to none.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "service_scan_orders",
        sa.Column("scan_order", sa.String(length=32), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("deadline_us", sa.BigInteger(), nullable=False),
        sa.Column("taken_us", sa.BigInteger(), nullable=True),
        sa.Column("answered_us", sa.BigInteger(), nullable=True),
        sa.Column("incarnation", sa.String(length=32), nullable=True),
        sa.Column("scan", sa.BigInteger(), nullable=True),
        sa.Column("findings", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("scan_order", name=op.f("pk_service_scan_orders")),
    )
    op.create_index("ix_service_scan_orders_worker", "service_scan_orders", ["worker"])
    op.add_column("service_workers", sa.Column("charged", sa.Text(), nullable=True))
    op.add_column("service_keys", sa.Column("certificate", sa.String(length=43), nullable=True))
