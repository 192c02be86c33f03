"""The database refuses to change what was recorded, and each role what is not its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, delete
from sqlalchemy.exc import DBAPIError

from kvcustody.audit.evidence.counters.read_figures import tenant_totals
from kvcustody.audit.kinds import WorkerStarted
from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.postgres_roles import (
    AUDITOR,
    READER,
    RETENTION,
    SIGNER,
    WRITER,
    set_up_roles,
)
from kvcustody.audit.store.schema.leaf_tables import releases
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.audit.write.fold import fold_some
from kvcustody.clock import SystemClock
from kvcustody.errors import LedgerError
from standins.postgres import set_up_roles_in_turn

Make = Callable[..., EventWriter]


def fill(writer: EventWriter, world: Callable[..., object]) -> None:
    writer.submit([WorkerStarted(1, "worker-1", 48, 2, 4096, "cpu", "test")])
    writer.submit(world(3).run(400).events)  # type: ignore[attr-defined]
    assert writer.flush()
    writer.close()


def refused(engine: Engine, statement: str, role: str = "") -> bool:
    with engine.connect() as connection, connection.begin():
        if role:
            connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
        try:
            connection.exec_driver_sql(statement)
        except DBAPIError:
            return True
        connection.get_transaction().rollback()  # type: ignore[union-attr]
    return False


def test_what_was_recorded_stays(any_store: Engine, make_writer: Make, world: Callable[..., object]) -> None:
    """U1, for the owner of the database himself."""
    fill(make_writer(any_store), world)
    with any_store.begin() as connection:
        connection.exec_driver_sql("INSERT INTO signed_checkpoints VALUES (1, '', 1)")
        connection.exec_driver_sql("INSERT INTO tree_nodes VALUES (9, 1, 0, '')")
    columns = {"events": "leaf", "tree_nodes": "hash", "root_leaves": "salt", "checkpoints": "root"}
    for table, column in (*columns.items(), ("signed_checkpoints", "note")):
        assert refused(any_store, f"UPDATE {table} SET {column} = {column}"), table
        assert refused(any_store, f"DELETE FROM {table}"), table
        if any_store.dialect.name == "postgresql":
            assert refused(any_store, f"TRUNCATE {table}"), table
    for change in ("size = size - 1", "name = 'x'", "id = id + 100"):
        assert refused(any_store, f"UPDATE logs SET {change}")
    assert refused(any_store, "DELETE FROM logs")
    assert not refused(any_store, "UPDATE logs SET size = size + 1")  # positive control


def test_retention_deletes_leaves_and_nothing_else(
    any_store: Engine, make_writer: Make, world: Callable[..., object]
) -> None:
    """Inside the block alone, and a rollback leaves the triggers as they were."""
    fill(make_writer(any_store), world)
    with any_store.connect() as connection:
        with connection.begin() as transaction:
            with triggers_lifted(connection):
                assert connection.execute(delete(events).where(events.c.idx == 0)).rowcount > 1
            with pytest.raises(DBAPIError), connection.begin_nested():
                connection.execute(delete(events))
            transaction.rollback()
        with pytest.raises(DBAPIError), connection.begin(), triggers_lifted(connection):
            connection.exec_driver_sql("UPDATE events SET leaf = leaf")
    assert refused(any_store, "DELETE FROM events")


@contextmanager
def acting(engine: Engine, role: str, tenant: str = "") -> Iterator[Connection]:
    with engine.connect() as connection, connection.begin():
        connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
        if tenant:
            connection.exec_driver_sql(f"SET LOCAL kvcustody.tenant = '{tenant}'")
        yield connection


def test_roles_keep_to_their_own(
    postgres_store: Engine, make_writer: Make, world: Callable[..., object], tmp_path: Path
) -> None:
    """A writer that is nothing but a writer records a whole ledger; a reader sees one tenant."""
    made = set_up_roles_in_turn(postgres_store)
    assert set_up_roles_in_turn(postgres_store) == made
    assert {"events", "custody_ends", "receipts", "root_leaves"} <= set(made.by_tenant)
    url = postgres_store.url.render_as_string(False)
    as_writer = open_store(url + ("&" if "?" in url else "?") + f"options=-c%20role%3D{WRITER}")
    fill(make_writer(as_writer), world)
    with as_writer.connect() as connection:
        assert connection.exec_driver_sql("SELECT current_user").scalar() == WRITER
    as_writer.dispose()
    with acting(postgres_store, WRITER) as connection:
        assert fold_some(connection, deltas_max=3) == 3
    key = SigningKey.generate("ledger.test")
    assert CheckpointSigner(postgres_store, [key], memory=tmp_path / "m", clock=SystemClock()).sign_once()
    with acting(postgres_store, AUDITOR) as connection:
        assert fsck(connection, keys=[key.verifier]).ok
        total = connection.exec_driver_sql("SELECT count(*) FROM events").scalar()
    for tenant in ("tenant-0", "tenant-1", "nobody", ""):
        with acting(postgres_store, READER, tenant) as connection:
            seen = connection.exec_driver_sql("SELECT count(*) FROM events").scalar()
            assert (0 < seen < total) if tenant.startswith("tenant") else seen == 0  # type: ignore[operator]
            names = connection.exec_driver_sql("SELECT name FROM logs").scalars().all()
            assert names == ([f"tenant/{tenant}"] if tenant.startswith("tenant") else [])
            others = connection.exec_driver_sql("SELECT DISTINCT tenant FROM custody_ends").scalars().all()
            assert set(others) <= {tenant}
            whose = "SELECT DISTINCT log FROM {} WHERE log NOT IN (SELECT id FROM logs)"
            for table in ("counters", "counter_deltas", "coverage_hours"):
                assert connection.exec_driver_sql(whose.format(table)).all() == []
            totals = tenant_totals(connection)
            assert [row.tenant for row in totals] == [tenant] * (seen > 0)  # type: ignore[operator]
            assert all(row.residencies > 10 for row in totals)
    for role, statement in (
        (WRITER, "UPDATE events SET leaf = leaf"),
        (WRITER, "DELETE FROM events"),
        (WRITER, "DELETE FROM receipts"),
        (WRITER, "UPDATE receipts SET bytes = 0"),
        (WRITER, "UPDATE logs SET name = 'x'"),
        (WRITER, "INSERT INTO signed_checkpoints VALUES (9999, '', 1)"),
        (WRITER, "TRUNCATE events"),
        (WRITER, "ALTER TABLE events DISABLE TRIGGER ALL"),
        (READER, "INSERT INTO checkpoints VALUES (9999, '', 1)"),
        (READER, "SELECT * FROM subjects"),
        (AUDITOR, "SELECT * FROM subjects"),
        (AUDITOR, "UPDATE logs SET size = size + 1"),
        (SIGNER, "INSERT INTO checkpoints VALUES (9999, '', 1)"),
        (RETENTION, "UPDATE events SET leaf = leaf"),
        (RETENTION, "UPDATE counters SET value = 0"),
        (AUDITOR, "DELETE FROM counter_deltas"),
        (READER, "DELETE FROM counters"),
        (RETENTION, "DELETE FROM events"),  # outside `triggers_lifted`
        (RETENTION, "DELETE FROM root_leaves"),
    ):
        assert refused(postgres_store, statement, role), (role, statement)
    assert not refused(postgres_store, "UPDATE logs SET size = size + 1", WRITER)  # positive controls
    assert not refused(postgres_store, "INSERT INTO signed_checkpoints VALUES (9999, '', 1)", SIGNER)
    with acting(postgres_store, RETENTION) as connection, triggers_lifted(connection):
        assert connection.execute(delete(events).where(events.c.idx == 0)).rowcount > 1


def test_sqlite_has_no_roles(store: Engine) -> None:
    with pytest.raises(LedgerError, match="roles need PostgreSQL"):
        set_up_roles(store)


@pytest.mark.parametrize("guarded", [True, False], ids=["trigger", "control: no trigger"])
def test_a_row_of_no_log_is_refused(
    any_store: Engine, make_writer: Make, world: Callable[..., object], guarded: bool
) -> None:
    """By foreign keys, and on PostgreSQL by a trigger on the tables that have months."""
    fill(make_writer(any_store), world)
    in_months = any_store.dialect.name == "postgresql"
    if not guarded and not in_months:
        pytest.skip("SQLite has foreign keys, which no statement drops")
    if not guarded:
        with any_store.begin() as connection:
            connection.exec_driver_sql("DROP TRIGGER of_a_log ON releases")
    names = [f'"{column.name}"' for column in releases.columns if column.name not in ("log", "idx")]
    into, copied = (
        f"INSERT INTO releases (log, idx, {', '.join(names)})",
        f"{', '.join(names)} FROM releases LIMIT 1",
    )
    assert refused(any_store, f"{into} SELECT 9999, idx, {copied}") is guarded
    assert not refused(any_store, f"{into} SELECT log, idx + 1000000, {copied}"), "control: of a log that is there"
