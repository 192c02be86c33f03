"""The control plane's own tables: principals, keys, sessions, answers, jobs, workers.

They begin empty: until now nobody could ask a service.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "service_principals",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("roles", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("enrolled_us", sa.BigInteger(), nullable=False),
        sa.Column("enrolled_by", sa.Text(), nullable=False),
        sa.Column("disabled_us", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_service_principals")),
    )
    op.create_table(
        "service_keys",
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("issued_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.Column("used_us", sa.BigInteger(), nullable=True),
        sa.Column("revoked_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("prefix", name=op.f("pk_service_keys")),
    )
    op.create_index("ix_service_keys_principal", "service_keys", ["principal"])
    op.create_table(
        "service_sessions",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("begun_us", sa.BigInteger(), nullable=False),
        sa.Column("used_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_service_sessions")),
    )
    op.create_table(
        "service_answers",
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("request", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("begun_us", sa.BigInteger(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("principal", "key", name=op.f("pk_service_answers")),
    )
    op.create_index("ix_service_answers_begun_us", "service_answers", ["begun_us"])
    op.create_table(
        "service_jobs",
        sa.Column("job", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("done", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=True),
        sa.Column("parameters", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_service_jobs")),
    )
    op.create_index("ix_service_jobs_created_us", "service_jobs", ["created_us"])
    op.create_table(
        "service_workers",
        sa.Column("incarnation", sa.String(length=32), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("seen_us", sa.BigInteger(), nullable=False),
        sa.Column("received_sequence", sa.BigInteger(), nullable=False),
        sa.Column("policy_revision", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("incarnation", name=op.f("pk_service_workers")),
    )
    op.create_index("ix_service_workers_worker", "service_workers", ["worker"])
