"""A purge frees the space of dropped leaves and of data derived from them, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, delete, func, select

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.keep.free_space import free_space
from kvcustody.audit.keep.purge_and_legal_hold import lift_hold, place_hold, purge
from kvcustody.audit.kinds import (
    BlocksAttached,
    CopiesStored,
    CustodyEnded,
    DecisionRecorded,
    Event,
    HitCounters,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    TransferDecided,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.database.monthly_partitions import create_partitions, month_of, partitions
from kvcustody.audit.store.schema.all_tables import MONTHLY, every_table
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.migrations.upgrade import upgrade
from standins import builders

pytestmark = pytest.mark.system

KEY = SigningKey.generate("ledger.example/space")
JANUARY, FEBRUARY = 1_767_225_600_000_000, 1_769_904_000_000_000  # of 2026
TRACE = "ab" * 16
DERIVED = [table for table in every_table() if table.name in MONTHLY and table is not events]


def custody(number: int, tenant: str) -> Iterator[Event]:
    """A row for each of the tables, from a leaf each: the tenant's user asks once."""
    now = 1000 + 10 * number
    run, rest = Run(np.arange(3) + number, 10 * number), (None, False, "internal", (), (), ("own",), 1)
    yield ResidencyOpened(now, number, tenant, f"user-{number}", *rest, now + 10**6, ())
    yield BlocksAttached(now, number, tenant, (run,))
    permitted = ("attach", "permit", tenant, tenant, "internal", ("own",), 1, "own", number, TRACE)
    yield DecisionRecorded(now, *permitted)
    yield HitCounters(now, tenant, tenant, "attach", "permit", "own-scope", 1, now, 3, 2, 1)
    yield ResidencyReleased(now + 1, number, tenant, "finish", (run,), 0)
    times = (now + 1, now + 2, now + 1, 1_000_000, now + 10**6)
    copy = (("ab" * 32,), (number + 1,), (3,), (1000,), (now + 10**6,), (now,), 1_000_000)
    yield CopiesStored(now, "host", tenant, "internal", *copy)
    moved = ("store", "host", tenant, 0, 3, 1000, 10, 20, "transfer", "done", 11, "pays")
    yield TransferDecided(now, *moved)
    yield CustodyEnded(now + 2, tenant, "internal", (run,), "expired", *times)
    done = ("memset", "cpu", 12288, now + 3, now + 4, "full", 1.0, 3, "ok", (run,))
    yield ReceiptRecorded(now + 4, number, 0, tenant, *done)


@pytest.fixture
def busy(any_store: Engine, tmp_path: Path) -> Engine:
    """A January of much traffic (a tenth of it `beta`'s) and a February of little, signed and exported."""
    with any_store.begin() as connection:
        create_partitions(connection, JANUARY, 1)
    for start, count in ((JANUARY, 2000), (FEBRUARY, 20)):
        writer = EventWriter(
            any_store,
            worker="w",
            clock=VirtualClock(1, start),
            spill_directory=tmp_path / f"{start}",
            clear_names=True,
        )
        writer.submit([WorkerStarted(1, "w", 8, 1, 4096, "cpu", "test")])
        for number in range(1, count + 1):
            writer.submit(list(custody(number, "acme" if number % 10 else "beta")))
        writer.submit([WorkerStopped(10**6, "w", "stopped", 0, (0,))])
        assert writer.flush()
        writer.close()
    assert CheckpointSigner(any_store, [KEY], memory=tmp_path / "signed", clock=SystemClock()).sign_once()
    write_export(tmp_path / "export", LedgerSource(any_store), made_at_us=1)
    return any_store


def drop_january(engine: Engine, tmp_path: Path) -> None:
    people: dict[str, Any] = {"actor": "operator", "approver": "dpo", "reason": "schedule"}
    purge(engine, FEBRUARY, tmp_path / "export", [str(KEY.verifier)], **people)


def sizes(connection: Connection) -> dict[str, int]:
    """What each table takes up to February, however its months are cut."""
    old = [part for part in partitions(connection) if part.below_us is not None and part.below_us <= FEBRUARY]
    query = "SELECT pg_total_relation_size(to_regclass(%s))"
    return {
        table: sum(connection.exec_driver_sql(query, (part.of(table),)).scalar() or 0 for part in old)
        for table in MONTHLY
    }


