"""Schedules of evidence reports, the reports that were made, and how each was delivered."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "service_report_schedules",
        sa.Column("schedule", sa.String(length=16), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("roles", sa.Text(), nullable=False),
        sa.Column("of_tenant", sa.Text(), nullable=True),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("framework", sa.Text(), nullable=False),
        sa.Column("formats", sa.Text(), nullable=False),
        sa.Column("destinations", sa.Text(), nullable=False),
        sa.Column("every", sa.String(length=16), nullable=False),
        sa.Column("zone", sa.Text(), nullable=False),
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("after_us", sa.BigInteger(), nullable=False),
        sa.Column("made_us", sa.BigInteger(), nullable=False),
        sa.Column("changed_us", sa.BigInteger(), nullable=False),
        sa.Column("changed_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("schedule", name=op.f("pk_service_report_schedules")),
    )
    op.create_table(
        "service_reports",
        sa.Column("report", sa.String(length=32), nullable=False),
        sa.Column("schedule", sa.String(length=16), nullable=True),
        sa.Column("job", sa.String(length=32), nullable=True),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("framework", sa.Text(), nullable=False),
        sa.Column("formats", sa.Text(), nullable=False),
        sa.Column("since_us", sa.BigInteger(), nullable=False),
        sa.Column("until_us", sa.BigInteger(), nullable=False),
        sa.Column("due_us", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("lease_us", sa.BigInteger(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_us", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint", sa.BigInteger(), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("opinion", sa.String(length=16), nullable=True),
        sa.Column("reasons", sa.Text(), nullable=True),
        sa.Column("signed_by", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("made_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("report", name=op.f("pk_service_reports")),
        sa.UniqueConstraint("schedule", "since_us", name=op.f("uq_service_reports_schedule")),
    )
    op.create_index("ix_service_reports_created_us", "service_reports", ["created_us"])
    op.create_index("ix_service_reports_state", "service_reports", ["state"])
    op.create_table(
        "service_report_deliveries",
        sa.Column("report", sa.String(length=32), nullable=False),
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_us", sa.BigInteger(), nullable=False),
        sa.Column("failing_us", sa.BigInteger(), nullable=True),
        sa.Column("delivered_us", sa.BigInteger(), nullable=True),
        sa.Column("place", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("report", "destination", name=op.f("pk_service_report_deliveries")),
    )
    op.create_index("ix_service_report_deliveries_state", "service_report_deliveries", ["state"])
