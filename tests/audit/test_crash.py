"""kill -9 in batches, outages, spills and replays: nothing acknowledged is lost (W2)."""

from __future__ import annotations

import os
import random
import select as select_module
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.events import KeyEvent, ResidencyReleased
from kvcustody.audit.fsck import fsck
from kvcustody.audit.queries import gaps
from kvcustody.audit.schema import events, incarnations, logs, outages, receipts
from kvcustody.errors import LedgerUnavailable


class Kill(NamedTuple):
    incarnation: str
    durable: int
    submitted: int


def kill_often(store: Engine, folder: Path, kills: int) -> list[Kill]:
    """Start a writer, kill it, and again; each start replays and closes what the one before it left."""
    ledger = str(store.url.database).removeprefix("file:").split("?", 1)[0]
    chance = random.Random(kills)
    made = []
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("crash_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin and server.stdout
    try:
        for number in range(kills):
            progress = folder / f"progress-{number}"
            print("go", ledger, folder / "spill", progress, number, file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            deadline = time.monotonic() + 5
            while chance.random() > 0.002 and not progress.exists() and time.monotonic() < deadline:
                time.sleep(0.001)  # now and then the kill falls into the start: replay, closing of the dead
            if chance.random() < 0.4:  # and often while the database is locked, however slow the machine is
                until = time.monotonic() + 2
                while not any((folder / "spill").glob("*.spill")) and time.monotonic() < until:
                    time.sleep(0.001)
            time.sleep(0.1 * chance.random())
            os.kill(child, signal.SIGKILL)
            print("wait", file=server.stdin, flush=True)
            assert server.stdout.readline() == "dead\n"
            if progress.exists() and (words := progress.read_text().split()):
                made.append(Kill(words[0], int(words[1]), int(words[2])))
    finally:
        server.stdin.close()
        server.wait(10)
    return made


CALLS = "pwrite64,fsync,fdatasync,ftruncate,rename,unlink"


def inject(store: Engine, folder: Path, rule: str, children: int, seconds: float) -> list[Kill]:
    """Run writers one after the other, each with a fault in its system calls (`strace -e inject=…:rule`).

    One that the fault does not kill is killed when its time is up.
    """
    ledger = str(store.url.database).removeprefix("file:").split("?", 1)[0]
    program = [
        "strace",
        "-f",
        "-o",
        "/dev/null",
        "-e",
        f"trace={CALLS}",
        "-e",
        f"inject={rule}",
    ]
    server = subprocess.Popen(
        [*program, sys.executable, str(Path(__file__).with_name("crash_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin and server.stdout
    made = []
    try:
        for number in range(children):
            progress = folder / f"progress-{abs(hash((rule, number)))}"
            print("go", ledger, folder / "spill", progress, number, file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            print("wait", file=server.stdin, flush=True)
            if not select_module.select([server.stdout], [], [], seconds)[0]:
                os.kill(child, signal.SIGKILL)
            assert server.stdout.readline() == "dead\n"
            if progress.exists() and (words := progress.read_text().split()):
                made.append(Kill(words[0], int(words[1]), int(words[2])))
    finally:
        server.stdin.close()
        server.wait(20)
    return made


def check_exactly_once(store: Engine, make_writer: Any, folder: Path, made: list[Kill]) -> int:
    """Replay what is left, then: nothing acknowledged is missing, nothing is there twice, and the trees agree (F2)."""
    last = make_writer(store, worker="victim", spill_directory=folder / "spill")
    assert last.flush()
    last.close()
    assert [kill for kill in made if missing(store, kill.incarnation, kill.durable)] == []
    with store.connect() as connection:
        twice = select(receipts.c.incarnation, receipts.c.launch).group_by("incarnation", "launch")
        assert connection.execute(twice.having(func.count() > 1)).all() == []
        assert fsck(connection).problems == []
        return int(connection.scalar(select(func.count()).select_from(events)) or 0)


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="faults are injected by strace")


@needs_strace
@pytest.mark.parametrize("boundary", [1, 3, 9, 20])
def test_killed_at_a_write_boundary(store: Engine, make_writer: Any, tmp_path: Path, boundary: int) -> None:
    """SIGKILL at the n-th write, sync, truncation, rename or removal of a thread, in several schedules."""
    made = inject(store, tmp_path, f"{CALLS}:signal=KILL:when={boundary}", 4, 5.0)
    check_exactly_once(store, make_writer, tmp_path, made)


@needs_strace
@pytest.mark.parametrize(
    "rule",
    [
        "pwrite64:error=ENOSPC:when=12+9",
        "fdatasync,fsync:error=EIO:when=4+5",
        "fdatasync,fsync:delay_enter=40000",
        "pwrite64:error=EIO:when=30+1",  # and never again a write
    ],
)
def test_a_disk_that_fails_or_is_slow(store: Engine, make_writer: Any, tmp_path: Path, rule: str) -> None:
    """ENOSPC, EIO and slow syncs (F3): nothing that was called durable is missing afterwards."""
    made = inject(store, tmp_path, rule, 2, 1.0)
    assert made
    check_exactly_once(store, make_writer, tmp_path, made)


@needs_strace
@pytest.mark.soak
def test_a_million_operations_across_every_write_boundary(
    store: Engine, make_writer: Any, tmp_path: Path
) -> None:
    """The first 40 boundaries of a thread, some up to the 400th, then far ones at random until there are enough."""
    boundaries = [*range(1, 41), *range(41, 400, 40)]
    chance = random.Random(6)
    made: list[Kill] = []
    leaves = rounds = 0
    while leaves < 1_000_000 or rounds < len(boundaries):
        far = rounds >= len(boundaries)
        boundary = chance.randrange(1000, 6000) if far else boundaries[rounds]
        made += inject(store, tmp_path, f"{CALLS}:signal=KILL:when={boundary}", 6, 60.0)
        rounds += 1
        with store.connect() as connection:
            leaves = int(connection.scalar(select(func.count()).select_from(events)) or 0)
    assert check_exactly_once(store, make_writer, tmp_path, made) >= 1_000_000
    print(
        f"{leaves} leaves, {6 * rounds} writers killed, {len(made)} of them after their first acknowledgement"
    )


def test_a_database_that_is_away_for_a_while(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    away(store, make_writer, tmp_path, 1.5)


@pytest.mark.soak
def test_a_database_that_is_away_for_a_minute(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    away(store, make_writer, tmp_path, 60.0)


def away(store: Engine, make_writer: Any, folder: Path, seconds: float) -> None:
    """The ledger's file vanishes and comes back (F3): class A is refused, the rest goes on and arrives once."""
    path = Path(str(store.url.database).removeprefix("file:").split("?", 1)[0])
    writer = make_writer(store, worker="steady")
    writer.submit([KeyEvent(1, "acme", "made", 0, "operator")])
    assert writer.flush()
    hidden = folder / "hidden"
    hidden.mkdir()
    names = [each for each in path.parent.glob(path.name + "*") if each.is_file()]
    for each in names:
        each.rename(hidden / each.name)
    until, number, refused = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        number += 1
        writer.submit([ResidencyReleased(number, number, "acme", "finish", (), 0)])
        if number % 100 == 1:
            with pytest.raises(LedgerUnavailable):
                writer.submit_durable(
                    KeyEvent(number, "acme", "made", number, "operator"), timeout_seconds=0.2
                )
            refused += 1
        assert writer.admitting
        time.sleep(0.002)
    assert writer.status().spilled_bytes > 0
    for each in hidden.iterdir():
        each.rename(path.parent / each.name)
    assert writer.flush(20)
    writer.submit_durable(KeyEvent(1, "acme", "made", 1, "operator"))
    with store.connect() as connection:
        column = events.c.kind
        rows = connection.execute(select(column, func.count().label("leaves")).group_by(column))
        counts = {row.kind: row.leaves for row in rows}
        assert counts["residency-released"] == number and counts["key-event"] == 2 and refused > 0
        assert gaps(connection) == () and fsck(connection).problems == []


def missing(store: Engine, incarnation: str, upto: int) -> int:
    """How many sequences up to this one neither have a leaf nor are accounted for as refused."""
    with store.connect() as connection:
        life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == incarnation))
        found = set(connection.scalars(select(events.c.sequence).where(events.c.incarnation == life)))
        rows = connection.execute(
            select(outages.c.first_sequence, outages.c.last_sequence).where(
                outages.c.incarnation == life, outages.c.kind == "withdrawn"
            )
        )
        for first, last in rows:
            found |= set(range(first, last + 1))
    return len(set(range(1, upto + 1)) - found)


def check(store: Engine, make_writer: Any, folder: Path, kills: int) -> None:
    made = kill_often(store, folder, kills)
    assert len(made) > kills // 2 and sum(kill.durable for kill in made) > 100
    last = make_writer(store, worker="victim", spill_directory=folder / "spill")
    assert last.flush()
    last.close()
    assert [kill for kill in made if missing(store, kill.incarnation, kill.durable)] == []
    # Positive control: had the writer acknowledged on submission, events would be missing.
    assert sum(missing(store, kill.incarnation, kill.submitted) for kill in made) > 0
    with store.connect() as connection:
        ends = connection.execute(select(incarnations.c.uuid, incarnations.c.end)).all()
        assert {row.end for row in ends if row.uuid != last.incarnation} == {"died"}
        for log, size in connection.execute(select(logs.c.id, logs.c.size)).all():
            column = events.c.idx
            low, high, rows = connection.execute(
                select(func.min(column), func.max(column), func.count()).where(events.c.log == log)
            ).one()
            assert (low, high, rows) == (0, size - 1, size)
        assert [gap for gap in gaps(connection) if "continuation" in gap.cause] == []
        kinds = set(connection.scalars(select(outages.c.kind)))
    assert {"spill-started", "replay-completed"} <= kinds
    assert not list((folder / "spill").glob("*.spill"))


def test_kill_9_loses_nothing_acknowledged(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    check(store, make_writer, tmp_path, 20)


@pytest.mark.soak
def test_kill_9_a_thousand_times(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    check(store, make_writer, tmp_path, 1000)
