"""Retention may delete the hashes inside tiles whose leaves it dropped: level 0 of `tree_nodes`, and its half level.

A function of its own guards `tree_nodes` on PostgreSQL; SQLite's trigger is lifted by retention as it is. No row
changes.
"""

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_NODES = """
CREATE OR REPLACE FUNCTION kvcustody_nodes_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('kvcustody.retention', true) = 'on' AND OLD.level IN (0, 16) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'rows of %% are never changed or deleted', TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END $$
"""


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    connection.exec_driver_sql(_NODES)
    connection.exec_driver_sql("DROP TRIGGER append_only ON tree_nodes")
    connection.exec_driver_sql(
        "CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON tree_nodes"
        " FOR EACH ROW EXECUTE FUNCTION kvcustody_nodes_append_only()"
    )
