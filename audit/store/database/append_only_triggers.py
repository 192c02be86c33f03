"""Leaves and trees are insert-only: the database itself refuses to change or delete them.

1. On both databases a trigger refuses every UPDATE and DELETE of leaves, nodes, root leaves and checkpoints. It refuses
   TRUNCATE too, which SQLite does not have, and every change of a log except its growth. Nobody is exempt, not even the
   owner. If somebody drops the trigger, the trees still reveal a change.
2. Only retention deletes leaves, and the hashes inside tiles whose leaves are gone. It does so inside
   `triggers_lifted`, for one transaction. On PostgreSQL its role needs the right to do so, and no other level of a tree
   may be deleted.
3. On PostgreSQL a trigger keeps each log gapless too (`monthly_partitions`, rule 2), and sets the frontier that the
   writer hands over in the same UPDATE. SQLite has a unique key for it.
4. On PostgreSQL a row of a projection with months must belong to an existing log: a trigger checks once for each
   INSERT. Elsewhere a foreign key ensures this. Here it would cost as much as the row, and would wait for every writer
   when a month is attached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.all_tables import MONTHLY

_ON_PARTS = ("append_only", "no_truncate")  # on each month of a table too
_INSERT_ONLY = ("events", "tree_nodes", "root_leaves", "checkpoints", "signed_checkpoints")

_SQLITE_LOGS = (
    "CREATE TRIGGER logs_grow BEFORE UPDATE ON logs"
    " WHEN NEW.size < OLD.size OR NEW.name != OLD.name OR NEW.id != OLD.id"
    " BEGIN SELECT RAISE(ABORT, 'a log only grows'); END",
    "CREATE TRIGGER logs_stay BEFORE DELETE ON logs BEGIN SELECT RAISE(ABORT, 'a log is never deleted'); END",
)

_REFUSING = """
CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF {let_go} THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'rows of % are never changed or deleted', TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
_APPEND_ONLY = _REFUSING.format(
    name="kvcustody_append_only",
    let_go="""current_setting('kvcustody.retention', true) = 'on'
       AND (TG_OP = 'DELETE' AND TG_TABLE_NAME LIKE 'events%'
            OR TG_OP = 'TRUNCATE' AND (SELECT relispartition FROM pg_class WHERE oid = TG_RELID))""",
)
_NODES_APPEND_ONLY = _REFUSING.format(
    name="kvcustody_nodes_append_only",
    let_go="TG_OP = 'DELETE' AND current_setting('kvcustody.retention', true) = 'on' AND OLD.level IN (0, 16)",
)
_LOGS_GROW = """
CREATE FUNCTION kvcustody_logs_grow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.size >= OLD.size AND NEW.name = OLD.name AND NEW.id = OLD.id THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'a log only grows' USING ERRCODE = 'integrity_constraint_violation';
END $$
"""
_PLACES = """
CREATE FUNCTION kvcustody_places() RETURNS trigger LANGUAGE plpgsql AS $$
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
    SELECT min(format('log %s, leaves %s to %s', log, first, past - 1)) INTO wrong
    FROM touched WHERE log NOT IN (SELECT log FROM grown);
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'leaves are appended at the end of their log, each at its own place: %', wrong
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$
"""
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


def create_triggers(connection: Connection) -> None:
    """Create the triggers (rules 1, 3 and 4) on tables that lack them."""
    if dialect_of(connection).in_file:
        for statement in _sqlite_triggers():
            connection.exec_driver_sql(statement)
    else:
        for statement in _postgres_triggers():
            connection.exec_driver_sql(statement.replace("%", "%%"))  # no placeholder of the driver


def triggers_of(connection: Connection, table: str) -> list[str]:
    """Return the statements that create the triggers of one table, as in a new ledger."""
    made = _sqlite_triggers() if dialect_of(connection).in_file else _postgres_triggers()
    return [each for each in made if "$$" not in each and _table_of(each) == table]


def _table_of(trigger: str) -> str:
    return trigger.split(" ON ")[1].split(maxsplit=1)[0]


def no_truncate(table: str) -> str:
    """Return the statement by which PostgreSQL refuses TRUNCATE on a table."""
    return (
        f"CREATE TRIGGER no_truncate BEFORE TRUNCATE ON {table}"
        " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_append_only()"
    )


