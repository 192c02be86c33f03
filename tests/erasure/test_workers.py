"""Erasures over several workers and through crashes: partial until every live worker has answered, then complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import Engine, select

from kvcustody.audit.evidence.erasure.requests_and_answers import pending, status
from kvcustody.audit.kinds import ErasureRequested
from kvcustody.audit.store.schema.leaf_tables import erasures, residencies
from kvcustody.audit.store.schema.ledger import subjects
from kvcustody.clock import VirtualClock
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector
from standins import PLACE
from standins.erasure.asking import ask, inbox, outcome
from standins.robust.custody_world import CustodyWorld

pytestmark = pytest.mark.system

ALPHA = Selector("alpha")


def test_partial_until_every_live_worker_has_answered(store: Engine, tmp_path: Path) -> None:
    clock = VirtualClock()
    worlds = {
        name: CustodyWorld(store, tmp_path / name, seed=at, worker=name, clock=clock)
        for at, name in enumerate(("one", "two", "three"))
        if (tmp_path / name).mkdir() is None
    }
    for world in worlds.values():
        world.run(30)
        world.writer.flush()
    ask(store, tmp_path, clock, Selector("alpha", "alpha-user-1"), "e-1")
    assert outcome(store, "e-1", clock) == ("partial", ("one", "three", "two"), ())
    for name in ("one", "three"):
        assert inbox(worlds[name], name).look(worlds[name].governor) == 1
        worlds[name].settle()
        worlds[name].writer.flush()
    clock.advance(1)
    assert outcome(store, "e-1", clock)[0] == "partial"
    silent = outcome(store, "e-1", clock)
    assert silent[1] + silent[2] == ("two",), "the worker that has not answered is named"
    two = worlds["two"]
    box = inbox(two, "two")
    assert box.look(two.governor) == 1 and box.look(two.governor) == 0
    two.settle()
    two.writer.flush()
    assert outcome(store, "e-1", clock) == ("complete", (), ())
    with store.connect() as connection:
        answers = status(connection, "e-1", clock.utc_us()).answers
        asked = connection.execute(select(erasures)).one()
        names = connection.execute(select(subjects.c.subject).where(subjects.c.pseudonym == asked.subject))
        assert names.scalar() == "alpha-user-1" and "alpha-user-1" not in str(asked)
        assert pending(connection, "one") == pending(connection, "two") == ()
    assert all(answer.reread_nonzero == 0 for answer in answers)
    for world in worlds.values():
        assert world.broken() == set()
        world.close()
        world.writer.close()


def test_a_worker_that_stays_away_is_named_after_the_deadline(store: Engine, tmp_path: Path) -> None:
    clock = VirtualClock()
    world = CustodyWorld(store, tmp_path, worker="one", clock=clock).run(10)
    world.writer.flush()
    ask(store, tmp_path, clock, ALPHA, "e-1")
    assert outcome(store, "e-1", clock) == ("partial", ("one",), ())
    clock.advance(61_000_000)
    assert outcome(store, "e-1", clock) == ("partial", (), ("one",))
    world.writer.close()


def test_kill_9_in_the_middle_is_taken_up_by_the_next_process(store: Engine, tmp_path: Path) -> None:
    """The child erases every few acts and is killed at once; its successor owes the rest."""
    kills, interrupted = 6, 0
    server = subprocess.Popen(
        [sys.executable, str(PLACE / "erasure" / "erasing_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin and server.stdout
    for number in range(kills):
        print("go", tmp_path, number, file=server.stdin, flush=True)
        child = int(server.stdout.readline())
        deadline = time.monotonic() + 60
        while not (tmp_path / f"erasing-{number}").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.03 * number)
        os.kill(child, signal.SIGKILL)
        print("wait", file=server.stdin, flush=True)
        assert server.stdout.readline() == "dead\n"
        with store.connect() as connection:
            interrupted += len(pending(connection, "victim"))
    server.stdin.close()
    server.wait(60)
    assert interrupted > 0, "void: no erasure was interrupted"
    clock = VirtualClock(utc_us=time.time_ns() // 1000)
    survivor = CustodyWorld(store, tmp_path, seed=99, worker="victim", clock=clock)
    with store.connect() as connection:  # what was in the spill is back by now
        owed = {asked.erasure for asked in pending(connection, "victim")}
    assert inbox(survivor, "victim").recover_pending(survivor.governor) == len(owed) > 0
    survivor.run(10).settle()
    survivor.writer.flush()
    with store.connect() as connection:
        assert pending(connection, "victim") == ()
        every = connection.scalars(select(erasures.c.erasure)).all()
        for erasure in every:
            assert status(connection, erasure, clock.utc_us()).outcome == "complete"
        assert connection.scalars(select(residencies.c.residency)).first() is not None
    assert survivor.governor.check() == [] and survivor.broken() == set()
    assert survivor.memory.nonzero_bytes(np.flatnonzero(survivor.governor.managers[0].pool.state == 0)) == 0
    survivor.close()
    survivor.writer.close()


def test_an_erasure_request_names_people_by_pseudonym_only() -> None:
    event = request_event(Selector("a", "x", "s", classification="low"), "e", "dpo", 9, 1)
    assert isinstance(event, ErasureRequested)
    assert event.selector == "domain" and event.detail == '{"classification":"low"}'
