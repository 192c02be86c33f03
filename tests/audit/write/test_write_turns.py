"""Writing transactions of one process on one SQLite file take turns, in the order in which they asked."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from kvcustody.audit.store.database import sqlite_writers
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.database.sqlite_writers import WriteQueue


@pytest.fixture
def engines(tmp_path: Path, migrated: Path) -> Iterator[list[Engine]]:
    path = tmp_path / "ledger.db"
    path.write_bytes(migrated.read_bytes())
    opened = [open_store(path, timeout_seconds=0.05) for _ in range(4)]
    yield opened
    for engine in opened:
        engine.dispose()


def test_engines_write_in_the_order_in_which_they_asked(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(WriteQueue, "take", _patient(WriteQueue.take))
    order: list[int] = []
    queue = sqlite_writers._queues[(tmp_path / "ledger.db").absolute()]

    def write(number: int) -> None:
        with engines[number].connect().execution_options(**WRITE) as connection, connection.begin():
            order.append(number)

    holder = engines[0].connect().execution_options(**WRITE)
    held = holder.begin()
    threads = []
    for place, number in enumerate((2, 1, 3), start=1):
        threads.append(threading.Thread(target=write, args=(number,)))
        threads[-1].start()
        until = time.monotonic() + 30
        while len(queue._waiting) < place and time.monotonic() < until:
            time.sleep(0.001)
    held.rollback()
    holder.close()
    for thread in threads:
        thread.join(30)
    assert order == [2, 1, 3]


def _patient(take: object) -> object:
    def taken(queue: WriteQueue, _seconds: float) -> bool:
        return take(queue, 30.0)  # type: ignore[operator]

    return taken


def test_a_wait_is_bounded_and_ends_with_what_sqlite_says(engines: list[Engine]) -> None:
    holder = engines[0].connect().execution_options(**WRITE)
    with (
        holder,
        holder.begin(),
        engines[1].connect().execution_options(**WRITE) as other,
        pytest.raises(OperationalError, match="database is locked"),
    ):
        other.begin()
    with engines[1].connect().execution_options(**WRITE) as other, other.begin():
        pass  # a turn that was given up blocks nobody


def test_control_without_turns_whoever_asks_during_a_write_is_refused(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WriteQueue, "take", lambda _queue, _seconds: False)
    holder = engines[0].connect().execution_options(**WRITE)
    refused: list[bool] = []

    def write() -> None:
        try:
            with engines[1].connect().execution_options(**WRITE) as connection, connection.begin():
                refused.append(False)
        except OperationalError:
            refused.append(True)

    with holder, holder.begin():
        thread = threading.Thread(target=write)
        thread.start()
        thread.join(30)
    assert refused == [True]


def is_gate_free(path: Path) -> bool:
    with path.with_name(f"{path.name}.lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


@pytest.mark.parametrize("gated", [True, False])
def test_whoever_waits_for_another_process_comes_before_who_asks_later(
    tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch, *, gated: bool
) -> None:
    """Without the queue of this process, as between processes. Control: without the gate nobody holds a place."""
    monkeypatch.setattr(WriteQueue, "take", lambda _queue, _seconds: False)
    if not gated:
        monkeypatch.setattr(sqlite_writers, "gate", lambda *_: nullcontext())
    path = tmp_path / "ledger.db"
    path.write_bytes(migrated.read_bytes())
    engines = [open_store(path, timeout_seconds=30) for _ in range(3)]
    order: list[int] = []

    def write(number: int) -> None:
        with engines[number].connect().execution_options(**WRITE) as connection, connection.begin():
            order.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    with engines[0].connect().execution_options(**WRITE) as holder:
        held = holder.begin()
        path.with_name(f"{path.name}.lock").touch()
        threads[0].start()
        until = time.monotonic() + (30 if gated else 0.5)
        while is_gate_free(path) and time.monotonic() < until:
            time.sleep(0.001)
        assert is_gate_free(path) is not gated
        threads[1].start()
        held.commit()
    for thread in threads:
        thread.join(60)
    if gated:
        assert order == [1, 2]
    assert sorted(order) == [1, 2] and is_gate_free(path)
    for engine in engines:
        engine.dispose()
