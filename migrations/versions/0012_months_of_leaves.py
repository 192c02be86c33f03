"""Leaves by month on PostgreSQL: `events` becomes a partitioned table, and what it holds one partition of it.

No leaf changes or moves, so no root does. Two indexes are built over what is there; SQLite stays as it is.
"""

from datetime import UTC, datetime
from itertools import pairwise

from alembic import op
from sqlalchemy import Connection

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_MONTHS_AHEAD = 3
_REST = "events_rest"  # leaves of times that have no month
_FIRST = "events_first"  # what was there before, whatever its time
_PLACES = """
CREATE FUNCTION kvcustody_places() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE wrong text;
BEGIN
    WITH touched AS (
        SELECT log, min(idx) AS first, max(idx) + 1 AS past, count(*) AS leaves, count(DISTINCT idx) AS places
        FROM added GROUP BY log
    ), grown AS (
        UPDATE logs SET size = past FROM touched
        WHERE logs.id = log AND size = first AND leaves = past - first AND places = leaves
        RETURNING log
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
_APPEND_ONLY = """
CREATE OR REPLACE FUNCTION kvcustody_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('kvcustody.retention', true) = 'on'
       AND (TG_OP = 'DELETE' AND TG_TABLE_NAME LIKE 'events%%'
            OR TG_OP = 'TRUNCATE' AND TG_TABLE_NAME LIKE 'events\\_%%') THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'rows of %% are never changed or deleted', TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
_KEYS = (
    "ALTER TABLE events ADD CONSTRAINT pk_events PRIMARY KEY (log, idx, at_us)",
    "ALTER TABLE events ADD CONSTRAINT uq_events_incarnation UNIQUE (incarnation, sequence, part, log, at_us)",
    "CREATE INDEX ix_events_log_at ON events (log, at_us)",
    "CREATE INDEX ix_events_kind ON events (kind, incarnation)",
)
_TRIGGERS = (
    "CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON events"
    " FOR EACH ROW EXECUTE FUNCTION kvcustody_append_only()",
    "CREATE TRIGGER no_truncate BEFORE TRUNCATE ON events"
    " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_append_only()",
    "CREATE TRIGGER places AFTER INSERT ON events REFERENCING NEW TABLE AS added"
    " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_places()",
)


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        _partition(connection, datetime.now(UTC))


def _partition(connection: Connection, now: datetime) -> None:
    """What is there becomes one partition as it stands, up to the end of this month: rows are read to build the two
    wider indexes, and none is copied. Leaves of later times go to their months, or to the rest.
    """
    run = connection.exec_driver_sql
    run(f"ALTER TABLE events RENAME TO {_FIRST}")
    for constraint in ("pk_events", "uq_events_incarnation"):
        run(f"ALTER TABLE {_FIRST} DROP CONSTRAINT {constraint}")
    for index in ("ix_events_log_at", "ix_events_kind"):
        run(f"ALTER INDEX {index} RENAME TO {index.replace('events', _FIRST)}")
    for trigger in ("append_only", "no_truncate"):
        run(f"DROP TRIGGER {trigger} ON {_FIRST}")
    run(f"CREATE TABLE events (LIKE {_FIRST}) PARTITION BY RANGE (at_us)")
    for statement in (*_KEYS, _APPEND_ONLY, _PLACES, *_TRIGGERS):
        run(statement)
    run(f"CREATE TABLE {_REST} (LIKE events)")
    _settle(connection, _REST, "DEFAULT")
    _hand_over_rights(connection)
    months = [_start_us(now, number) for number in range(_MONTHS_AHEAD + 2)]
    if run(f"SELECT 1 FROM {_FIRST} LIMIT 1").first() is None:  # noqa: S608 - our own names
        run(f"DROP TABLE {_FIRST}")
    else:
        below = months[1]
        run(
            f"WITH later AS (DELETE FROM {_FIRST} WHERE at_us >= {below} RETURNING *)"  # noqa: S608 - our own names
            f" INSERT INTO {_REST} SELECT * FROM later"
        )
        _settle(connection, _FIRST, f"FOR VALUES FROM (MINVALUE) TO ({below})")
        del months[0]
    run("SET LOCAL kvcustody.retention = 'on'")  # what lets leaves move from the rest to their month
    for first, below in pairwise(months):
        _attach_month(connection, first, below)
    run("SET LOCAL kvcustody.retention = 'off'")


def _attach_month(connection: Connection, first: int, below: int) -> None:
    """The partition of [`first`, `below`), with the leaves of it that the rest holds."""
    run, name = connection.exec_driver_sql, f"events_{datetime.fromtimestamp(first // 1_000_000, UTC):%Y_%m}"
    run(f"CREATE TABLE {name} (LIKE events)")
    run(
        f"WITH moved AS (DELETE FROM {_REST} WHERE at_us >= {first} AND at_us < {below} RETURNING *)"  # noqa: S608 - our own names
        f" INSERT INTO {name} SELECT * FROM moved"
    )
    _settle(connection, name, f"FOR VALUES FROM ({first}) TO ({below})")


def _settle(connection: Connection, name: str, bound: str) -> None:
    """Attach a table, and wall it off by itself."""
    run = connection.exec_driver_sql
    run(f"ALTER TABLE events ATTACH PARTITION {name} {bound}")
    run(
        f"CREATE TRIGGER no_truncate BEFORE TRUNCATE ON {name}"
        " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_append_only()"
    )
    run(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")


def _hand_over_rights(connection: Connection) -> None:
    """The rights and policies of the table that was `events` go to the one that is."""
    run = connection.exec_driver_sql
    owner = run(f"SELECT tableowner FROM pg_tables WHERE tablename = '{_FIRST}'").scalar()  # noqa: S608 - our own names
    for table in ("events", _REST):
        run(f'ALTER TABLE {table} OWNER TO "{owner}"')
    granted = run(
        "SELECT grantee, string_agg(privilege_type, ', ') AS rights FROM information_schema.role_table_grants"
        " WHERE table_name = %s AND grantee NOT IN (%s, 'PUBLIC') GROUP BY grantee",
        (_FIRST, owner),
    ).all()
    for row in granted:
        run(f'GRANT {row.rights} ON events TO "{row.grantee}"')
        run(f'REVOKE ALL ON {_FIRST} FROM "{row.grantee}"')
    policies = run(
        f"SELECT policyname, cmd, roles, qual FROM pg_policies WHERE tablename = '{_FIRST}'"  # noqa: S608 - our own names
    ).all()
    for policy in policies:
        run("ALTER TABLE events ENABLE ROW LEVEL SECURITY")
        roles = ", ".join(f'"{role}"' for role in policy.roles)
        run(f"CREATE POLICY {policy.policyname} ON events FOR {policy.cmd} TO {roles} USING ({policy.qual})")
        run(f"DROP POLICY {policy.policyname} ON {_FIRST}")


def _start_us(now: datetime, months: int) -> int:
    """When the month of `now` begins, or one `months` later, in UTC microseconds."""
    year, month = divmod(12 * now.year + now.month - 1 + months, 12)
    return int(datetime(year, month + 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
