"""Every way in which a ledger is unusable gives one line that names it, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select

from kvcustody.audit.kinds import KeyEvent
from kvcustody.audit.store.database.engine import SCHEMA_REVISION, VERSION_TABLE, check_store, open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.errors import CustodyError, LedgerError, LedgerUnavailable
from kvcustody.migrations.upgrade import upgrade


def missing_directory(tmp_path: Path) -> Engine:
    return open_store(tmp_path / "nowhere" / "ledger.db")


def a_directory(tmp_path: Path) -> Engine:
    (tmp_path / "folder.db").mkdir()
    return open_store(tmp_path / "folder.db")


def not_a_database(tmp_path: Path) -> Engine:
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, not a database, and they are longer than a SQLite header " * 20)
    return open_store(path)


def read_only(tmp_path: Path) -> Engine:
    upgrade(open_store(tmp_path / "ledger.db"))
    return open_store(tmp_path / "ledger.db", read_only=True)


def no_schema(tmp_path: Path) -> Engine:
    sqlite3.connect(tmp_path / "empty.db").execute("CREATE TABLE other (x)")
    return open_store(tmp_path / "empty.db")


def newer_schema(tmp_path: Path) -> Engine:
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    return engine


def older_schema(tmp_path: Path) -> Engine:
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '0001'")
    return engine


def truncated(tmp_path: Path) -> Engine:
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    engine.dispose()
    with (tmp_path / "ledger.db").open("r+b") as file:
        file.truncate(5000)
    return engine


def nobody_listens(tmp_path: Path) -> Engine:
    return open_store(f"postgresql://nobody@/nothing?host={tmp_path}")


CONDITIONS = {
    missing_directory: "no ledger here",
    a_directory: "cannot be opened",
    not_a_database: "not a SQLite database",
    read_only: "read-only",
    no_schema: "no kvcustody schema",
    newer_schema: "schema `9999` is newer than this program's",
    older_schema: "schema `0001` is older than .* upgrade the ledger with commit f6818e1f",
    truncated: "damaged",
    nobody_listens: "connection",
}


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda item: item.__name__)
def test_a_writer_on_a_bad_store_is_refused_in_one_line(tmp_path: Path, make_writer: Any, condition: Any) -> None:
    with pytest.raises(CustodyError, match=CONDITIONS[condition]) as caught:
        make_writer(condition(tmp_path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("condition", [missing_directory, not_a_database, read_only, newer_schema])
def test_an_upgrade_of_a_bad_store_is_refused_in_one_line(tmp_path: Path, condition: Any) -> None:
    engine = condition(tmp_path)
    if condition is read_only:
        assert upgrade(engine) == SCHEMA_REVISION  # nothing to do is nothing to refuse
        engine = open_store(tmp_path / "other.db", read_only=True)
    with pytest.raises(CustodyError) as caught:
        upgrade(engine)
    assert "\n" not in str(caught.value)


def test_an_unknown_kind_of_database_is_refused() -> None:
    with pytest.raises(LedgerError, match="neither SQLite nor PostgreSQL"):
        open_store("mysql://host/ledger")


def test_a_locked_store_is_refused_within_its_timeout(store: Engine, make_writer: Any, lock: Any) -> None:
    with lock(store), pytest.raises(LedgerError, match="locked by another writer"):
        make_writer(store)


def test_a_spill_directory_that_is_a_file_is_refused(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(LedgerError, match=r"spill directory `.*taken`"):
        make_writer(store, spill_directory=tmp_path / "taken")


def test_a_full_database_refuses_class_a_and_spills_class_b(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    writer = make_writer(store)
    pages = [2]

    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages[0]}")

    event.listen(store, "connect", limit)
    store.dispose()
    cause = ""
    for epoch in range(400):
        try:
            writer.submit_durable(KeyEvent(1, "acme", "made" * 400, epoch, "operator"), timeout_seconds=2.0)
        except LedgerUnavailable as problem:
            cause = str(problem)
            break
    assert cause == "KVC610: not done because it could not be recorded: the disk is full"
    last = writer.submit([KeyEvent(1, "acme", "made", 1, "operator")])
    assert writer.flush(3.0) and writer.durable_sequence >= last
    pages[0] = 1 << 30  # somebody made room
    event.remove(store, "connect", limit)
    store.dispose()
    writer.close()
    with store.connect() as connection:
        assert connection.scalar(select(func.count()).where(events.c.sequence == last)) == 1


DISK = """
    import resource, signal, sys, time
    from pathlib import Path
    from kvcustody.audit.kinds import KeyEvent
    from kvcustody.audit.store.database.engine import open_store
    from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
    from kvcustody.clock import SystemClock
    from kvcustody.errors import LedgerUnavailable
    from kvcustody.migrations.upgrade import upgrade

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    settings = WriterSettings(interval_seconds=0.002, retry_seconds=0.02)
    spill = folder / "spill"
    writer = EventWriter(engine, worker="w", clock=SystemClock(), spill_directory=spill, settings=settings)
    event = KeyEvent(1, "acme", "made", 1, "operator")
    writer.submit_durable(event)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # no file may grow: database and spill both refuse
    last = writer.submit([event] * 50)
    deadline = time.monotonic() + 60
    while writer.admitting and time.monotonic() < deadline:
        time.sleep(0.01)
    print(writer.admitting, writer.durable_sequence < last)
    try:
        writer.submit_durable(event, timeout_seconds=1.0)
    except LedgerUnavailable as problem:
        print(problem)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(writer.flush(5.0), writer.admitting, writer.durable_sequence >= last)
    writer.close()
"""


def test_a_disk_that_refuses_everything_stops_admission_and_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DISK), str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "False True" and lines[1].startswith("KVC610: not done because it could not be recorded: ")
    assert lines[2] == "True True True"
    engine = open_store(tmp_path / "ledger.db", read_only=True)
    with engine.connect() as connection:
        found = set(connection.scalars(select(events.c.sequence)))
    assert set(range(1, 52)) <= found


def test_a_good_store_passes_and_one_that_names_two_schemas_does_not(any_store: Engine) -> None:
    """Which of two rows a database gives first would decide whether the ledger is of this program."""
    check_store(any_store)
    with any_store.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO {VERSION_TABLE} (version_num) VALUES ('9999')")
    with pytest.raises(LedgerError, match="names 2 schemas"):
        check_store(any_store)


def test_only_who_asks_for_it_reads_through_the_memory_map(tmp_path: Path) -> None:
    upgrade(open_store(tmp_path / "ledger.db"))
    sizes = []
    for mapped in (False, True):
        engine = open_store(tmp_path / "ledger.db", read_only=True, mapped=mapped)
        with engine.connect() as connection:
            sizes.append(connection.exec_driver_sql("PRAGMA mmap_size").scalar_one())
            check_store(engine)
        engine.dispose()
    assert sizes[0] == 0 < sizes[1]
