"""The write-ahead log beside readers who follow one another without a pause: bounded, and not without the rule."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.write import wal_checkpointer
from kvcustody.audit.write.wal_checkpointer import WalCheckpointer

BOUND = 4 << 20
COMMITS, COMMIT_BYTES = 60, 1 << 20


@contextmanager
def reading_without_a_pause(path: Path) -> Iterator[None]:
    """Two readers, of whom one begins before the other ends, as long as the block lasts."""
    engine, stop = open_store(path, read_only=True), threading.Event()
    hand_over = threading.Barrier(2)

    def read() -> None:
        while not stop.is_set():
            with engine.connect() as connection:
                connection.execute(text("SELECT count(*) FROM filled")).scalar()
                try:
                    hand_over.wait(0.02)  # the other has begun as well
                except threading.BrokenBarrierError:
                    hand_over.reset()
                stop.wait(0.02)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        engine.dispose()


def largest_log(store: Engine, path: Path) -> int:
    """The largest size of the log while so many commits are written beside readers."""
    checkpointer, largest = WalCheckpointer(store), 0
    try:
        with reading_without_a_pause(path):
            for number in range(COMMITS):
                with store.connect().execution_options(**WRITE) as connection, connection.begin():
                    filling = text("INSERT INTO filled VALUES (:number, zeroblob(:size))")
                    connection.execute(filling, {"number": number, "size": COMMIT_BYTES})
                checkpointer.committed(3000)
                largest = max(largest, path.with_name(path.name + "-wal").stat().st_size)
    finally:
        checkpointer.close()
    return largest


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[tuple[Engine, Path]]:
    path = tmp_path / "filled.db"
    store = open_store(path)
    with store.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(text("CREATE TABLE filled (number INTEGER, data BLOB)"))
    yield store, path
    store.dispose()


def test_the_log_is_bounded_beside_readers(
    filled: tuple[Engine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal_checkpointer, "WAL_BYTES_MAX", BOUND)
    assert largest_log(*filled) < BOUND + COMMITS * COMMIT_BYTES // 2


def test_control_without_the_rule_it_grows_with_what_is_written(filled: tuple[Engine, Path]) -> None:
    assert largest_log(*filled) > COMMITS * COMMIT_BYTES * 2 // 3
