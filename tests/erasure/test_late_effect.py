"""An erasure that reaches a process late: whatever ran on meanwhile, everybody computes the same due times."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from sqlalchemy import Engine

from kvcustody.clock import VirtualClock
from kvcustody.governance.erasure.selector import Selector
from standins.erasure.asking import ask, inbox
from standins.erasure.narrowing import judged
from standins.robust.custody_world import CustodyWorld

WHOM = (
    Selector("alpha"),
    Selector("beta", "beta-user-1"),
    Selector("alpha", "alpha-user-2", "alpha-user-2-chat"),
    Selector("gamma", classification="low"),
    Selector("beta", None, "beta-user-2-chat"),
)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_due_times_agree_whatever_happened_between_request_and_effect(store: Engine, tmp_path: Path, seed: int) -> None:
    clock, chance = VirtualClock(), Random(seed)
    world = CustodyWorld(store, tmp_path, seed=seed, blocks=160, clock=clock)
    for at in range(16):
        world.run(chance.randrange(3, 9))
        ask(store, tmp_path, clock, WHOM[at % len(WHOM)], f"e-{at}")
        world.run(chance.randrange(0, 4))  # requests end, begin and are extended before the worker looks
        assert inbox(world, "worker-1").look(world.governor) > 0
        world.step()
        world.lengths = {one: n for one, n in world.lengths.items() if one in world.governor.running}
    world.settle()
    total = judged(world)
    world.close()
    world.writer.close()
    assert total.disputed == 0 < total.due
