"""kill -9 in batches, and faults in system calls: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import outages
from kvcustody.audit.store.schema.ledger import events as leaves
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.migrations.upgrade import upgrade
from standins.audit.crash.crash_content import check_content
from standins.audit.crash.crash_lives import CALLS, Kill, check_exactly_once, inject, kill_often, missing

pytestmark = pytest.mark.system
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="faults are injected by strace")


@needs_strace
@pytest.mark.parametrize("boundary", [1, 3, 9, 20])
def test_killed_at_a_write_boundary(store: Engine, make_writer: Any, tmp_path: Path, boundary: int) -> None:
    """SIGKILL at the n-th write, sync, truncation, rename or removal of a thread, in several schedules."""
    made = inject(store, tmp_path, f"{CALLS}:signal=KILL:when={boundary}", range(4), seconds=5.0)
    check_exactly_once(store, make_writer, tmp_path, made)


@needs_strace
@pytest.mark.parametrize(
    "rule",
    [
        "pwrite64:error=ENOSPC:when=12+9",
        "fdatasync,fsync:error=EIO:when=4+5",
        "fdatasync,fsync:delay_enter=40000",
        "pwrite64:error=EIO:when=30+1",  # and never again a write
        "pwrite64,write:error=ENOSPC:when=40+3",  # the spill's disk is as full as the ledger's
    ],
)
def test_a_disk_that_fails_or_is_slow(store: Engine, make_writer: Any, tmp_path: Path, rule: str) -> None:
    """ENOSPC, EIO and slow syncs: nothing that was called durable is missing afterwards."""
    made = inject(store, tmp_path, rule, range(2), seconds=1.0)
    assert made
    check_exactly_once(store, make_writer, tmp_path, made)


BOUNDARIES = (
    *range(1, 41),
    *range(41, 400, 40),
)  # near ones, each in six schedules: start, replay, first commits
OPERATIONS = 1_000_000
EPOCH = 100_000  # operations after which a ledger is verified as a whole, and the next one begun
FAR = (1500, 12_000)  # boundaries of a thread; a commit of 500 operations has some hundred


def schedules() -> Iterator[tuple[int, str]]:
    """Where a server's six writers are killed, and how they work: near boundaries first, then far ones at random."""
    yield from ((boundary, "steady") for boundary in BOUNDARIES)
    chance = random.Random(6)
    while True:
        yield chance.randrange(*FAR), "hurried"


@needs_strace
@pytest.mark.soak
def test_a_million_operations_across_every_write_boundary(make_writer: Any, tmp_path: Path) -> None:
    """10^6 random operations: ledger after ledger, each verified as a whole once it holds an epoch of them."""
    ahead, done, epoch, kills = schedules(), 0, 0, 0
    while done < OPERATIONS:
        folder = tmp_path / f"epoch-{epoch}"
        folder.mkdir()
        store = open_store(folder / "ledger.db", timeout_seconds=0.2)
        upgrade(store)
        began, injected, rounds, size = time.process_time(), [], 0, 0
        while size < EPOCH:
            boundary, pace = next(ahead)
            fault = f"{CALLS}:signal=KILL:when={boundary}"
            injected += inject(store, folder, fault, range(rounds, rounds + 6), pace=pace, seconds=60.0)
            rounds += 6
            with store.connect() as connection:
                size = int(connection.scalar(select(func.sum(logs.c.size))) or 0)
        found = check_exactly_once(store, make_writer, folder, injected)
        assert found >= size
        done, epoch, kills = done + found, epoch + 1, kills + rounds
        seconds = time.process_time() - began
        print(
            f"epoch {epoch}: {found} operations, {rounds} writers killed ({told(injected)} after an acknowledgement),"
            f" verified; {done} in all; {seconds:.0f} s of this process",
            flush=True,
        )
        store.dispose()
        shutil.rmtree(folder)
    print(f"{done} operations, {kills} writers killed, 0 missing, 0 twice, fsck clean", flush=True)


def told(made: list[Kill]) -> int:
    """How many of them had been told that something is durable."""
    return sum(kill.durable > 0 for kill in made)


def check(store: Engine, make_writer: Any, folder: Path, made: list[Kill], kills: int) -> None:
    assert len(made) > kills // 2 and sum(kill.durable for kill in made) > 100
    check_exactly_once(store, make_writer, folder, made)
    # Positive control: had the writer acknowledged on submission, events would be missing.
    assert sum(missing(store, kill, kill.submitted) for kill in made) > 0
    most = max(made, key=lambda kill: kill.durable)  # and what another did is not what this one did
    with store.connect() as connection, pytest.raises(AssertionError, match="is on record as"):
        check_content(connection, most.seed + 1, most.incarnation)
    with store.connect() as connection:
        for log, size in connection.execute(select(logs.c.id, logs.c.size)).all():
            place = leaves.c.idx
            low, high, rows = connection.execute(
                select(func.min(place), func.max(place), func.count()).where(leaves.c.log == log)
            ).one()
            assert (low, high, rows) == (0, size - 1, size)
        kinds = set(connection.scalars(select(outages.c.kind)))
    assert {"spill-started", "replay-completed"} <= kinds


def test_kill_9_loses_nothing_acknowledged(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    check(store, make_writer, tmp_path, kill_often(store, tmp_path, 20), 20)


@pytest.mark.soak
def test_kill_9_a_thousand_times(make_writer: Any, tmp_path: Path) -> None:
    """On four ledgers at once: most of a life is waiting, for the disk or for the moment to be killed."""

    def lane(number: int) -> tuple[Engine, Path, list[Kill]]:
        folder = tmp_path / f"lane-{number}"
        folder.mkdir()
        store = open_store(folder / "ledger.db", timeout_seconds=0.2)
        upgrade(store)
        return store, folder, kill_often(store, folder, 250, number)

    with ThreadPoolExecutor(4) as lanes:
        found = list(lanes.map(lane, range(4)))
    for store, folder, made in found:
        check(store, make_writer, folder, made, 250)
        store.dispose()
    print(f"1000 kills, {sum(told(made) for _, _, made in found)} after an acknowledgement; 0 missing, 0 twice")
