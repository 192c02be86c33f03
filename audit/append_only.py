"""Leaves and trees are only ever inserted: the database itself refuses to change or delete them.

U1 On both databases a trigger refuses every UPDATE and DELETE of leaves, nodes, root leaves and checkpoints (and
TRUNCATE, which SQLite has not), and every change of a log but its growth. Nobody is exempt, the owner included, short
of dropping the trigger, which leaves the trees to tell.
U2 Retention alone deletes leaves, inside `lifted`, for one transaction; on PostgreSQL its role needs the right to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

PROTECTED = ("events", "tree_nodes", "root_leaves", "checkpoints", "signed_checkpoints")

_SQLITE_LOGS = """
CREATE TRIGGER logs_grow BEFORE UPDATE ON logs
WHEN NEW.size < OLD.size OR NEW.name != OLD.name OR NEW.id != OLD.id
BEGIN SELECT RAISE(ABORT, 'a log only grows'); END
"""
_SQLITE_LOGS_STAY = """
CREATE TRIGGER logs_stay BEFORE DELETE ON logs BEGIN SELECT RAISE(ABORT, 'a log is never deleted'); END
"""
_POSTGRES = """
CREATE FUNCTION kvcustody_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND TG_TABLE_NAME LIKE 'events%%'
       AND current_setting('kvcustody.retention', true) = 'on' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'rows of %% are never changed or deleted', TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
_POSTGRES_LOGS = """
CREATE FUNCTION kvcustody_logs_grow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.size >= OLD.size AND NEW.name = OLD.name AND NEW.id = OLD.id THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'a log only grows' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""


def protect(connection: Connection) -> None:
    """Create every trigger (U1)."""
    if connection.dialect.name == "sqlite":
        for table in PROTECTED:
            _protect_sqlite(connection, table)
        connection.exec_driver_sql(_SQLITE_LOGS)
        connection.exec_driver_sql(_SQLITE_LOGS_STAY)
        return
    connection.exec_driver_sql(_POSTGRES)
    connection.exec_driver_sql(_POSTGRES_LOGS)
    for table in PROTECTED:
        rest = "EXECUTE FUNCTION kvcustody_append_only()"
        connection.exec_driver_sql(
            f"CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW {rest}"
        )
        connection.exec_driver_sql(
            f"CREATE TRIGGER no_truncate BEFORE TRUNCATE ON {table} FOR EACH STATEMENT {rest}"
        )
    connection.exec_driver_sql(
        "CREATE TRIGGER logs_grow BEFORE UPDATE OR DELETE ON logs FOR EACH ROW EXECUTE FUNCTION kvcustody_logs_grow()"
    )


@contextmanager
def lifted(connection: Connection) -> Iterator[None]:
    """Leaves may be deleted inside this block of the caller's transaction, and by nobody else meanwhile (U2)."""
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql("SET LOCAL kvcustody.retention = 'on'")
        yield
        connection.exec_driver_sql("SET LOCAL kvcustody.retention = 'off'")
        return
    connection.exec_driver_sql("DROP TRIGGER events_no_delete")
    yield
    connection.exec_driver_sql(_sqlite_trigger("events", "delete"))


def _protect_sqlite(connection: Connection, table: str) -> None:
    for act in ("update", "delete"):
        connection.exec_driver_sql(_sqlite_trigger(table, act))


def _sqlite_trigger(table: str, act: str) -> str:
    refusal = f"SELECT RAISE(ABORT, 'rows of {table} are never changed or deleted')"
    return f"CREATE TRIGGER {table}_no_{act} BEFORE {act.upper()} ON {table} BEGIN {refusal}; END"
