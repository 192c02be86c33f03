"""The first ledger: leaves, their projections, and the pseudonyms."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "custody_ends",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("classification", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("due_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("retired_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("ceiling_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("scrub_within_us", sa.BigInteger(), nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_custody_ends")),
    )
    op.create_index("ix_custody_ends_generation", "custody_ends", ["incarnation", "high"], unique=False)
    op.create_table(
        "decisions",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("effect", sa.Text(), nullable=False),
        sa.Column("reader", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("classification", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_decisions")),
    )
    op.create_table(
        "erasure_results",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("erasure", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("residencies", sa.BigInteger(), nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("remaining", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_erasure_results")),
    )
    op.create_index("ix_erasure_results_erasure", "erasure_results", ["erasure"], unique=False)
    op.create_table(
        "erasures",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("erasure", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("selector", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=True),
        sa.Column("session", sa.Text(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("at_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("deadline_boot_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_erasures")),
    )
    op.create_index("ix_erasures_erasure", "erasures", ["erasure"], unique=False)
    op.create_table(
        "events",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("parts", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("outage", sa.String(length=1), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("leaf", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_events")),
        sa.UniqueConstraint("incarnation", "sequence", "part", "log", name=op.f("uq_events_incarnation")),
    )
    op.create_index("ix_events_kind", "events", ["kind", "incarnation"], unique=False)
    op.create_table(
        "hit_counters",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("effect", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("from_us", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_hit_counters")),
    )
    op.create_table(
        "incarnations",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("uuid", sa.String(length=32), nullable=False),
        sa.Column("worker", sa.Integer(), nullable=False),
        sa.Column("offset_us", sa.BigInteger(), nullable=False),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("shards", sa.Integer(), nullable=True),
        sa.Column("blocks", sa.BigInteger(), nullable=True),
        sa.Column("bytes_per_block", sa.BigInteger(), nullable=True),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("software", sa.Text(), nullable=True),
        sa.Column("ended_us", sa.BigInteger(), nullable=True),
        sa.Column("end", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incarnations")),
        sa.UniqueConstraint("uuid", name=op.f("uq_incarnations_uuid")),
    )
    op.create_index("ix_incarnations_worker", "incarnations", ["worker"], unique=False)
    op.create_table(
        "logs",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_logs")),
        sa.UniqueConstraint("name", name=op.f("uq_logs_name")),
    )
    op.create_table(
        "orphan_findings",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("scan", sa.BigInteger(), nullable=False),
        sa.Column("finding", sa.BigInteger(), nullable=False),
        sa.Column("orphan", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("residency", sa.BigInteger(), nullable=False),
        sa.Column("age_us", sa.BigInteger(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_orphan_findings")),
    )
    op.create_table(
        "orphan_scans",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("scan", sa.BigInteger(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("started_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("residencies", sa.BigInteger(), nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("findings", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_orphan_scans")),
    )
    op.create_table(
        "outages",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("first_sequence", sa.BigInteger(), nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.Column("added", sa.BigInteger(), nullable=False),
        sa.Column("duplicates", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_outages")),
    )
    op.create_table(
        "policy_revisions",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("previous", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_policy_revisions")),
    )
    op.create_index("ix_policy_revisions_revision", "policy_revisions", ["revision"], unique=False)
    op.create_table(
        "receipts",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("launch", sa.BigInteger(), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("started_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("share_ppm", sa.Integer(), nullable=False),
        sa.Column("verified", sa.BigInteger(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_receipts")),
    )
    op.create_index("ix_receipts_generation", "receipts", ["incarnation", "high"], unique=False)
    op.create_table(
        "releases",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("residency", sa.BigInteger(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.Column("written", sa.Boolean(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("released_us", sa.BigInteger(), nullable=False),
        sa.Column("released_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("hold_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("written_blocks", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_releases")),
    )
    op.create_index("ix_releases_residency", "releases", ["incarnation", "residency"], unique=False)
    op.create_table(
        "residencies",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("residency", sa.BigInteger(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=True),
        sa.Column("session", sa.Text(), nullable=True),
        sa.Column("asserted", sa.Boolean(), nullable=False),
        sa.Column("classification", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("opened_us", sa.BigInteger(), nullable=False),
        sa.Column("opened_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("absolute_boot_us", sa.BigInteger(), nullable=False),
        sa.Column("attached_blocks", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "idx", name=op.f("pk_residencies")),
        sa.UniqueConstraint("incarnation", "residency", "part", name=op.f("uq_residencies_incarnation")),
    )
    op.create_index("ix_residencies_tenant_subject", "residencies", ["tenant", "subject"], unique=False)
    op.create_table(
        "subjects",
        sa.Column("pseudonym", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("session", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("pseudonym", name=op.f("pk_subjects")),
    )
    op.create_index("ix_subjects_who", "subjects", ["tenant", "subject", "session"], unique=False)
    op.create_table(
        "tenants",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("first_seen_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_tenants")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
        sa.UniqueConstraint("name", name=op.f("uq_workers_name")),
    )
