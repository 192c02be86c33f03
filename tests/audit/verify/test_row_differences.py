"""Stored rows are compared with their leaves by a read-only login, and nothing is created for it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, delete, select, update
from sqlalchemy.exc import DBAPIError

from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.project import IncarnationRow, project
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.postgres_roles import AUDITOR
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.verify.ledger.row_differences import RowDifference, differences
from kvcustody.migrations.upgrade import upgrade
from standins import builders
from standins.audit.ledgers import whole_ledger
from standins.postgres import set_up_roles_in_turn, standby_of, volatile_server

Harm = Callable[[Connection], None]
WINDOW = 100


def every_difference(connection: Connection) -> list[RowDifference]:
    """The differences of every log, window by window."""
    column = incarnations.c
    rows = connection.execute(select(column.uuid, column.id, column.offset_us))
    lives = {row.uuid: IncarnationRow(row.id, row.offset_us) for row in rows}
    every: list[RowDifference] = []
    for log in connection.scalars(select(logs.c.id).order_by(logs.c.id)).all():
        query = select(events.c.idx, events.c.leaf).where(events.c.log == log).order_by(events.c.idx)
        for window in connection.execute(query).partitions(WINDOW):
            places = range(window[0].idx, window[-1].idx + 1)
            batch = read_leaves([bytes(row.leaf) for row in window], hashed=False)
            projected = project(batch, [log] * len(window), places, lives.__getitem__)
            every += differences(connection, log, places, projected)
    return every


def edit_and_delete(engine: Engine, unguarded: Harm) -> list[RowDifference]:
    """Change one row and delete another, as the owner of the database can; the differences that this makes."""
    with engine.connect() as connection:
        unguarded(connection)
        log = select(logs.c.id).where(logs.c.name == f"tenant/{whole_ledger.TENANT}").scalar_subquery()
        of_log = select(residencies.c.idx).where(residencies.c.log == log).order_by(residencies.c.idx)
        edited, deleted = connection.scalars(of_log.limit(2)).all()
        here = residencies.c.log == log
        connection.execute(update(residencies).where(here, residencies.c.idx == edited).values(tenant="x"))
        connection.execute(delete(residencies).where(here, residencies.c.idx == deleted))
        connection.commit()
    return [
        RowDifference(residencies, edited, 0, False, "tenant"),
        RowDifference(residencies, deleted, 0, True),
    ]


def postgres_catalog(connection: Connection) -> set[tuple[Any, ...]]:
    """Every relation, function and trigger of the database, temporary ones of any session included."""
    queries = (
        "SELECT 'relation', oid, relname::text, relfilenode FROM pg_class",
        "SELECT 'function', oid, proname::text, 0 FROM pg_proc",
        "SELECT 'trigger', oid, tgname::text, 0 FROM pg_trigger",
        "SELECT 'schema', oid, nspname::text, 0 FROM pg_namespace",
    )
    return {tuple(row) for query in queries for row in connection.exec_driver_sql(query)}


def sqlite_catalog(connection: Connection) -> set[tuple[Any, ...]]:
    query = "SELECT name, sql FROM sqlite_schema UNION ALL SELECT name, sql FROM sqlite_temp_schema"
    return {tuple(row) for row in connection.exec_driver_sql(query)}


def refuses(connection: Connection, *statements: str) -> bool:
    """Whether the database refuses each of them to this connection."""
    for statement in statements:
        try:
            with connection.begin_nested():
                connection.exec_driver_sql(statement)
        except DBAPIError:
            continue
        return False
    return True


WRITES = ("INSERT INTO workers (name) VALUES ('x')", "CREATE TABLE scratch (id integer)")


@contextmanager
def auditors_login(engine: Engine) -> Iterator[Engine]:
    """The ledger as a login sees it that has the auditor's role, and no more."""
    set_up_roles_in_turn(engine)
    login = f"auditor_{uuid.uuid4().hex[:12]}"
    owner = engine.execution_options(isolation_level="AUTOCOMMIT")
    with owner.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {login} LOGIN")
        connection.exec_driver_sql(f"GRANT {AUDITOR} TO {login}")
        connection.exec_driver_sql(f"REVOKE TEMPORARY ON DATABASE {engine.url.database} FROM PUBLIC")
    url = engine.url.set(username=login).update_query_dict({"options": f"-c role={AUDITOR}"})
    reading = open_store(url.render_as_string(False))
    try:
        yield reading
    finally:
        reading.dispose()
        with owner.connect() as connection:
            connection.exec_driver_sql(f"DROP ROLE {login}")


