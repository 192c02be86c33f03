"""Commits leave the root log alone: what no checkpoint covers yet is in a table that is empty at first.

Every log of a ledger from before is under a checkpoint. On PostgreSQL the trigger that moves a log's size sets the
frontier that its writer hands over in the same UPDATE. No leaf, tree or signature is touched.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Connection

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_RIGHTS = {
    "kvcustody_writer": "SELECT, INSERT, DELETE",
    "kvcustody_auditor": "SELECT",
    "kvcustody_signer": "SELECT",
    "kvcustody_retention": "SELECT",
}
_PLACES = """
CREATE OR REPLACE FUNCTION kvcustody_places() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    wrong text;
    handed json := coalesce(nullif(current_setting('kvcustody.frontiers', true), ''), '{}')::json;
BEGIN
    WITH touched AS (
        SELECT log, min(idx) AS first, max(idx) + 1 AS past, count(*) AS leaves, count(DISTINCT idx) AS places
        FROM added GROUP BY log
    ), longer AS (
        SELECT key::int AS log, decode(value, 'base64') AS frontier FROM json_each_text(handed)
    ), grown AS (
        UPDATE logs SET size = past, frontier = coalesce(longer.frontier, logs.frontier)
        FROM touched LEFT JOIN longer ON longer.log = touched.log
        WHERE logs.id = touched.log AND size = first AND leaves = past - first AND places = leaves
        RETURNING touched.log
    )
    SELECT min(format('log %%s, leaves %%s to %%s', log, first, past - 1)) INTO wrong
    FROM touched WHERE log NOT IN (SELECT log FROM grown);
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'leaves are appended at the end of their log, each at its own place: %%', wrong
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$
"""


def upgrade() -> None:
    op.create_table(
        "unsealed_heads",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("newest_us", sa.BigInteger(), nullable=False),
        sa.Column("grown_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log", "size", name=op.f("pk_unsealed_heads")),
    )
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_PLACES)
        _grant(connection)


def _grant(connection: Connection) -> None:
    known = set(connection.scalars(sa.text("SELECT rolname FROM pg_roles")))
    for role, rights in _RIGHTS.items():
        if role in known:
            connection.exec_driver_sql(f"GRANT {rights} ON unsealed_heads TO {role}")
