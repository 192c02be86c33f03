"""kill -9 in batches, outages, spills and replays: nothing acknowledged is lost (W2)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.queries import gaps
from kvcustody.audit.schema import events, incarnations, logs, outages


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
def test_kill_9_two_hundred_times(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    check(store, make_writer, tmp_path, 200)
