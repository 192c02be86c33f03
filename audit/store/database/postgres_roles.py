"""Permissions in a PostgreSQL ledger: separate roles, and rows by tenant as a second barrier behind the queries.

1. The writer inserts leaves and the rows derived from them. It changes only three things: a log's end (`logs.size`,
   `frontier`, the root log's frontier), the life of an incarnation, and sums of figures. The sums are those of
   `schema.counters`, into which it folds deltas. It deletes no evidence, only rows that list what is not sealed yet,
   and deltas that are folded.
2. A reader sees the rows of one tenant: the one that its connection names in `kvcustody.tenant`, and without one no row
   at all. The service that reads for people sets it for each transaction. It is no defence against somebody who may run
   their own SQL as that role.
3. An auditor reads everything. A signer reads and adds signed checkpoints. Only retention deletes leaves, where the
   triggers permit it.
4. A worker with a ledger of its own writes as `kvcustody_worker`, with the writer's rights except for orders. A trigger
   on `events` refuses a leaf of such a kind, and the tables of orders take no row from it.
5. `COPY` is refused to a role that row-level security applies to, so the writer bypasses it. Roles cannot log in: a
   login is granted one of them and takes it with `SET ROLE`, or `options=-c role=kvcustody_writer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.leaf.leaf_schema import LEAF_KEYS, ORDERS
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import VERSION_TABLE, check_store, ledger_error
from kvcustody.audit.store.database.open_changes import forms_of
from kvcustody.audit.store.schema.all_tables import kinds_of, projections
from kvcustody.audit.store.schema.recorded_losses import LOSING_FUNCTION, losing_processes
from kvcustody.errors import LedgerError

WRITER, READER, AUDITOR = "kvcustody_writer", "kvcustody_reader", "kvcustody_auditor"
WORKER = "kvcustody_worker"
SIGNER, RETENTION = "kvcustody_signer", "kvcustody_retention"
ROLES = (WRITER, WORKER, READER, AUDITOR, SIGNER, RETENTION)
_BYPASS = (WRITER, WORKER, AUDITOR, SIGNER, RETENTION)
_LIFE = 'worker, started_us, shards, blocks, bytes_per_block, device, software, ended_us, "end"'
FIGURES = ("counter_deltas", "counters", "coverage_hours")  # of a log each; what leaves add up to
_BY_LOG = ("events", "root_leaves", "tree_nodes", *FIGURES)  # beside every projection
_LIVES = ("incarnations", "workers")
_REGISTERS = ("workers", "incarnations", "tenants", "subjects")
_SEALS = (
    "logs",
    "root_log",
    "root_leaves",
    "tree_nodes",
    "checkpoints",
    "signed_checkpoints",
    "unsealed_heads",
)


class RoleGrants(NamedTuple):
    """The result of the setup: the roles, and the tables whose rows a reader sees by tenant."""

    roles: tuple[str, ...]
    by_tenant: tuple[str, ...]


def set_up_roles(engine: Engine) -> RoleGrants:
    """Create the roles, grants and policies, or update them; may be repeated.

    Needs a superuser, or the owner with CREATEROLE and BYPASSRLS. Raises `LedgerError` where the database refuses, and
    where a change of tables was opened before there were roles. So it does for SQLite, which has no roles: there the
    file's mode is the wall, and triggers keep leaves as they are.
    """
    if not dialect_of(engine).roles:
        raise LedgerError("roles need PostgreSQL; a SQLite ledger is protected by its file's mode and by triggers")
    check_store(engine)
    try:
        with engine.begin() as connection:
            if any(not walled(connection, table.name) for table in forms_of(connection)):
                raise LedgerError(  # who writes by a role could not write the new forms
                    "a change of the ledger's schema is open: finish it with `kvcustody db upgrade`, then set up roles"
                )
            by_tenant = tuple(sorted({*_BY_LOG, *(table.name for table in projections())}))
            for statement in _statements(connection, by_tenant):
                connection.exec_driver_sql(statement)
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    return RoleGrants(ROLES, by_tenant)


def _statements(connection: Connection, by_tenant: tuple[str, ...]) -> Iterator[str]:
    known = set(connection.exec_driver_sql("SELECT rolname FROM pg_roles").scalars())
    for role in ROLES:
        if role not in known:
            yield f"CREATE ROLE {role} NOLOGIN"
        yield f"ALTER ROLE {role} {'BYPASSRLS' if role in _BYPASS else 'NOBYPASSRLS'}"
        yield f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {role}"
        yield f"GRANT USAGE ON SCHEMA public TO {role}"
        yield f"GRANT SELECT ON {VERSION_TABLE} TO {role}"
    yield "REVOKE ALL ON ALL TABLES IN SCHEMA public FROM PUBLIC"
    derived = [name for name in by_tenant if name not in _BY_LOG]
    inserted = ", ".join(("events", *_REGISTERS, *_SEALS))
    writers = f"{WRITER}, {WORKER}"
    yield from row_grants(derived)
    yield f"GRANT SELECT ON schema_changes TO {', '.join(ROLES)}"
    yield f"GRANT SELECT, INSERT ON {inserted} TO {writers}"
    yield f"GRANT SELECT ON subject_unlinkings TO {writers}"
    yield f"REVOKE INSERT ON root_log, signed_checkpoints FROM {writers}"
    yield from _refuse_orders()
    yield f"GRANT UPDATE (size, frontier) ON logs TO {writers}"
    yield f"GRANT UPDATE (frontier) ON root_log TO {writers}"
    yield f"GRANT DELETE ON unsealed_heads TO {writers}"
    yield f"GRANT UPDATE ({_LIFE}) ON incarnations TO {writers}"
    yield f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {writers}"
    evidence = ", ".join(("events", "incarnations", "workers", "tenants", *_SEALS))
    yield f"GRANT SELECT ON {evidence} TO {AUDITOR}, {SIGNER}, {RETENTION}"
    figures = ", ".join((*FIGURES, "coverage_pass"))
    yield f"GRANT SELECT, INSERT, UPDATE, DELETE ON {figures} TO {writers}"
    yield f"GRANT SELECT ON {figures} TO {AUDITOR}, {SIGNER}, {RETENTION}"
    yield f"GRANT INSERT ON counter_deltas TO {RETENTION}"
    yield f"GRANT SELECT ON sequence_spans TO {AUDITOR}, {SIGNER}"
    yield f"GRANT SELECT, INSERT, DELETE ON sequence_spans TO {writers}, {RETENTION}"
    yield f"GRANT DELETE ON coverage_hours, coverage_pass TO {RETENTION}"
    yield f"GRANT INSERT ON signed_checkpoints TO {SIGNER}"
    yield f"GRANT INSERT ON tree_nodes TO {RETENTION}"
    yield f"GRANT DELETE ON events, tree_nodes TO {RETENTION}"
    seen = ", ".join((*_BY_LOG, "logs", "checkpoints", "signed_checkpoints", "coverage_pass", *_LIVES))
    yield f"GRANT SELECT ON {seen} TO {READER}"
    yield f"GRANT SELECT (identity) ON root_log TO {READER}"
    yield from _policies()
    yield from row_walls(derived)


def row_grants(tables: Sequence[str]) -> Iterator[str]:
    """Yield the grants on tables whose rows come from leaves."""
    named = ", ".join(tables)
    yield f"GRANT SELECT, INSERT ON {named} TO {WRITER}, {WORKER}"
    if ordering := sorted(order_tables().intersection(tables)):
        yield f"REVOKE INSERT ON {', '.join(ordering)} FROM {WORKER}"
    yield f"GRANT SELECT ON {named} TO {AUDITOR}, {SIGNER}, {RETENTION}, {READER}"
    yield f"GRANT DELETE ON {named} TO {RETENTION}"


def row_walls(tables: Sequence[str]) -> Iterator[str]:
    """Yield the policies that limit a reader to the log of the tenant that its connection names (rule 2)."""
    for table in tables:
        yield from _wall(table, "log = (SELECT kvcustody_log())")


def walled(connection: Connection, table: str) -> bool:
    """Return whether roles were set up, so that a reader sees one tenant's rows of this table."""
    query = (
        "SELECT 1 FROM pg_policies WHERE schemaname = current_schema() AND tablename = %s AND policyname = 'of_tenant'"
    )
    return connection.exec_driver_sql(query, (table,)).first() is not None


