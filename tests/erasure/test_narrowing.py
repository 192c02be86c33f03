"""Retention is shortened while custody stands: due times follow from leaves alone, in the tables and without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from sqlalchemy import Engine, select

from kvcustody.audit.kinds import Event, HoldsNarrowed
from kvcustody.audit.store.schema.ledger import events
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.erasure.narrowing import judged
from standins.robust.custody_world import POLICY, CustodyWorld

# Turn by turn: shorter idle times, shorter ceilings, one tenant gone, the first again (which widens), and so on.
POLICIES = (
    POLICY.replace("idle: 2m", "idle: 20s").replace("idle: 90s", "idle: 15s"),
    POLICY.replace("idle: 2m, absolute: 10m", "idle: 1m, absolute: 70s"),
    POLICY.replace("  beta:    {quota: {guaranteed: 20%, cap: 70%, borrow: true}}\n", "").replace(
        "  - {tenant: beta, as: high}\n", ""
    ),
    POLICY,
)


def reloaded(world: CustodyWorld, chance: Random, rounds: int) -> CustodyWorld:
    """A random workload whose policy changes every few acts."""
    for at in range(rounds):
        world.run(chance.randrange(3, 12))
        table = compile_policy(load_policy(POLICIES[at % len(POLICIES)], name="turn.yaml"), revision=at + 2)
        if chance.random() < 0.5:
            world.governor.activate(table, actor="grace")
        else:
            world.governor.call(lambda governor, table=table: governor.activate(table, actor="grace"))
            world.step()
    world.settle()
    return world


@pytest.fixture
def worlds(store: Engine, tmp_path: Path) -> Iterator[list[CustodyWorld]]:
    made: list[CustodyWorld] = []
    yield made
    for world in made:
        world.close()
        world.writer.close()


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_no_due_time_is_disputed_after_reloads(
    store: Engine, tmp_path: Path, worlds: list[CustodyWorld], seed: int
) -> None:
    world = CustodyWorld(store, tmp_path, seed=seed, blocks=160)
    worlds.append(world)
    total = judged(reloaded(world, Random(seed), 24 if seed < 3 else 400))
    assert total.disputed == 0 < total.due
    with store.connect() as connection:
        kinds = list(connection.scalars(select(events.c.kind).where(events.c.kind == "holds-narrowed")))
    assert len(kinds) > 5, "void: nothing was narrowed"


def test_without_the_leaf_the_due_times_are_disputed(store: Engine, tmp_path: Path, worlds: list[CustodyWorld]) -> None:
    def narrowing(event: Event) -> bool:
        return isinstance(event, HoldsNarrowed)

    world = CustodyWorld(store, tmp_path, seed=1, blocks=160, chosen=narrowing)
    worlds.append(world)
    total = judged(reloaded(world, Random(1), 24))
    assert world.ledger.dropped and total.disputed > total.due // 20
