"""Add rows of route receipts: a door's half and a worker's, one leaf each. Both tables grow with traffic."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0049"
down_revision = "0048"
branch_labels = None
depends_on = None

_WRITERS = ("writer", "worker")
_READERS = ("auditor", "signer", "retention", "reader")


def upgrade() -> None:
    _rows_of_leaves(
        "routes_sent",
        _number("incarnation", sa.Integer),
        _text("tenant"),
        _text("receipt", sa.String(32)),
        _text("scope"),
        _number("fleet_epoch"),
        _number("tenant_epoch"),
        _number("scope_epoch"),
        _text("worker"),
        _text("target"),
        _number("status"),
        _number("answer_ms"),
        _number("requests"),
        _number("uses"),
        _number("promised_tokens"),
        _number("score"),
    )
    _rows_of_leaves(
        "routes_found",
        _number("incarnation", sa.Integer),
        _text("tenant"),
        _text("receipt", sa.String(32)),
        sa.Column("asked", sa.Boolean, nullable=False),
        _number("prompt_tokens"),
        _number("found_tokens"),
        _number("queue"),
        _number("free_blocks"),
        sa.Column("crosses", sa.Boolean, nullable=False),
        sa.Column("agrees", sa.Boolean, nullable=False),
        _text("model"),
    )


def _number(name: str, kind: Any = sa.BigInteger) -> "sa.Column[Any]":
    return sa.Column(name, kind, nullable=False)


def _text(name: str, kind: Any = sa.Text) -> "sa.Column[Any]":
    return sa.Column(name, kind, nullable=False)


def _rows_of_leaves(table: str, *columns: "sa.Column[Any]") -> None:
    """A table of rows by the place of their leaf; on PostgreSQL with the months of `events`."""
    connection = op.get_bind()
    on_postgres = connection.dialect.name == "postgresql"
    numbers = "typeof(log) = 'integer' AND typeof(idx) = 'integer'"
    key = ("log", "idx", "at_us") if on_postgres else ("log", "idx")
    op.create_table(
        table,
        sa.Column("log", sa.Integer, nullable=False),
        sa.Column("idx", sa.BigInteger, nullable=False),
        *columns,
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(*key, name=f"pk_{table}"),
        *([] if on_postgres else [sa.ForeignKeyConstraint(["log"], ["logs.id"], name=f"fk_{table}_log")]),
        sa.CheckConstraint("log >= 0 AND idx >= 0", name=f"ck_{table}_place"),
        *([] if on_postgres else [sa.CheckConstraint(numbers, name=f"ck_{table}_numbers")]),
        postgresql_partition_by="RANGE (at_us)" if on_postgres else None,
    )
    op.create_index(f"ix_{table}_receipt", table, ["receipt"])
    op.create_index(f"ix_{table}_time", table, ["at_us"])
    if on_postgres:
        _months(connection, table)
        _rights(connection, table)


def _months(connection: sa.Connection, table: str) -> None:
    """Triggers as the other tables with months have, and a partition for each of `events`, walled off as those are."""
    _refuse_truncate(table)
    op.execute(
        f"CREATE TRIGGER of_a_log AFTER INSERT ON {table} REFERENCING NEW TABLE AS added"
        " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_of_a_log()"
    )
    parts = sa.text(
        "SELECT relname, pg_get_expr(relpartbound, pg_class.oid) AS bound FROM pg_inherits"
        " JOIN pg_class ON pg_class.oid = inhrelid WHERE inhparent = to_regclass('events') ORDER BY relname"
    )
    for name, bound in connection.execute(parts).all():
        month = f"{table}_{name.removeprefix('events_')}"
        op.execute(f"CREATE TABLE {month} (LIKE {table} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
        op.execute(f"ALTER TABLE {table} ATTACH PARTITION {month} {bound}")
        _refuse_truncate(month)
        op.execute(f"ALTER TABLE {month} ENABLE ROW LEVEL SECURITY")


def _refuse_truncate(table: str) -> None:
    op.execute(
        f"CREATE TRIGGER no_truncate BEFORE TRUNCATE ON {table}"
        " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_append_only()"
    )


def _rights(connection: sa.Connection, table: str) -> None:
    """Those of the roles, where there are roles."""
    known = sa.text(
        "SELECT rolname FROM pg_roles WHERE rolname LIKE 'kvcustody_%' AND has_table_privilege(oid, 'events', 'SELECT')"
    )
    roles = {*connection.scalars(known)}
    for role in (f"kvcustody_{name}" for name in (*_WRITERS, *_READERS)):
        if role in roles:
            rights = "SELECT, INSERT" if role.removeprefix("kvcustody_") in _WRITERS else "SELECT"
            op.execute(f"GRANT {rights} ON {table} TO {role}")
    if "kvcustody_retention" in roles:
        op.execute(f"GRANT DELETE ON {table} TO kvcustody_retention")
    if "kvcustody_reader" in roles:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY of_tenant ON {table} FOR SELECT TO kvcustody_reader USING (log = (SELECT kvcustody_log()))"
        )