def test_an_auditors_login_compares_rows_and_creates_nothing(
    postgres_store: Engine, lock: whole_ledger.Lock, unguarded: Harm, tmp_path: Path
) -> None:
    whole_ledger.fill(postgres_store, tmp_path, lock)
    with auditors_login(postgres_store) as reading, postgres_store.connect() as owner:
        before = postgres_catalog(owner)
        with reading.connect() as connection:
            assert connection.exec_driver_sql("SELECT current_user").scalar() == AUDITOR
            assert refuses(connection, *WRITES, "CREATE TEMPORARY TABLE scratch (id integer)")
            assert every_difference(connection) == []
            assert postgres_catalog(connection) == before, "before its transaction ends"
        changed = edit_and_delete(postgres_store, unguarded)
        with reading.connect() as connection:
            assert every_difference(connection) == changed, "control: it reads what it compares"
        owner.rollback()
        assert postgres_catalog(owner) == before
        owner.exec_driver_sql("CREATE TEMPORARY TABLE scratch (id integer)")
        assert postgres_catalog(owner) != before, "control: a table is seen"


def test_a_login_without_the_auditors_role_reads_nothing(postgres_store: Engine) -> None:
    """Positive control of the grants: the role lets it read, not the login."""
    with auditors_login(postgres_store) as reading:
        with postgres_store.begin() as owner:
            owner.exec_driver_sql(f"REVOKE {AUDITOR} FROM {reading.url.username}")
        with pytest.raises(DBAPIError, match="permission denied"), reading.connect() as connection:
            every_difference(connection)


def test_a_read_only_file_is_compared_and_stays_as_it_is(
    store: Engine, lock: whole_ledger.Lock, unguarded: Harm, tmp_path: Path
) -> None:
    whole_ledger.fill(store, tmp_path, lock)
    assert read_only_differences(store) == []
    changed = edit_and_delete(store, unguarded)
    assert read_only_differences(store) == changed, "control: it reads what it compares"


def read_only_differences(store: Engine) -> list[RowDifference]:
    """The differences by a connection that may not write; the file keeps every byte."""
    path = builders.ledger_file(store)
    with store.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    content = path.read_bytes()
    reading = open_store(path, read_only=True)
    with reading.connect() as connection:
        before = sqlite_catalog(connection)
        assert refuses(connection, *WRITES)
        found = every_difference(connection)
        assert sqlite_catalog(connection) == before and len(before) > 50
    reading.dispose()
    assert path.read_bytes() == content
    return found


@pytest.mark.system
def test_a_standby_is_compared(lock: whole_ledger.Lock, unguarded: Harm, tmp_path: Path) -> None:
    """A hot standby of a server of its own refuses every write; what its primary changed shows there."""
    with volatile_server() as server:
        primary = open_store(server.get_uri(), timeout_seconds=0.3)
        upgrade(primary)
        whole_ledger.fill(primary, tmp_path, lock)
        with standby_of(server) as address:
            reading = open_store(address)
            with reading.connect() as connection:
                assert connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar()
                before = postgres_catalog(connection)
                assert refuses(connection, *WRITES, "CREATE TEMPORARY TABLE scratch (id integer)")
                assert every_difference(connection) == []
                assert postgres_catalog(connection) == before
            changed = edit_and_delete(primary, unguarded)
            wait_for_replay(primary, reading)
            with reading.connect() as connection:
                assert every_difference(connection) == changed
            reading.dispose()
        primary.dispose()


def wait_for_replay(primary: Engine, standby: Engine) -> None:
    """Until the standby has replayed all that the primary has written."""
    with primary.connect() as connection:
        written = connection.exec_driver_sql("SELECT pg_current_wal_flush_lsn()::text").scalar()
    behind = f"SELECT pg_last_wal_replay_lsn() < '{written}'::pg_lsn"
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with standby.connect() as connection:
            if not connection.exec_driver_sql(behind).scalar():
                return
        time.sleep(0.05)
    raise AssertionError("the standby does not follow")
