"""The ledger's tables (SQLAlchemy Core), the same on SQLite and PostgreSQL.

1. `events` holds the truth, one canonical leaf a row, at a contiguous `idx` of its log; `logs.size` is the next one,
   and `logs.frontier` what the log's tree grows by (`tree_schema`).
2. Every other table of evidence is a projection, keyed by the leaf it came from (and the item of it, where a leaf holds
   several), and only ever inserted into.
3. (incarnation, sequence, part, log) is unique in `events`: a spill replayed twice adds nothing. On PostgreSQL the
   tables that grow with traffic (`MONTHLY`) are partitioned by month, their keys contain the time of the leaf too, and
   `monthly_partitions` says what keeps rule 1, rule 3 and the keys of projections.
4. `subjects` is the only place where a pseudonym meets a subject, and holds the secret that its sessions' pseudonyms
   come from; deleting rows there unlinks without touching a leaf, and `subject_unlinkings` counts how often that
   happened.

Times named `*_boot_us` are exact boot-time microseconds of the row's incarnation (arithmetic); `*_us` are
UTC (periods, people). A run list split over several leaves is one row a part, each with the blocks of that
part.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    literal_column,
)

OF_ORDERS = {
    "orders": True
}  # a table whose rows are of orders (`audit.events`): a worker's role inserts none
metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(column_0_label)s",
    }
)

_Id = BigInteger().with_variant(Integer, "sqlite")


def _big(name: str, *, null: bool = False) -> Column[Any]:
    return Column(name, BigInteger, nullable=null)


def _text(name: str, *, null: bool = False) -> Column[Any]:
    return Column(name, Text, nullable=null)


def _place() -> tuple[Column[Any], Column[Any]]:
    """Where the leaf is: the key of every projection."""
    return Column("log", Integer, nullable=False), Column("idx", BigInteger, nullable=False)


def _leaf_us() -> Column[Any]:
    """When the leaf is of, which an item of it may be earlier than: the month that a row lies in (`MONTHLY`)."""
    return _big("at_us")


def _item() -> Column[Any]:
    """Which item of its leaf a row is of, where a leaf holds several; 0 where the leaf is no list."""
    return Column("item", Integer, nullable=False, server_default="0")


logs = Table(
    "logs",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
    _big("size"),
    Column("frontier", LargeBinary, nullable=False),
)

events = Table(
    "events",
    metadata,
    *_place(),
    Column("incarnation", Integer, nullable=False),
    _big("sequence"),
    Column("part", Integer, nullable=False),
    Column("parts", Integer, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("outage", String(1), nullable=False),
    _big("at_us"),
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
    _big("first_seen_us"),
)

policy_revisions = Table(
    "policy_revisions",
    metadata,
    *_place(),
    _big("revision"),
    _text("name"),
    _text("profile"),
    _text("digest"),
    _text("actor"),
    _big("previous"),
    _big("at_us"),
    PrimaryKeyConstraint("log", "idx"),
    Index("ix_policy_revisions_revision", "revision"),
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
    _big("offset_us"),
    _big("started_us"),
    Column("shards", Integer, nullable=True),
    _big("blocks", null=True),
    _big("bytes_per_block", null=True),
    _text("device", null=True),
    _text("software", null=True),
    _big("ended_us", null=True),
    _text("end", null=True),
    Index("ix_incarnations_worker", "worker"),
)

residencies = Table(
    "residencies",
    metadata,
    *_place(),
    Column("incarnation", Integer, nullable=False),
    _big("residency"),
    Column("part", Integer, nullable=False),
    _text("tenant"),
    _text("subject", null=True),
    _text("session", null=True),
    Column("asserted", Boolean, nullable=False),
    _text("classification"),
    _big("revision"),
    _big("opened_us"),
    _big("opened_boot_us"),
    _big("absolute_boot_us"),
    _big("attached_blocks"),
    _big("written_blocks"),
    _big("low"),
    _big("high"),
    PrimaryKeyConstraint("log", "idx"),
    UniqueConstraint("incarnation", "residency", "part"),
)
SPAN_LEAVES = 1024


def span_of(idx: ColumnElement[int]) -> ColumnElement[int]:
    """The span of its log that a leaf is in, written as the index of subjects has it (`by_subject`)."""
    return idx // literal_column(str(SPAN_LEAVES), Integer)


Index("ix_residencies_log_subject", residencies.c.log, span_of(residencies.c.idx), residencies.c.subject)

attachments = Table(
    "attachments",
    metadata,
    *_place(),
    Column("incarnation", Integer, nullable=False),
    _big("residency"),
    Column("part", Integer, nullable=False),
    _text("tenant"),
    _big("attached_boot_us"),
    _big("attached_blocks"),
    _big("low"),
    _big("high"),
    _leaf_us(),
    PrimaryKeyConstraint("log", "idx"),
    Index("ix_attachments_residency", "incarnation", "residency"),
)

releases = Table(
    "releases",
    metadata,
    *_place(),
    _item(),
    Column("incarnation", Integer, nullable=False),
    _big("residency"),
    Column("part", Integer, nullable=False),
    Column("final", Boolean, nullable=False),
    Column("written", Boolean, nullable=False),
    _text("tenant"),
    _text("cause"),
    _big("released_us"),
    _big("released_boot_us"),
    _big("hold_boot_us"),
    _big("written_blocks"),
    _big("low"),
    _big("high"),
    _leaf_us(),
    PrimaryKeyConstraint("log", "idx", "item"),
    Index("ix_releases_residency", "incarnation", "residency"),
)

custody_ends = Table(
    "custody_ends",
    metadata,
    *_place(),
    _item(),
    Column("incarnation", Integer, nullable=False),
    _text("tenant"),
    _text("classification"),
    _text("cause"),
    _big("due_us"),
    _big("due_boot_us"),
    _big("ended_boot_us"),
    _big("retired_boot_us"),
    _big("ceiling_boot_us"),
    _big("scrub_within_us"),
    _big("blocks"),
    _big("low"),
    _big("high"),
    _leaf_us(),
    PrimaryKeyConstraint("log", "idx", "item"),
    Index("ix_custody_ends_due", "due_us"),
    Index("ix_custody_ends_generation", "incarnation", "high"),
)

receipts = Table(
    "receipts",
    metadata,
    *_place(),
    _item(),
    Column("incarnation", Integer, nullable=False),
    _big("launch"),
    Column("shard", Integer, nullable=False),
    _text("tenant", null=True),
    _text("method"),
    _text("device"),
    _big("bytes"),
    _big("started_boot_us"),
    _big("ended_boot_us"),
    _text("level"),
    Column("share_ppm", Integer, nullable=False),
    _big("verified"),
    _text("result"),
    _big("blocks"),
    _big("low"),
    _big("high"),
    _leaf_us(),
    PrimaryKeyConstraint("log", "idx", "item"),
    Index("ix_receipts_generation", "incarnation", "high"),
)

decisions = Table(
    "decisions",
    metadata,
    *_place(),
    _text("action"),
    _text("effect"),
    _text("reader"),
    _text("owner"),
    _text("classification"),
    _text("rule"),
    _big("revision"),
    _text("via"),
    _big("at_us"),
    PrimaryKeyConstraint("log", "idx"),
)

hit_counters = Table(
    "hit_counters",
    metadata,
    *_place(),
    _text("tenant"),
    _text("owner"),
    _text("action"),
    _text("effect"),
    _text("rule"),
    _big("revision"),
    _big("from_us"),
    _big("at_us"),
    _big("requests"),
    _big("blocks"),
    _big("tokens"),
    PrimaryKeyConstraint("log", "idx"),
)

erasures = Table(
    "erasures",
    metadata,
    *_place(),
    _text("erasure"),
    _text("tenant", null=True),
    _text("selector"),
    _text("subject", null=True),
    _text("session", null=True),
    _text("actor"),
    Column("incarnation", Integer, nullable=False),
    _big("at_us"),
    _big("at_boot_us"),
    _big("deadline_boot_us"),
    _text("detail"),
    PrimaryKeyConstraint("log", "idx"),
    Index("ix_erasures_erasure", "erasure"),
    info=OF_ORDERS,
)

erasure_results = Table(
    "erasure_results",
    metadata,
    *_place(),
    Column("incarnation", Integer, nullable=False),
    _text("erasure"),
    _text("outcome"),
    _big("residencies"),
    _big("blocks"),
    _big("remaining"),
    _text("reason"),
    _big("at_us"),
    PrimaryKeyConstraint("log", "idx"),
    Index("ix_erasure_results_erasure", "erasure"),
)

orphan_scans = Table(
    "orphan_scans",
    metadata,
    *_place(),
    Column("incarnation", Integer, nullable=False),
    _big("scan"),
    _text("mode"),
    _big("started_boot_us"),
    _big("ended_boot_us"),
    _big("residencies"),
    _big("blocks"),
    _big("findings"),
    _big("at_us"),
    PrimaryKeyConstraint("log", "idx"),
)

orphan_findings = Table(
    "orphan_findings",
    metadata,
    *_place(),
    Column("incarnation", Integer, nullable=False),
    _big("scan"),
    _big("finding"),
    _text("orphan"),
    _text("cause"),
    _text("tenant", null=True),
    _big("residency"),
    _big("age_us"),
    _text("action"),
    _text("outcome"),
    _big("blocks"),
    _big("at_us"),
    PrimaryKeyConstraint("log", "idx"),
)

outages = Table(
    "outages",
    metadata,
    *_place(),
    Column("incarnation", Integer, nullable=False),
    _text("kind"),
    _text("cause"),
    _big("first_sequence"),
    _big("last_sequence"),
    _big("added"),
    _big("duplicates"),
    _big("at_us"),
    PrimaryKeyConstraint("log", "idx"),
)

subjects = Table(
    "subjects",
    metadata,
    Column("pseudonym", String(32), primary_key=True),
    _text("tenant"),
    _text("subject"),
    _text("session"),
    _text("secret", null=True),
    Index("ix_subjects_who", "tenant", "subject", "session"),
)

subject_unlinkings = Table(
    "subject_unlinkings",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # one row, 1; none before the first
    _big("count"),
)
