"""Rows by month: on PostgreSQL what grows with traffic is partitioned as its leaves are, by the leaves' time.

Rows of four tables get the time of their leaf, on SQLite too. On PostgreSQL the rows of eight tables are copied into
the months that `events` has. No leaf, tree or signature is touched.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_TIMED = ("attachments", "releases", "custody_ends", "receipts")  # get the time of their leaf
_TABLES: dict[str, tuple[str, tuple[str, ...]]] = {  # the time of a row's leaf, and the keys and indexes
    "residencies": (
        "opened_us",
        (
            "CONSTRAINT pk_residencies PRIMARY KEY (log, idx, opened_us)",
            "CONSTRAINT uq_residencies_incarnation UNIQUE (incarnation, residency, part, opened_us)",
            "ix_residencies_log_subject (log, (idx / 1024), subject)",
        ),
    ),
    "attachments": (
        "at_us",
        (
            "CONSTRAINT pk_attachments PRIMARY KEY (log, idx, at_us)",
            "ix_attachments_residency (incarnation, residency)",
        ),
    ),
    "releases": (
        "at_us",
        (
            "CONSTRAINT pk_releases PRIMARY KEY (log, idx, item, at_us)",
            "ix_releases_residency (incarnation, residency)",
        ),
    ),
    "custody_ends": (
        "at_us",
        (
            "CONSTRAINT pk_custody_ends PRIMARY KEY (log, idx, item, at_us)",
            "ix_custody_ends_due (due_us)",
            "ix_custody_ends_generation (incarnation, high)",
        ),
    ),
    "receipts": (
        "at_us",
        (
            "CONSTRAINT pk_receipts PRIMARY KEY (log, idx, item, at_us)",
            "ix_receipts_generation (incarnation, high)",
        ),
    ),
    "decisions": ("at_us", ("CONSTRAINT pk_decisions PRIMARY KEY (log, idx, at_us)",)),
    "hit_counters": ("at_us", ("CONSTRAINT pk_hit_counters PRIMARY KEY (log, idx, at_us)",)),
    "event_traces": (
        "at_us",
        (
            "CONSTRAINT pk_event_traces PRIMARY KEY (log, idx, at_us)",
            "ix_event_traces_trace (trace, log, at_us, idx)",
        ),
    ),
}
_APPEND_ONLY = """
CREATE OR REPLACE FUNCTION kvcustody_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('kvcustody.retention', true) = 'on'
       AND (TG_OP = 'DELETE' AND TG_TABLE_NAME LIKE 'events%%'
            OR TG_OP = 'TRUNCATE' AND (SELECT relispartition FROM pg_class WHERE oid = TG_RELID)) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'rows of %% are never changed or deleted', TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END $$
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for table in _TIMED:
            _add_time(table)
    else:
        op.get_bind().exec_driver_sql(_APPEND_ONLY)
        progress = context.config.attributes.get("progress") or (lambda what, done, total: None)
        for number, table in enumerate(_TABLES, 1):
            _partition(op.get_bind(), table)
            progress("tables by month", number, len(_TABLES))


def _add_time(table: str) -> None:
    op.add_column(table, sa.Column("at_us", sa.BigInteger(), nullable=True))
    leaf = f"SELECT at_us FROM events WHERE events.log = {table}.log AND events.idx = {table}.idx"  # noqa: S608 - our own names
    op.execute(f"UPDATE {table} SET at_us = coalesce(({leaf}), 0)")  # noqa: S608 - our own names
    with op.batch_alter_table(table, recreate="always") as batch:
        batch.alter_column("at_us", existing_type=sa.BigInteger(), nullable=False)


def _partition(connection: sa.Connection, table: str) -> None:
    """A row that is of no leaf (`fsck` says so) goes where no month is."""
    run, old, (column, keys) = connection.exec_driver_sql, f"{table}_old", _TABLES[table]
    run(f"ALTER TABLE {table} RENAME TO {old}")
    if table in _TIMED:
        run(f"ALTER TABLE {old} ADD COLUMN at_us BIGINT")
    run(f"CREATE TABLE {table} (LIKE {old} INCLUDING DEFAULTS) PARTITION BY RANGE ({column})")
    run(f"ALTER TABLE {table} ALTER COLUMN {column} SET NOT NULL")
    months = (
        "SELECT relname, pg_get_expr(relpartbound, pg_class.oid) AS bound FROM pg_inherits"
        " JOIN pg_class ON pg_class.oid = inhrelid WHERE inhparent = to_regclass('events')"
    )
    refused = "FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_append_only()"
    run(f"CREATE TRIGGER no_truncate BEFORE TRUNCATE ON {table} {refused}")
    parts = []
    for month in run(months).all():
        name = f"{table}_{month.relname.removeprefix('events_')}"
        parts.append(name)
        run(f"CREATE TABLE {name} (LIKE {table} INCLUDING DEFAULTS)")
        run(f"ALTER TABLE {table} ATTACH PARTITION {name} {month.bound}")
        run(f"CREATE TRIGGER no_truncate BEFORE TRUNCATE ON {name} {refused}")
        run(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")
    names = [each["name"] for each in sa.inspect(connection).get_columns(old)]
    if table in _TIMED:
        values = ", ".join([*(f"o.{name}" for name in names if name != "at_us"), "coalesce(e.at_us, 0)"])
        rows = f"SELECT {values} FROM {old} AS o LEFT JOIN events AS e ON e.log = o.log AND e.idx = o.idx"  # noqa: S608 - our own names
    else:
        rows = f"SELECT * FROM {old}"  # noqa: S608 - our own names
    run(f"INSERT INTO {table} {rows}")
    _hand_over_rights(connection, table, old, parts)
    run(f"DROP TABLE {old}")  # and what has the names of the keys
    for key in keys:
        name, columns = key.split(" ", 1)
        constraint = name == "CONSTRAINT"
        run(f"ALTER TABLE {table} ADD {key}" if constraint else f"CREATE INDEX {name} ON {table} {columns}")
    run(f"ANALYZE {table}")


def _hand_over_rights(connection: sa.Connection, table: str, old: str, parts: list[str]) -> None:
    """The rights and policies of the table that had the name go to the one that has it."""
    run = connection.exec_driver_sql
    owner = run("SELECT tableowner FROM pg_tables WHERE tablename = %s", (old,)).scalar()
    for each in (table, *parts):
        run(f'ALTER TABLE {each} OWNER TO "{owner}"')
    granted = run(
        "SELECT grantee, string_agg(privilege_type, ', ') AS rights FROM information_schema.role_table_grants"
        " WHERE table_name = %s AND grantee NOT IN (%s, 'PUBLIC') GROUP BY grantee",
        (old, owner),
    ).all()
    for row in granted:
        run(f'GRANT {row.rights} ON {table} TO "{row.grantee}"')
    walled = run("SELECT relrowsecurity FROM pg_class WHERE oid = to_regclass(%s)", (old,)).scalar()
    if walled:
        run(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    policies = run(
        "SELECT policyname, cmd, roles, qual FROM pg_policies WHERE tablename = %s ORDER BY 1", (old,)
    )
    for policy in policies.all():
        roles = ", ".join(f'"{role}"' for role in policy.roles)
        run(f"CREATE POLICY {policy.policyname} ON {table} FOR {policy.cmd} TO {roles} USING ({policy.qual})")
