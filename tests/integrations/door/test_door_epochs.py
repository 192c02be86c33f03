"""The door and erase epochs: names end with an erasure, tokens say what they stand on, and a lease can be over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcustody.governance.edge.door_token import DoorTokens, PresentedToken
from kvcustody.governance.edge.erase_epochs import (
    Epochs,
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.policies.document.model import Scope
from kvcustody.times import DAY_US
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge, door_key

ISSUER = "api-keys"
TAGS = EpochTags(bytes(32))
FLEET, ACME = EpochScope(), EpochScope(ISSUER, "acme")
SHARED = EpochScope(ISSUER, "acme", is_shared=True)
ALICE = EpochScope(ISSUER, "acme", "alice")
SESSION = EpochScope(ISSUER, "acme", session="s1")


class Feed:
    """What the control plane told, while the lease lasts."""

    def __init__(self) -> None:
        self.raised: list[RaisedEpoch] = []
        self.is_heard = True

    def raise_epoch(self, scope: EpochScope) -> int:
        self.raised.append(RaisedEpoch(len(self.raised) + 1, TAGS.of(scope)))
        return len(self.raised)

    def known(self) -> KnownEpochs | None:
        return KnownEpochs(EraseEpochs(self.raised, version=len(self.raised)), TAGS) if self.is_heard else None


class World:
    """A door that hears of epochs, and what goes on of requests."""

    def __init__(self, folder: Path, signers: Signers, **more: Any) -> None:
        self.feed = Feed()
        self.fleet = FleetEdge(folder, signers, epochs=self.feed.known, **more)
        self.tokens = DoorTokens(lambda: [door_key().verifier], self.fleet.clock)

    def name(self, key: str, **headers: str) -> str:
        salt = self.fleet.send(key, headers=headers).json["cache_salt"]
        assert isinstance(salt, str)
        return salt

    def names(self) -> dict[str, str]:
        clients = self.fleet.clients
        return {
            "alice": self.name(clients.alice),
            "bob": self.name(clients.acme, **{"x-kvcustody-subject": "bob"}),
            "session": self.name(clients.acme, **{"x-kvcustody-session": "s1"}),
            "globex": self.name(clients.globex, **{"x-kvcustody-subject": "eve"}),
        }

    def epochs(self, key: str, **headers: str) -> Epochs:
        """What the token of a request stands on."""
        token = self.fleet.send(key, headers=headers).forwarded.headers["authorization"].split()[1]
        found = self.tokens.present(token)
        assert isinstance(found, PresentedToken), found
        return found.claims.epochs


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def world(tmp_path: Path, signers: Signers) -> World:
    return World(tmp_path, signers)


def metric(world: World, name: str, **labels: str) -> float:
    return world.fleet.edge.metrics.registry.get_sample_value(f"kvcustody_door_{name}", labels) or 0.0


@pytest.mark.parametrize(
    ("scope", "changed"),
    [
        (ALICE, {"alice"}),
        (SESSION, {"session"}),
        (SHARED, set()),
        (ACME, {"alice", "bob", "session"}),
        (FLEET, {"alice", "bob", "session", "globex"}),
    ],
)
def test_a_raised_epoch_ends_the_names_of_its_scope(world: World, scope: EpochScope, changed: set[str]) -> None:
    before = world.names()
    assert world.names() == before, "the control: nothing was raised"
    world.feed.raise_epoch(scope)
    after = world.names()
    assert {who for who in before if before[who] != after[who]} == changed


def test_a_subjects_session_ends_with_either(tmp_path: Path, signers: Signers) -> None:
    world = World(tmp_path, signers, scopes=lambda: NameScopes(Scope.SESSION))

    def name() -> str:
        return world.name(world.fleet.clients.alice, **{"x-kvcustody-session": "s1"})

    names = [name()]
    for scope in (ALICE, SESSION):
        world.feed.raise_epoch(scope)
        names.append(name())
        assert names[-1] == name()
    assert len(set(names)) == 3


def test_a_token_says_what_its_principal_stands_on(world: World) -> None:
    clients = world.fleet.clients
    assert world.epochs(clients.alice) == Epochs()
    numbers = [world.feed.raise_epoch(scope) for scope in (FLEET, ACME, SHARED, ALICE, SESSION)]
    assert numbers == [1, 2, 3, 4, 5]
    assert world.epochs(clients.alice) == Epochs(1, 2, 4)
    assert world.epochs(clients.acme) == Epochs(1, 2, 3)
    assert world.epochs(clients.acme, **{"x-kvcustody-session": "s1"}) == Epochs(1, 2, 5)
    assert world.epochs(clients.globex) == Epochs(1, 0, 0)


def test_where_a_tenant_has_one_name_tokens_still_say_the_subjects_epoch(tmp_path: Path, signers: Signers) -> None:
    """The worker compares by principal; the shared name ends in batches."""
    world = World(tmp_path, signers, scopes=lambda: NameScopes(Scope.TENANT))
    before = world.names()
    world.feed.raise_epoch(ALICE)
    assert world.names() == before and world.epochs(world.fleet.clients.alice) == Epochs(0, 0, 1)
    world.feed.raise_epoch(SHARED)
    assert world.name(world.fleet.clients.alice) != before["alice"]


def test_past_the_lease_nothing_is_found_and_nothing_breaks(world: World) -> None:
    clients, before = world.fleet.clients, world.names()
    world.feed.raise_epoch(ALICE)
    world.names()
    world.feed.is_heard = False
    found = [world.name(clients.alice) for _ in range(3)]
    assert len({*found, *before.values()}) == 3 + len(before), "a name for each request"
    assert all(len(name) == 32 for name in found)
    assert world.epochs(clients.alice) == Epochs(0, 0, 1), "as last known"
    assert metric(world, "past_lease_total") == 4
    assert (
        world.fleet.edge.lacks() and world.fleet.workers[0].ask(world.fleet.send(clients.alice).forwarded).status == 200
    )
    world.feed.is_heard = True
    assert world.name(clients.alice) == world.name(clients.alice) and not world.fleet.edge.lacks()
    assert metric(world, "past_lease_total") == 5


def test_a_door_that_never_heard_serves(tmp_path: Path, signers: Signers) -> None:
    world = World(tmp_path, signers)
    world.feed.is_heard = False
    assert world.name(world.fleet.clients.alice) != world.name(world.fleet.clients.alice)
    assert world.epochs(world.fleet.clients.alice) == Epochs()


@pytest.mark.parametrize("days", [0, 1, 30])
def test_names_end_with_time(tmp_path: Path, signers: Signers, days: int) -> None:
    fleet = FleetEdge(tmp_path, signers, namespace_days=days)
    seen = []
    for _ in range(4):
        seen.append(fleet.send(fleet.clients.alice).json["cache_salt"])
        fleet.clock.advance((days or 1) * DAY_US)
    assert len(set(seen)) == (4 if days else 1)
