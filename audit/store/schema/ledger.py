"""The ledger's tables (SQLAlchemy Core), the same on SQLite and PostgreSQL.

1. `events` holds the truth: one canonical leaf for each row, at a contiguous `idx` of its log. `logs.size` is the next
   `idx`, and `logs.frontier` is the state from which the log's tree grows (`tree_schema`).
2. Every other table of evidence is a projection, into which rows are only ever inserted. Its key is the leaf that a row
   came from, and the item if a leaf holds several.
3. (incarnation, sequence, part, log) is unique in `events`: a spill replayed twice adds nothing. On PostgreSQL the
   tables that grow with traffic (`MONTHLY`) are partitioned by month, and their keys contain the time of the leaf too.
   `monthly_partitions` explains how rule 1, rule 3 and the keys of projections are kept.
4. `subjects` is the only place that links a pseudonym to a subject. It holds the secret from which the pseudonyms of
   the subject's sessions are derived. Deleting rows there unlinks without changing a leaf, and `subject_unlinkings`
   counts how often that happened.

Times named `*_boot_us` are exact boot-time microseconds of the row's incarnation (arithmetic); `*_us` are UTC (periods,
people). A run list split over several leaves is one row a part, each with the blocks of that part.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(column_0_label)s",
    }
)

logs = Table(
    "logs",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
    Column("size", BigInteger, nullable=False),
    Column("frontier", LargeBinary, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("log", Integer, nullable=False),
    Column("idx", BigInteger, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("part", Integer, nullable=False),
    Column("parts", Integer, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("outage", String(1), nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("leaf", LargeBinary, nullable=False),
    PrimaryKeyConstraint("log", "idx"),
    UniqueConstraint("incarnation", "sequence", "part", "log"),
    Index("ix_events_log_at", "log", "at_us"),
    Index("ix_events_kind", "kind", "incarnation"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("log", Integer, nullable=False),
    Column("first_seen_us", BigInteger, nullable=False),
)


workers = Table(
    "workers",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
)

incarnations = Table(
    "incarnations",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("uuid", String(32), nullable=False, unique=True),
    Column("worker", Integer, nullable=False),
    Column("offset_us", BigInteger, nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("shards", Integer, nullable=True),
    Column("blocks", BigInteger, nullable=True),
    Column("bytes_per_block", BigInteger, nullable=True),
    Column("device", Text, nullable=True),
    Column("software", Text, nullable=True),
    Column("ended_us", BigInteger, nullable=True),
    Column("end", Text, nullable=True),
    Index("ix_incarnations_worker", "worker"),
)


subjects = Table(
    "subjects",
    metadata,
    Column("pseudonym", String(32), primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("secret", Text, nullable=True),
    Index("ix_subjects_who", "tenant", "subject", "session"),
)

subject_unlinkings = Table(
    "subject_unlinkings",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # one row, 1; none before the first
    Column("count", BigInteger, nullable=False),
)
