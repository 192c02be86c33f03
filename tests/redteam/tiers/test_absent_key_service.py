"""A key service that is away while tiers run: what must end ends, what must live lives, and no thread ends for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcustody.errors import KeyServiceUnavailable
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import KeyOwner, tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.tiers.scope_salts import ScopeDirectory, ScopeSalts
from kvcustody.governance.tiers.seal_keys import SealKeys
from standins.governance.sealed_objects import World
from standins.governance.tier_place import ABSOLUTE_US, Place


class Service(RootKeyWrapping):
    """A holder that may be away, for a moment or for too long."""

    is_away = is_away_too_long = False

    def unwrap(self, wrapped: bytes, *, owner: KeyOwner, epoch: int) -> KeyBuffer:
        if self.is_away and not owner.kind.startswith("shred-"):
            raise KeyServiceUnavailable("away")
        return super().unwrap(wrapped, owner=owner, epoch=epoch)

    def may_seal(self) -> bool:
        return not self.is_away_too_long


class Served(World):
    """Keys that such a service wraps; no more than one secret is kept unwrapped."""

    def __init__(self, folder: Path) -> None:
        self.service = Service(KeyBuffer.random())
        super().__init__(folder)

    def open(self) -> None:
        store = FileKeyStore(self.folder / "keys.json")
        self.keyring = Keyring(store, self.service, self.clock, secrets_max=1)
        self.shred = ShredKeys.open(self.folder / "shred.keys", self.service, self.clock)
        self.keys = SealKeys(self.keyring, self.shred)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, "host", world=Served(tmp_path))
    yield made
    made.tier.close()
    made.staging.close()
    made.world.close()


def test_a_salt_that_is_read_while_the_service_is_away_is_known_when_it_is_back(place: Place) -> None:
    """And what an engine appends meanwhile cuts nothing off."""
    world, path = place.world, place.world.folder / "salts"
    first, second = place.label("acme", "ann"), place.label("acme", "bob")
    salts = ScopeSalts(world.keys, ScopeDirectory(path, world.keys))
    salt = salts.of(first)
    reads = ScopeDirectory(path, SealKeys(world.keyring, world.shred))
    service_of(place).is_away_too_long = True
    assert reads.label_of(salt) is None
    assert salts.of(second) != salts.of(second), "a salt that nobody has again"
    service_of(place).is_away_too_long = False
    assert reads.label_of(salt) == first
    assert reads.label_of(salts.of(second)) == second


def service_of(place: Place) -> Service:
    assert isinstance(place.world, Served)
    return place.world.service


def test_an_erasure_and_a_deadline_end_copies_while_the_service_is_away_for_too_long(place: Place) -> None:
    ann, bob = place.label("acme", "ann"), place.label("acme", "bob")
    assert place.keep(ann, "p", 4) == place.keep(bob, "q", 4) == 4
    service_of(place).is_away_too_long = True
    assert place.bring(ann, "p", 4) == 0, "nothing is opened"
    erased = place.tier.erase("e1", Selector("acme", "ann"), 1 << 60)
    assert (erased.objects, erased.waiting) == (1, 0)
    assert place.tier.narrow() == 0
    place.world.clock.advance(ABSOLUTE_US)
    assert place.tier.expire() == 1 and len(place.tier) == 0
    causes = [one.cause for one in place.events() if one.step == "destroyed"]
    assert causes.count("zeroed") == 2, "each with its evidence"


def test_nothing_ends_as_destroyed_because_its_secret_cannot_be_had_now(place: Place) -> None:
    acme = place.label("acme")
    assert place.keep(acme, "p", 4) == 4
    place.world.keyring.ensure([tenant_owner("idp", "new")])  # so that what is cached is made again
    with KeyBuffer() as other:  # and the one secret that is kept is another's
        place.world.keyring.derive(tenant_owner("idp", "new"), 1, b"use", other)
    service_of(place).is_away = True
    assert place.bring(acme, "p", 4) == 0 and place.tier.narrow() == 0
    assert place.ends() == [] and len(place.tier) == 1
    service_of(place).is_away = False
    assert place.bring(acme, "p", 4) == 4, "it comes back with the service"
    assert acme.spec is not None
    place.world.keyring.destroy(acme.spec.owner, 1)
    assert place.tier.narrow() == 1 and place.ends() == ["key-destroyed"], "control: an epoch that is destroyed"


def test_a_copy_whose_key_cannot_be_had_while_it_is_loaded_is_not_broken(place: Place) -> None:
    acme = place.label("acme")
    place.keep(acme, "p", 4)
    prepare = place.store.prepare_load

    def away(name: bytes) -> memoryview | None:
        place.world.keys.close()
        place.world.keyring.close()  # the secret that was kept is wiped
        service_of(place).is_away = True
        return prepare(name)

    place.store.prepare_load = away  # type: ignore[method-assign]
    assert place.bring(acme, "p", 4) == 0
    assert place.ends() == []
    place.store.prepare_load = prepare  # type: ignore[method-assign]
    service_of(place).is_away = False
    assert place.bring(acme, "p", 4) == 4
