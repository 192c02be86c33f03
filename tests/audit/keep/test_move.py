"""A SQLite ledger moved to PostgreSQL: the same root, the same proofs, and a worker that continues there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from kvcustody.audit.keep.sqlite_to_postgres import move_ledger
from kvcustody.audit.kinds import GapRecorded, WorkerStarted
from kvcustody.audit.store.schema.all_tables import every_table
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.root_log import check_leaf
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.errors import LedgerError

Make = Callable[..., EventWriter]
KEY = SigningKey.generate("ledger.test")


@pytest.fixture
def source(store: Engine, make_writer: Make, world: Callable[..., Any], tmp_path: Path) -> Engine:
    writer = make_writer(store)
    writer.submit([WorkerStarted(1, "worker-1", 48, 2, 4096, "cpu", "test")])
    writer.submit(world(3).run(400).events)
    assert writer.flush()
    assert CheckpointSigner(store, [KEY], memory=tmp_path / "m", clock=SystemClock()).sign_once()
    writer.close()
    return store


def rows(engine: Engine) -> dict[str, list[Any]]:
    with engine.connect() as connection:
        return {
            table.name: [
                tuple(bytes(value) if isinstance(value, memoryview) else value for value in row)
                for row in connection.execute(select(table).order_by(*table.primary_key.columns))
            ]
            for table in every_table()
        }


def test_a_moved_ledger_is_the_same_and_goes_on(
    source: Engine, postgres_store: Engine, make_writer: Make, tmp_path: Path
) -> None:
    told: list[str] = []
    moved = move_ledger(source, postgres_store, progress=lambda what, done, total: told.append(what))
    before = rows(source)
    assert rows(postgres_store) == before and moved.rows == {name: len(found) for name, found in before.items()}
    assert moved.leaves > 200 and {"checking source", "copying events", "checking copy"} <= set(told)
    with source.connect() as one, postgres_store.connect() as other:
        here, there = LedgerProofs(one), LedgerProofs(other)
        assert here.checkpoint() == there.checkpoint() and here.signed() == there.signed()
        assert moved.head == there.checkpoint().head
        for name, _ in here.logs():
            proof = there.inclusion(name, 0)
            assert proof == here.inclusion(name, 0)
            assert check_leaf(proof, there.leaf(name, 0), [KEY.verifier]).name == name
    writer = make_writer(postgres_store, worker="worker-2", spill_directory=tmp_path / "spill-2")
    writer.submit([WorkerStarted(1, "worker-2", 48, 2, 4096, "cpu", "test"), GapRecorded(1, "x", 1, 1)])
    assert writer.flush()
    writer.close()
    assert CheckpointSigner(postgres_store, [KEY], memory=tmp_path / "m", clock=SystemClock()).sign_once()
    with postgres_store.connect() as connection:
        assert fsck(connection, keys=[KEY.verifier]).ok


def test_a_damaged_or_filled_or_changing_ledger_is_not_moved(
    source: Engine, postgres_store: Engine, make_writer: Make, unguarded: Any, guard: Any, tmp_path: Path
) -> None:
    """The target stays empty."""
    writer = make_writer(source, worker="worker-2", spill_directory=tmp_path / "spill-2")

    def meanwhile(what: str, done: int, total: int) -> None:
        if what == "copying events":
            writer.submit([GapRecorded(1, "x", 1, 1)])
            assert writer.flush()

    empty = rows(postgres_store)
    with pytest.raises(LedgerError, match="changed during the move"):
        move_ledger(source, postgres_store, progress=meanwhile)
    writer.close()
    assert rows(postgres_store) == empty
    with source.begin() as connection:
        unguarded(connection)
        connection.exec_driver_sql("UPDATE receipts SET verified = verified + 1 WHERE rowid = 7")
    with pytest.raises(LedgerError, match="the source is not whole: "):
        move_ledger(source, postgres_store)
    assert rows(postgres_store) == empty
    with source.begin() as connection:
        connection.exec_driver_sql("UPDATE receipts SET verified = verified - 1 WHERE rowid = 7")
        guard(connection)
    assert move_ledger(source, postgres_store).leaves > 200
    with pytest.raises(LedgerError, match="move into an empty ledger"):
        move_ledger(source, postgres_store)
