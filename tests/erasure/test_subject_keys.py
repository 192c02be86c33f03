"""Erasures where the ledger has tags instead of names: workers are told who is meant, or say that they were not."""

from __future__ import annotations

from pathlib import Path

import pytest
from custody_world import CustodyWorld
from sqlalchemy import Engine, select
from test_workers import ask, inbox, outcome

from kvcustody.audit.erasures import names, request
from kvcustody.audit.schema import subjects
from kvcustody.audit.subject_keys import SubjectKeys, is_tag
from kvcustody.clock import VirtualClock
from kvcustody.governance.plan import Plan
from kvcustody.governance.selector import Selector, matches_plan

SUBJECT = Selector("alpha", "alpha-user-1")
SESSION = Selector("alpha", "alpha-user-1", "alpha-user-1-chat")


def held(world: CustodyWorld, selector: Selector) -> int:
    """Residencies of the selector that hold or use anything."""
    accounts = world.governor.managers[0].accounts.values()
    every = [hold for account in accounts for hold in account.residencies.values()]
    every += [sequence.residency for sequence in world.governor.running.values()]
    return sum(isinstance(one.facts, Plan) and matches_plan(selector, one.facts) for one in every)


@pytest.mark.parametrize("selector", [SUBJECT, SESSION], ids=["subject", "session"])
def test_every_worker_erases_the_person_behind_the_tag(
    store: Engine, tmp_path: Path, selector: Selector
) -> None:
    clock = VirtualClock()
    stores = {name: SubjectKeys.open(tmp_path / "keys.db") for name in ("one", "two", "desk")}
    worlds = {}
    for at, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        worlds[name] = CustodyWorld(
            store, tmp_path / name, seed=at, worker=name, clock=clock, keys=stores[name]
        ).run(30)
        worlds[name].writer.flush()
    assert all(held(world, selector) for world in worlds.values()), "void: nothing is held"
    ask(store, tmp_path, clock, selector, "e-1", stores["desk"])
    with store.connect() as connection:
        assert all(map(is_tag, connection.scalars(select(subjects.c.subject))))
        asked = request(connection, "e-1")
        assert names(connection, asked) is None, "a tag is nobody's name"
    assert inbox(worlds["one"], "one").look(worlds["one"].governor) == 0, "without keys it is left undone"
    assert outcome(store, "e-1", clock) == ("partial", ("one", "two"), ())
    for name, world in worlds.items():
        assert inbox(world, name, stores[name]).look(world.governor) == 1
        world.step()
        assert held(world, selector) == 0
        world.settle()
        world.writer.flush()
    assert outcome(store, "e-1", clock)[0] == "complete"
    stores["desk"].destroy("alpha", "alpha-user-1")
    with store.connect() as connection:
        assert names(connection, asked, stores["one"]) is None, "the name went with the key"
    for name, world in worlds.items():
        world.close()
        world.writer.close()
        stores[name].close()
    stores["desk"].close()
