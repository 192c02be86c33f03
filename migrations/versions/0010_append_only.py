"""Leaves and trees are only ever inserted: triggers refuse the rest on both databases. No row changes."""

from alembic import op
from sqlalchemy import Connection

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_PROTECTED = ("events", "tree_nodes", "root_leaves", "checkpoints", "signed_checkpoints")

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


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "sqlite":
        for table in _PROTECTED:
            _protect_sqlite(connection, table)
        connection.exec_driver_sql(_SQLITE_LOGS)
        connection.exec_driver_sql(_SQLITE_LOGS_STAY)
        return
    connection.exec_driver_sql(_POSTGRES)
    connection.exec_driver_sql(_POSTGRES_LOGS)
    for table in _PROTECTED:
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


def _protect_sqlite(connection: Connection, table: str) -> None:
    for act in ("update", "delete"):
        refusal = f"SELECT RAISE(ABORT, 'rows of {table} are never changed or deleted')"
        connection.exec_driver_sql(
            f"CREATE TRIGGER {table}_no_{act} BEFORE {act.upper()} ON {table} BEGIN {refusal}; END"
        )
