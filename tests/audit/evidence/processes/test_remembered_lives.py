"""Processes kept in memory equal those in the log."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.processes.marked_processes import read_marked
from kvcustody.audit.evidence.processes.remembered_lives import RememberedLives
from kvcustody.audit.evidence.processes.work_periods import ends, life_leaves, read_work_periods
from kvcustody.audit.kinds import WorkerDied, WorkerReturned, WorkerStarted, WorkerStopped
from standins.builders import ledger

_NAMES = ("w-0", "w-1", "w-2")


def start(at_us: int, worker: str, origin: str = "") -> WorkerStarted:
    return WorkerStarted(at_us, worker, 10, 1, 4096, "cpu", "test", origin=origin, orders="signed")


@pytest.mark.parametrize("seed", range(5))
def test_lives_in_memory_are_those_of_the_log(make_writer: Any, store: Engine, seed: int) -> None:
    """Starts, ends, deaths and returns in any order, looked at in between; a question reads what is new alone."""
    chance, lives = random.Random(seed), RememberedLives()
    writers = {name: make_writer(store, worker=name) for name in _NAMES}
    seen = set()
    for step in range(1, 13):
        name, of = chance.choice(_NAMES), writers[chance.choice(_NAMES)].incarnation
        event = chance.choice(
            [
                start(step, name, chance.choice(["", "simulated"])),
                WorkerStopped(step, name, "stopped", 0, (0,)),
                WorkerDied(step, name, of, "exit", 0, 0),
                WorkerReturned(step, name, of),
            ]
        )
        writers[name].submit([event])
        assert writers[name].flush()
        with store.connect() as connection:
            known_lives, leaves = lives.all(connection), life_leaves(connection)
            assert known_lives.periods == read_work_periods(connection)
            assert known_lives.ends == ends(leaf.body for leaf in leaves)
            assert known_lives.marked == lives.marked(connection) == read_marked(connection)
            for each in _NAMES:
                own = {life: one for life, one in known_lives.periods.items() if one.worker == each}
                assert lives.of_worker(connection, each) == own
            assert life_leaves(connection, leaves[-1].idx) == leaves[-1:], "control: there is one to read"
            seen |= {bool(known_lives.periods), bool(known_lives.ends) + 2, bool(known_lives.marked) + 4}
    assert {1, 3} <= seen, "control: there were processes, and ends"


def test_lives_of_a_restored_ledger_are_read_again(
    make_writer: Any, store: Engine, migrated: Path, tmp_path: Path
) -> None:
    """A ledger that says something else at the place that was read last."""
    lives = RememberedLives()
    with ledger(migrated, tmp_path / "other.db") as other:
        for engine in (store, other):
            writer = make_writer(engine, worker="one", spill_directory=tmp_path / f"spill-{engine is other}")
            writer.submit([start(1, "one")])
            assert writer.flush()
            with engine.connect() as connection:
                assert list(lives.all(connection).periods) == [writer.incarnation]
