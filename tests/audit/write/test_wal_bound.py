"""The write-ahead log beside readers without a pause and beside one that lasts: bounded, and not without the rules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from kvcustody.audit.store.database import sqlite_writers
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.database.private_copy import at_rest
from kvcustody.audit.store.database.sqlite_writers import WalCheckpointer

Resting = Callable[[Engine], AbstractContextManager[Engine]]

BOUND = 4 << 20
COMMITS, COMMIT_BYTES = 60, 1 << 20


@contextmanager
def reading_without_a_pause(path: Path) -> Iterator[None]:
    """Reads of which each begins before the one before it ends, as long as the block lasts."""
    engine, stop, begun = open_store(path, read_only=True), threading.Event(), threading.Event()

    def read() -> None:
        with ExitStack() as before:
            while not stop.is_set():
                reading = ExitStack()
                connection = reading.enter_context(engine.connect())
                connection.execute(text("SELECT count(*) FROM filled")).scalar()
                before.close()
                before.push(reading)
                begun.set()
                stop.wait(0.02)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        stop.set()
        thread.join()
        engine.dispose()


@contextmanager
def reading_throughout(path: Path, resting: Resting) -> Iterator[None]:
    """One reader of one moment, as long as the block lasts."""
    engine = open_store(path, read_only=True)
    with resting(engine) as read, read.connect() as connection:
        before = connection.execute(text("SELECT count(*) FROM filled")).scalar()
        yield
        assert connection.execute(text("SELECT count(*) FROM filled")).scalar() == before
    engine.dispose()


def largest_log(store: Engine, path: Path, reading: Callable[[Path], AbstractContextManager[None]]) -> int:
    """The largest size of the log while so many commits are written beside readers."""
    checkpointer, largest = WalCheckpointer(store), 0
    try:
        with reading(path):
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


def test_the_log_is_bounded_beside_readers(filled: tuple[Engine, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_writers, "WAL_BYTES_MAX", BOUND)
    assert largest_log(*filled, reading_without_a_pause) < BOUND + COMMITS * COMMIT_BYTES // 2


def test_control_without_the_rule_it_grows_with_what_is_written(filled: tuple[Engine, Path]) -> None:
    assert largest_log(*filled, reading_without_a_pause) > COMMITS * COMMIT_BYTES * 2 // 3


def test_the_log_is_bounded_beside_a_reader_that_lasts(
    filled: tuple[Engine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writers, "WAL_BYTES_MAX", BOUND)
    assert largest_log(*filled, partial(reading_throughout, resting=at_rest)) < BOUND + COMMITS * COMMIT_BYTES // 2


def test_control_beside_a_reader_of_the_file_itself_it_grows(
    filled: tuple[Engine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writers, "WAL_BYTES_MAX", BOUND)
    monkeypatch.setattr(sqlite_writers, "_WAIT_SECONDS", 0.05)
    resting: Resting = nullcontext
    assert largest_log(*filled, partial(reading_throughout, resting=resting)) >= COMMITS * COMMIT_BYTES
