"""Require on PostgreSQL that rows of projections by month belong to an existing log: by triggers, not foreign keys.

Rows that are there already stay; `kvcustody audit fsck` finds those of no log. SQLite has the foreign keys.
"""

from alembic import op

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None

_TABLES = (
    *("residencies", "attachments", "releases", "custody_ends", "receipts", "decisions", "hit_counters"),
    *("event_traces", "copy_steps", "transfer_decisions"),
)
_OF_A_LOG = """
CREATE FUNCTION kvcustody_of_a_log() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM (SELECT DISTINCT log FROM added) AS touched
               WHERE NOT EXISTS (SELECT FROM logs WHERE logs.id = touched.log)) THEN
        RAISE EXCEPTION 'rows of % are of a log that is there', TG_TABLE_NAME
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    RETURN NULL;
END $$
"""


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "sqlite":
        return
    connection.exec_driver_sql(_OF_A_LOG.replace("%", "%%"))
    for table in _TABLES:
        connection.exec_driver_sql(
            f"CREATE TRIGGER of_a_log AFTER INSERT ON {table} REFERENCING NEW TABLE AS added"
            " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_of_a_log()"
        )
