"""Copies off the device: what began, ended and was destroyed in each tier, and decisions to move them.

No leaf of theirs is from before, so the tables are empty. On PostgreSQL they have the months that `events` has; where
the roles are set up they get their rights.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_INDEXES = {
    "copy_steps": (
        ("ix_copy_steps_incarnation", ("incarnation", "tier", "step", "low")),
        ("ix_copy_steps_erasure", ("erasure",)),
    ),
    "transfer_decisions": (
        ("ix_transfer_decisions_residency", ("incarnation", "residency")),
        ("ix_transfer_decisions_at", ("at_us", "log", "idx")),
    ),
}
_WALLED = "SELECT 1 FROM pg_policies WHERE tablename = 'events' AND policyname = 'of_tenant'"
_RIGHTS = {
    "kvcustody_writer": "SELECT, INSERT",
    "kvcustody_retention": "SELECT, DELETE",
    "kvcustody_auditor": "SELECT",
    "kvcustody_signer": "SELECT",
    "kvcustody_reader": "SELECT",
}


def upgrade() -> None:
    connection = op.get_bind()
    in_file = connection.dialect.name == "sqlite"
    for table, columns in _TABLES.items():
        key = ("log", "idx") if in_file else ("log", "idx", "at_us")
        options: dict[str, Any] = {} if in_file else {"postgresql_partition_by": "RANGE (at_us)"}
        op.create_table(
            table,
            *_place(),
            *columns(),
            _number("at_us"),
            sa.PrimaryKeyConstraint(*key, name=op.f(f"pk_{table}")),
            **options,
        )
        for name, indexed in _INDEXES[table]:
            op.create_index(name, table, list(indexed))
        if not in_file:
            _partition(connection, table)
    if not in_file:
        _grant(connection)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def _place() -> list[sa.Column[int]]:
    return [
        sa.Column("log", sa.Integer(), nullable=False),
        _number("idx"),
        sa.Column("incarnation", sa.Integer(), nullable=False),
    ]


def _steps() -> list[sa.Column[int] | sa.Column[str]]:
    return [
        sa.Column("step", sa.String(32), nullable=False),
        *_texts("tier"),
        sa.Column("tenant", sa.Text(), nullable=True),
        *_texts("classification", "cause", "erasure"),
        *map(_number, ("copies", "numbers", "blocks", "bytes", "low", "high")),
    ]


def _decisions() -> list[sa.Column[int] | sa.Column[str]]:
    return [
        *_texts("action", "tier", "tenant"),
        *map(_number, ("residency", "blocks", "bytes", "transfer_us", "recompute_us")),
        *_texts("choice", "outcome"),
        _number("actual_us"),
        *_texts("reason"),
    ]


_TABLES = {"copy_steps": _steps, "transfer_decisions": _decisions}


def _partition(connection: sa.Connection, table: str) -> None:
    run = connection.exec_driver_sql
    refused = "FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_append_only()"
    months = (
        "SELECT relname, pg_get_expr(relpartbound, pg_class.oid) AS bound FROM pg_inherits"
        " JOIN pg_class ON pg_class.oid = inhrelid WHERE inhparent = to_regclass('events')"
    )
    run(f"CREATE TRIGGER no_truncate BEFORE TRUNCATE ON {table} {refused}")
    for month in run(months).all():
        name = f"{table}_{month.relname.removeprefix('events_')}"
        run(f"CREATE TABLE {name} PARTITION OF {table} {month.bound}")
        run(f"CREATE TRIGGER no_truncate BEFORE TRUNCATE ON {name} {refused}")
        run(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")


def _grant(connection: sa.Connection) -> None:
    known = set(connection.scalars(sa.text("SELECT rolname FROM pg_roles")))
    for role, rights in _RIGHTS.items():
        if role in known:
            connection.exec_driver_sql(f"GRANT {rights} ON {', '.join(_TABLES)} TO {role}")
    if "kvcustody_reader" in known and connection.scalar(sa.text(_WALLED)):
        for table in _TABLES:
            connection.exec_driver_sql(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            connection.exec_driver_sql(
                f"CREATE POLICY of_tenant ON {table} FOR SELECT TO kvcustody_reader"
                " USING (log = (SELECT kvcustody_log()))"
            )
