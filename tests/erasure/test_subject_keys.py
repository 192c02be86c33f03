"""Erasures where the ledger has tags instead of names: workers are told who is meant, or say that they were not."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine, insert, select
from typer.testing import CliRunner

from kvcustody.audit.evidence.erasure.requests_and_answers import names, request, requests
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, is_tag
from kvcustody.audit.store.schema.ledger import subjects, tenants
from kvcustody.clock import VirtualClock
from kvcustody.console.main import app
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.erasure.selector import Selector, matches_plan
from standins.erasure.asking import ask, inbox, outcome
from standins.robust.custody_world import CustodyWorld

SUBJECT = Selector("alpha", "alpha-user-1")
SESSION = Selector("alpha", "alpha-user-1", "alpha-user-1-chat")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An act on a ledger keeps its state where it is run."""
    monkeypatch.chdir(tmp_path)


def held(world: CustodyWorld, selector: Selector) -> int:
    """Residencies of the selector that hold or use anything."""
    manager = world.governor.managers[0]
    every = [hold for account in manager.accounts.values() for hold in manager.hold_table.of(account)]
    every += [sequence.residency for sequence in world.governor.running.values()]
    return sum(isinstance(one.facts, Plan) and matches_plan(selector, one.facts) for one in every)


def test_the_command_writes_a_tag_and_the_store_tells_who_is_meant(store: Engine, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keys.db"
    words = ["erasure", "request", "--tenant", "alpha", "--subject", "ada"]
    words += ["--ledger", f"sqlite:///{tmp_path}/ledger.db"]
    with store.begin() as connection:
        connection.execute(insert(tenants).values(tenant="alpha", log=1, first_seen_us=1))
    assert CliRunner().invoke(app, [*words, "--subject-keys", url]).exit_code == 0
    keys = SubjectKeys.open(url)
    with store.connect() as connection:
        (stored,) = connection.scalars(select(subjects.c.subject))
        assert is_tag(stored)
        (asked,) = requests(connection)
        assert names(connection, asked, keys) == ("ada", None)
    keys.close()
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2 and "--subject-names clear" in str(refused.exception) + refused.output
    assert CliRunner().invoke(app, [*words, "--subject-names", "clear"]).exit_code == 0
    with store.connect() as connection:
        assert "ada" in list(connection.scalars(select(subjects.c.subject))), "control: by name without a store"


@pytest.mark.parametrize("selector", [SUBJECT, SESSION], ids=["subject", "session"])
def test_every_worker_erases_the_person_behind_the_tag(store: Engine, tmp_path: Path, selector: Selector) -> None:
    clock = VirtualClock()
    stores = {name: SubjectKeys.open(tmp_path / "keys.db") for name in ("one", "two", "desk")}
    worlds = {}
    for at, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        worlds[name] = CustodyWorld(store, tmp_path / name, seed=at, worker=name, clock=clock, keys=stores[name]).run(
            30
        )
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
