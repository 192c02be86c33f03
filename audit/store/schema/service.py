"""The control plane's tables, beside the ledger's: principals, answers, and jobs.

1. Nothing here is evidence: what an act meant is in the ledger's leaves, and these rows can be lost without a gap.
2. No secret is stored. Keys and sessions are digests, kept answers are sealed.
3. Times named `*_us` are UTC.
4. A column's `info` restricts its values further than its type. `stored_rows` reads rows by it.
   - `words`: those that this release knows, with the one that stands for any other (`else`);
   - `json`: the form of a document (`object`, `numbers`: an object of them, `numbers by name`: an object of those);
   - `form`: a regular expression.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from kvcustody.audit.store.schema.ledger import metadata

JOB_STATES = ("waiting", "running", "finished", "failed", "cancelled", "lost")

service_principals = Table(
    "service_principals",
    metadata,
    Column("name", Text, primary_key=True),
    Column("kind", String(8), nullable=False, info={"words": ("person", "machine", "token"), "else": "machine"}),
    Column("roles", Text, nullable=False),
    Column("tenant", Text, nullable=True),
    Column("enrolled_us", BigInteger, nullable=False),
    Column("enrolled_by", Text, nullable=False),
    Column("disabled_us", BigInteger, nullable=True),
    Column("version", Integer, nullable=False),
    Column("given", Text, nullable=True),  # of a bootstrap principal: roles of `APART` that it gave
)

service_keys = Table(
    "service_keys",
    metadata,
    Column("prefix", String(16), primary_key=True),
    Column("principal", Text, nullable=False),
    Column("hash", Text, nullable=False, info={"form": r"\$blake2b\$[!-~]+"}),
    Column("issued_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Column("used_us", BigInteger, nullable=True),
    Column("revoked_us", BigInteger, nullable=True),
    Column("certificate", String(43), nullable=True),
    Index("ix_service_keys_principal", "principal"),
)

service_sessions = Table(
    "service_sessions",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("principal", Text, nullable=False),
    Column("begun_us", BigInteger, nullable=False),
    Column("used_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
)

service_answers = Table(
    "service_answers",
    metadata,
    Column("principal", Text, nullable=False),
    Column("key", String(64), nullable=False),
    Column("request", String(64), nullable=False),
    Column("owner", Text, nullable=False),
    Column("begun_us", BigInteger, nullable=False),
    Column("finished", Boolean, nullable=False),
    Column("sealed", LargeBinary, nullable=True),
    PrimaryKeyConstraint("principal", "key"),
    Index("ix_service_answers_begun_us", "begun_us"),
)

service_jobs = Table(
    "service_jobs",
    metadata,
    Column("job", String(32), primary_key=True),
    Column("kind", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("tenant", Text, nullable=True),
    Column("state", String(16), nullable=False, info={"words": JOB_STATES, "else": "lost"}),
    Column("done", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=True),
    Column("parameters", Text, nullable=False, info={"json": "object"}),
    Column("result", Text, nullable=True, info={"json": "object"}),
    Column("error", Text, nullable=True),
    Column("created_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger, nullable=True),
    Index("ix_service_jobs_created_us", "created_us"),
)

service_workers = Table(
    "service_workers",
    metadata,
    Column("incarnation", String(32), primary_key=True),
    Column("worker", Text, nullable=False),
    Column("seen_us", BigInteger, nullable=False),
    Column("received_sequence", BigInteger, nullable=False),
    Column("policy_revision", BigInteger, nullable=False),
    Column("status", Text, nullable=False, info={"json": "numbers"}),
    Column("charged", Text, nullable=True, info={"json": "numbers"}),
    Column("tenants", Text, nullable=True, info={"json": "numbers by name"}),
    Column(
        "role",
        String(8),
        nullable=False,
        server_default="worker",
        info={"words": ("worker", "door"), "else": "worker"},
    ),
    Index("ix_service_workers_worker", "worker"),
)

erase_epochs = Table(
    "erase_epochs",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # the newest stays: it is the version
    Column("tag", LargeBinary, nullable=False),
    Column("shared", LargeBinary, nullable=True),  # the tag of the tenant's shared name; of the fleet: nothing
    Column("kind", String(8), nullable=False),
    Column("raised_us", BigInteger, nullable=False),
    Column("deadline_us", BigInteger, nullable=True),  # of the erasure, where the shared name waits for its batch
    Column("ends_us", BigInteger, nullable=False),
    Column("erasure", String(64), nullable=False),
    Column("key", String(16), nullable=False),  # which key the tags are under
    Index("ix_erase_epochs_shared", "shared", "kind", "raised_us"),
    Index("ix_erase_epochs_deadline_us", "deadline_us"),
)

service_epoch_takers = Table(
    "service_epoch_takers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("role", String(8), nullable=False, info={"words": ("worker", "door"), "else": "worker"}),
    Column("version", BigInteger, nullable=False),
    Column("heard_us", BigInteger, nullable=False),
    Column("since_us", BigInteger, nullable=False, server_default="0"),  # when it first asked with the version
)

service_scan_orders = Table(
    "service_scan_orders",
    metadata,
    Column("scan_order", String(32), primary_key=True),
    Column("worker", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("deadline_us", BigInteger, nullable=False),
    Column("taken_us", BigInteger, nullable=True),
    Column("answered_us", BigInteger, nullable=True),
    Column("incarnation", String(32), nullable=True),
    Column("scan", BigInteger, nullable=True),
    Column("findings", BigInteger, nullable=True),
    Column("reason", Text, nullable=True),
    Index("ix_service_scan_orders_worker", "worker"),
)

service_report_schedules = Table(
    "service_report_schedules",
    metadata,
    Column("schedule", String(16), primary_key=True),
    Column("principal", Text, nullable=False),
    Column("roles", Text, nullable=False),  # of whom no book has: those of the token that made it
    Column("of_tenant", Text, nullable=True),  # whose people the principal is of
    Column("tenant", Text, nullable=True),
    Column("framework", Text, nullable=False),
    Column("formats", Text, nullable=False),
    Column("destinations", Text, nullable=False),
    Column("every", String(16), nullable=False),
    Column("zone", Text, nullable=False),
    Column("hour", Integer, nullable=False),
    Column(
        "state",
        String(16),
        nullable=False,
        info={"words": ("active", "paused", "deleted"), "else": "paused"},
    ),
    Column("after_us", BigInteger, nullable=False),  # what was due until then is in `service_reports`
    Column("made_us", BigInteger, nullable=False),
    Column("changed_us", BigInteger, nullable=False),
    Column("changed_by", Text, nullable=False),
)

service_reports = Table(
    "service_reports",
    metadata,
    Column("report", String(32), primary_key=True),
    Column("schedule", String(16), nullable=True),
    Column("job", String(32), nullable=True),
    Column("principal", Text, nullable=False),
    Column("tenant", Text, nullable=True),
    Column("framework", Text, nullable=False),
    Column("formats", Text, nullable=False),
    Column("since_us", BigInteger, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    Column("due_us", BigInteger, nullable=True),
    Column(
        "state",
        String(16),
        nullable=False,
        info={"words": ("waiting", "making", "made", "failed", "skipped"), "else": "failed"},
    ),
    Column("owner", Text, nullable=False),
    Column("lease_us", BigInteger, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("next_us", BigInteger, nullable=False),
    Column("checkpoint", BigInteger, nullable=True),
    Column("digest", String(64), nullable=True),
    Column("opinion", String(16), nullable=True),
    Column("reasons", Text, nullable=True),
    Column("signed_by", Text, nullable=True),
    Column("error", Text, nullable=True),
    Column("created_us", BigInteger, nullable=False),
    Column("made_us", BigInteger, nullable=True),
    UniqueConstraint("schedule", "since_us"),
    Index("ix_service_reports_created_us", "created_us"),
    Index("ix_service_reports_state", "state"),
)

service_report_deliveries = Table(
    "service_report_deliveries",
    metadata,
    Column("report", String(32), nullable=False),
    Column("destination", Text, nullable=False),
    Column(
        "state",
        String(16),
        nullable=False,
        info={"words": ("waiting", "delivered", "given-up"), "else": "given-up"},
    ),
    Column("tries", Integer, nullable=False),
    Column("next_us", BigInteger, nullable=False),
    Column("failing_us", BigInteger, nullable=True),
    Column("delivered_us", BigInteger, nullable=True),
    Column("place", Text, nullable=True),
    Column("error", Text, nullable=True),
    PrimaryKeyConstraint("report", "destination"),
    Index("ix_service_report_deliveries_state", "state"),
)