def test_a_purge_gives_the_space_back(busy: Engine, tmp_path: Path) -> None:
    """The control is that rows which are deleted take what they took."""
    if dialect_of(busy).in_file:
        _shrinks(busy, tmp_path)
        return
    with busy.connect() as connection:
        before = sizes(connection)
        with triggers_lifted(connection):
            for table in (events, *DERIVED):
                assert connection.execute(delete(table).where(table.c[MONTHLY[table.name]] < FEBRUARY)).rowcount
        deleted = sizes(connection)
        connection.rollback()
    assert min(before.values()) > 100_000 and all(deleted[table] >= size for table, size in before.items())
    drop_january(busy, tmp_path)
    with busy.connect() as connection:
        after = sizes(connection)
        for table in DERIVED:
            assert after[table.name] <= 48 * 1024, table  # the first pages of empty indexes
        assert after["events"] < before["events"] // 10
        assert [part.name for part in partitions(connection)][:2] == ["first", "2026_02"]
        for table in DERIVED:
            assert connection.scalar(select(func.count()).select_from(table)), "February's stay"
        assert fsck(connection, keys=[KEY.verifier]).problems == []


def _shrinks(engine: Engine, tmp_path: Path) -> None:
    """Beside a reader that stays; what it is in the way of goes with the next purge, or by `free_space`."""
    place = builders.ledger_file(engine)
    before = place.stat().st_size
    with engine.connect() as reader:
        assert reader.scalar(select(func.count()).select_from(residencies)) == 2020
        drop_january(engine, tmp_path)
        assert reader.scalar(select(func.count()).select_from(residencies)) == 2020  # its snapshot
        assert place.stat().st_size >= before
    free_space(engine, FEBRUARY)
    assert place.stat().st_size < before // 3
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA freelist_count").scalar() == 0
        assert fsck(connection, keys=[KEY.verifier]).problems == []


def test_the_control_file_keeps_its_size(tmp_path: Path) -> None:
    """A file that was not made for it, as those of earlier versions: nothing happens, and nothing fails."""
    import sqlite3

    place = tmp_path / "old.db"
    with sqlite3.connect(place) as made:
        made.execute("CREATE TABLE filler (data BLOB)")
        made.execute("INSERT INTO filler VALUES (zeroblob(4000000))")
    engine = open_store(place)
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.exec_driver_sql("DELETE FROM filler")
    free_space(engine, FEBRUARY)
    assert place.stat().st_size > 4_000_000
    engine.dispose()


def test_new_files_are_made_for_it(store: Engine) -> None:
    with store.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() == 2


def test_what_a_hold_keeps_stays_in_its_month(busy: Engine, tmp_path: Path) -> None:
    """In every table; when the hold is lifted the rest goes, and the month with it."""
    place_hold(busy, "case", "beta", actor="counsel", reason="case")

    def january() -> dict[str, int]:
        with busy.connect() as connection:
            assert fsck(connection, keys=[KEY.verifier]).problems == []
            of = [(table, table.c[MONTHLY[table.name]] < FEBRUARY) for table in DERIVED]
            return {
                table.name: connection.scalar(select(func.count()).select_from(table).where(old)) or 0
                for table, old in of
            }

    drop_january(busy, tmp_path)
    assert january() == dict.fromkeys(MONTHLY.keys() - {"events"}, 200)
    if dialect_of(busy).partitions:
        with busy.connect() as connection:
            assert month_of(JANUARY) in partitions(connection)
    lift_hold(busy, "case", actor="counsel", reason="closed")
    drop_january(busy, tmp_path)
    assert set(january().values()) == {0}
    with busy.connect() as connection:
        assert month_of(JANUARY) not in partitions(connection)


def test_months_that_somebody_reads_are_folded_by_the_next_purge(postgres_store: Engine, tmp_path: Path) -> None:
    upgrade(postgres_store)
    with postgres_store.begin() as connection:
        create_partitions(connection, JANUARY, 1)
        january = month_of(JANUARY)
    with postgres_store.connect() as reader:
        reader.execute(select(residencies))
        free_space(postgres_store, FEBRUARY)
        assert january in partitions(reader)
    free_space(postgres_store, FEBRUARY)
    with postgres_store.connect() as connection:
        assert january not in partitions(connection)