def _sqlite_triggers() -> Iterator[str]:
    for table in _INSERT_ONLY:
        for act in ("update", "delete"):
            refusal = f"SELECT RAISE(ABORT, 'rows of {table} are never changed or deleted')"
            yield f"CREATE TRIGGER {table}_no_{act} BEFORE {act.upper()} ON {table} BEGIN {refusal}; END"
    yield from _SQLITE_LOGS


def _postgres_triggers() -> Iterator[str]:
    yield from (_APPEND_ONLY, _NODES_APPEND_ONLY, _LOGS_GROW, _PLACES, _OF_A_LOG)
    for table in _INSERT_ONLY:
        function = "kvcustody_nodes_append_only" if table == "tree_nodes" else "kvcustody_append_only"
        yield (
            f"CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()"
        )
    for table in dict.fromkeys((*_INSERT_ONLY, *MONTHLY)):
        yield no_truncate(table)
    yield (
        "CREATE TRIGGER logs_grow BEFORE UPDATE OR DELETE ON logs FOR EACH ROW EXECUTE FUNCTION kvcustody_logs_grow()"
    )
    yield (
        "CREATE TRIGGER places AFTER INSERT ON events REFERENCING NEW TABLE AS added"
        " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_places()"
    )
    for table in MONTHLY:
        if table != "events":
            yield (
                f"CREATE TRIGGER of_a_log AFTER INSERT ON {table} REFERENCING NEW TABLE AS added"
                " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_of_a_log()"
            )


def missing_triggers(connection: Connection) -> Iterator[str]:
    """Yield the triggers (rules 1, 3 and 4) that are missing, changed or disabled."""
    if dialect_of(connection).in_file:
        statements = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE type = 'trigger'").scalars()
        there = {_one_line(statement) for statement in statements}
        for statement in _sqlite_triggers():
            if _one_line(statement) not in there:
                yield f"trigger `{statement.split()[2]}` is missing, or is another"
        return
    statements = connection.exec_driver_sql(
        "SELECT prosrc FROM pg_proc WHERE pronamespace = current_schema()::regnamespace"
    ).scalars()
    bodies = {_one_line(body) for body in statements}
    firing = {
        (table, name)
        for table, name in connection.exec_driver_sql(
            "SELECT c.relname, t.tgname FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid"
            " WHERE c.relnamespace = current_schema()::regnamespace AND t.tgenabled IN ('O', 'A')"
        )
    }
    parts: dict[str, list[str]] = {}
    for table, part in connection.exec_driver_sql(
        "SELECT p.relname, c.relname FROM pg_inherits AS i JOIN pg_class AS p ON p.oid = i.inhparent"
        " JOIN pg_class AS c ON c.oid = i.inhrelid WHERE c.relkind = 'r'"
        " AND p.relnamespace = current_schema()::regnamespace"
    ):
        parts.setdefault(table, []).append(part)
    for statement in _postgres_triggers():
        name = statement.split()[2]
        if "$$" in statement:
            if _one_line(statement.split("$$")[1]) not in bodies:
                yield f"function `{name}` is missing, or is another"
            continue
        table = _table_of(statement)
        on_parts = parts.get(table, []) if name in _ON_PARTS else []
        for each in (table, *on_parts):
            if (each, name) not in firing:
                yield f"trigger `{name}` of `{each}` is missing or disabled"


def _one_line(statement: str) -> str:
    """Databases keep a statement as it was written, and revisions broke lines elsewhere."""
    return " ".join(statement.split())


@contextmanager
def triggers_lifted(connection: Connection) -> Iterator[None]:
    """Apply rule 2 inside this block of the caller's transaction, and for nobody else meanwhile."""
    run = connection.exec_driver_sql
    if not dialect_of(connection).in_file:
        run("SET LOCAL kvcustody.retention = 'on'")
        yield
        run("SET LOCAL kvcustody.retention = 'off'")
        return
    named = "type = 'trigger' AND name IN ('events_no_delete', 'tree_nodes_no_delete')"
    triggers = run(f"SELECT name, sql FROM sqlite_master WHERE {named}").all()  # noqa: S608 - our own names
    for name, _ in triggers:
        run(f"DROP TRIGGER {name}")
    yield
    for _, made in triggers:
        run(made)
