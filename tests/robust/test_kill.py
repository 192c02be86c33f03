"""kill -9 of a whole process at random moments, restart, and what is left: evidence, invariants, no plaintext.

The issue's "Robust" and redteam E2: every restart opens the same ledger, spill directory and keyring.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.evidence.query.evidence_columns import read, read_opened, unit_keys
from kvcustody.audit.kinds import PROCESS_DEATH
from kvcustody.audit.store.schema.leaf_tables import custody_ends, outages, releases, residencies
from kvcustody.audit.store.schema.ledger import events, incarnations, logs, workers
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.governance.identity.domain_spec import tenant_owner
from standins import PLACE
from standins.builders import keyring as open_keyring
from standins.robust.custody_world import CustodyWorld

pytestmark = pytest.mark.system

CANARY = np.arange(1, 65, dtype=np.int32) * 7919 % 30_011 + 1_000_003


class Kill(NamedTuple):
    incarnation: str
    durable: int
    submitted: int
    problems: int


def needles(folder: Path) -> dict[str, bytes]:
    """What must be nowhere on disk: the canary prompt in the forms it could be in, and every tenant's secret."""
    tokens = CANARY[:8]
    patterns = {
        "int32": tokens.astype("<i4").tobytes(),
        "int32 big-endian": tokens.astype(">i4").tobytes(),
        "int64": tokens.astype("<i8").tobytes(),
        "decimal": ",".join(map(str, tokens[:3].tolist())).encode(),
        "decimal, spaced": ", ".join(map(str, tokens[:3].tolist())).encode(),
        "hex": tokens.astype("<i4").tobytes().hex().encode(),
    }
    keyring = open_keyring(folder, SystemClock())
    for tenant in ("alpha", "beta", "gamma"):
        owner = tenant_owner("idp", tenant)
        epoch = keyring.current(owner)
        if epoch is not None:
            secret = bytes(keyring._secret(owner, epoch).view())
            patterns[f"secret of {tenant}"] = secret
            patterns[f"secret of {tenant}, hex"] = secret.hex().encode()
    keyring.close()
    return patterns


def found_on_disk(folder: Path, wanted: dict[str, bytes]) -> list[str]:
    """Which needles are in which files of the folder (the root key's own file aside: it is the root key)."""
    places = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            places += [f"{name} in {path.name}" for name, needle in wanted.items() if needle in data]
    return places


def kill_often(folder: Path, kills: int) -> Iterator[Kill | None]:
    """Start a process, kill it, and again; each start replays and closes what the one before it left."""
    chance = random.Random(kills)
    server = subprocess.Popen(
        [sys.executable, str(PLACE / "robust" / "victim_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr.log").open("wb"),
        text=True,
    )
    assert server.stdin and server.stdout
    try:
        for number in range(kills):
            progress = folder / f"progress-{number}"
            print("go", folder, number, file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            deadline = time.monotonic() + 60
            while chance.random() > 0.001 and not progress.exists() and time.monotonic() < deadline:
                time.sleep(0.001)  # now and then the kill falls into the start: replay, closing of the dead
            wanted = 5 + random.Random(f"{kills} {number}").randrange(45)  # done before it, on a slow machine too
            while progress.exists() and durable_in(progress) < wanted and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.02 * chance.random())
            os.kill(child, signal.SIGKILL)
            print("wait", file=server.stdin, flush=True)
            assert server.stdout.readline() == "dead\n"
            words = progress.read_text().split() if progress.exists() else []
            yield Kill(words[0], *map(int, words[1:])) if words else None
    finally:
        server.stdin.close()
        server.wait(60)


def durable_in(progress: Path) -> int:
    """The sequence that a process has shown to be durable so far."""
    words = progress.read_text().split()
    return int(words[1]) if len(words) == 4 else 0


def missing(store: Engine, incarnation: str, upto: int) -> int:
    """How many sequences up to this one have no leaf and are not accounted for as refused."""
    with store.connect() as connection:
        life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == incarnation))
        found = set(connection.scalars(select(events.c.sequence).where(events.c.incarnation == life)))
        query = select(outages.c.first_sequence).where(outages.c.incarnation == life, outages.c.kind == "withdrawn")
        found |= set(connection.scalars(query))
    return len(set(range(1, upto + 1)) - found)