_ONE_TENANT = text("SELECT coalesce(current_setting('kvcustody.tenant', true), '') <> ''")


def sees_one_tenant(connection: Connection) -> bool:
    """Return whether the connection only sees one tenant's rows, and so no system log (rule 2)."""
    return dialect_of(connection).roles and bool(connection.scalar(_ONE_TENANT))


def order_tables() -> set[str]:
    """Return the tables whose rows come from orders."""
    return {table.name for table in projections() if kinds_of(table) and ORDERS.issuperset(kinds_of(table))}


def _refuse_orders() -> Iterator[str]:
    """Yield the trigger that limits a worker's role to leaves of known kinds other than orders (rule 4)."""
    kinds = ", ".join(f"'{kind}'" for kind in sorted(LEAF_KEYS.keys() - ORDERS))
    yield (
        "CREATE OR REPLACE FUNCTION kvcustody_no_orders() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF EXISTS (SELECT FROM added WHERE kind NOT IN ({kinds})) THEN "
        "RAISE EXCEPTION 'a worker writes no orders' USING ERRCODE = 'check_violation'; END IF; RETURN NULL; END $$"
    )
    yield (
        "CREATE OR REPLACE TRIGGER no_orders AFTER INSERT ON events REFERENCING NEW TABLE AS added FOR EACH STATEMENT "
        f"WHEN (current_user = '{WORKER}') EXECUTE FUNCTION kvcustody_no_orders()"
    )


def _policies() -> Iterator[str]:
    """What a reader's rows are found by (rule 2), and the walls of the tables that no leaf's rows are in.

    Which processes lost leaves is told to it too: what its tenant holds is not known while one of them runs.
    """
    yield (
        "CREATE OR REPLACE FUNCTION kvcustody_log() RETURNS integer LANGUAGE sql STABLE SECURITY DEFINER "
        "SET search_path = public, pg_temp AS $$ SELECT id FROM logs "
        "WHERE name = 'tenant/' || nullif(current_setting('kvcustody.tenant', true), '') $$"
    )
    from sqlalchemy.dialects.postgresql.base import PGDialect

    dialect = PGDialect()  # type: ignore[no-untyped-call]
    losing = losing_processes().compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    yield (
        f"CREATE OR REPLACE FUNCTION {LOSING_FUNCTION}() RETURNS SETOF text LANGUAGE sql STABLE SECURITY DEFINER "
        f"SET search_path = public, pg_temp AS $$ {losing} $$"
    )
    yield f"REVOKE ALL ON FUNCTION {LOSING_FUNCTION}() FROM PUBLIC"
    yield f"GRANT EXECUTE ON FUNCTION {LOSING_FUNCTION}() TO {READER}"
    yield from row_walls(_BY_LOG)
    yield from _wall("logs", "id = (SELECT kvcustody_log())")


def _wall(table: str, rule: str) -> Iterator[str]:
    yield f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY"
    yield f"DROP POLICY IF EXISTS of_tenant ON {table}"
    yield f"CREATE POLICY of_tenant ON {table} FOR SELECT TO {READER} USING ({rule})"