def check(store: Engine, folder: Path, kills: int) -> str:
    """What was seen, in words, where everything held."""
    killed = []
    for number, kill in enumerate(kill_often(folder, kills)):
        if kill is not None:
            killed.append(kill)
        if number % 20 == 0 or number == kills - 1:
            assert found_on_disk(folder, needles(folder)) == []
    assert len(killed) > kills // 2 and sum(kill.durable for kill in killed) > 5 * len(killed)
    assert [kill for kill in killed if kill.problems] == [], "check() found something in a running process"
    assert "Error" not in (folder / "stderr.log").read_text()

    survivor = CustodyWorld(
        store, folder, seed=kills, worker="victim", clock=VirtualClock(utc_us=time.time_ns() // 1000)
    )
    assert survivor.run(60).governor.check() == [] and survivor.broken() == set()
    survivor.close()
    assert survivor.broken() == set()
    survivor.writer.close()

    assert [kill for kill in killed if missing(store, kill.incarnation, kill.durable)] == []
    # Positive control: had the writer acknowledged on submission, events would be missing.
    lost = sum(missing(store, kill.incarnation, kill.submitted) for kill in killed)
    assert lost > 0
    logs_are_whole(store)
    dead_are_closed(store, survivor.writer.incarnation)
    wanted = needles(folder)
    assert len(wanted) == 12 and found_on_disk(folder, wanted) == []
    # Positive control: a process that kept one line of it would be found.
    (folder / "left-behind.log").write_bytes(b"prompt=" + CANARY.astype("<i4").tobytes())
    assert found_on_disk(folder, wanted) == ["int32 in left-behind.log"]
    durable = sum(kill.durable for kill in killed)
    return f"0 of {durable} acknowledged events missing after {kills} kills; of those submitted only, {lost}"


def logs_are_whole(store: Engine) -> None:
    """Every log is contiguous and no leaf is there twice."""
    with store.connect() as connection:
        for log, size in connection.execute(select(logs.c.id, logs.c.size)).all():
            column = events.c.idx
            low, high, rows = connection.execute(
                select(func.min(column), func.max(column), func.count()).where(events.c.log == log)
            ).one()
            assert (low, high, rows) == (0, size - 1, size)
        twice = (
            select(events.c.incarnation, events.c.sequence, events.c.part, events.c.log)
            .group_by(events.c.incarnation, events.c.sequence, events.c.part, events.c.log)
            .having(func.count() > 1)
        )
        assert connection.execute(twice).all() == []
        assert [gap for gap in gaps(connection) if "continuation" in gap.cause] == []
        assert {"spill-started", "replay-completed"} <= set(connection.scalars(select(outages.c.kind)))


def dead_are_closed(store: Engine, survivor: str) -> None:
    """Every dead incarnation: no residency open, no listed block without an end, and none of that end covered."""
    with store.connect() as connection:
        lives = connection.execute(select(incarnations).where(incarnations.c.uuid != survivor)).all()
        closers = workers.c.name.endswith(":closing")  # each a process of one transaction, whole or not there
        closing = connection.scalars(
            select(incarnations.c.end).join(workers, workers.c.id == incarnations.c.worker).where(closers)
        ).all()
        assert {life.end for life in lives} == {"died", "stopped"}
        assert set(closing) == {"stopped"} and sum(life.end == "stopped" for life in lives) == len(closing)
        unproven = 0
        for life in lives:
            opened = set(
                connection.scalars(select(residencies.c.residency).where(residencies.c.incarnation == life.id))
            )
            left = set(
                connection.scalars(
                    select(releases.c.residency).where(releases.c.incarnation == life.id, releases.c.final)
                )
            )
            assert opened <= left
            _, handed = read_opened(connection, (residencies.c.tenant,), residencies.c.incarnation == life.id)
            mine = (releases.c.incarnation == life.id) & releases.c.written
            later = read(connection, releases, (releases.c.tenant,), mine)
            ends = read(connection, custody_ends, (custody_ends.c.cause,), custody_ends.c.incarnation == life.id)
            keys = [unit_keys(found.pairs.pools, found.pairs.generations) for found in (handed, later, ends)]
            assert np.isin(np.concatenate(keys[:2]), keys[2]).all(), "a listed block has no end"
            unproven += sum(cause == PROCESS_DEATH for cause in ends.texts("cause"))
        assert unproven > len(lives) // 2
        row = coverage(connection).total
        assert row.unproven and row.overdue == 0


def test_kill_9_at_random_moments(store: Engine, tmp_path: Path) -> None:
    check(store, tmp_path, 12)


@pytest.mark.soak
def test_kill_9_two_hundred_times(
    store: Engine, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("figure", check(store, tmp_path, 200))
