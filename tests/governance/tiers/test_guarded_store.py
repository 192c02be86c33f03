"""A store that hangs, fails, or comes back: who asks waits no longer than the deadline, and nothing wrong is found."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from test_tier import Place, keys_of

from kvcustody.clock import VirtualClock
from kvcustody.errors import StoreError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.tier import SealedTier

SECONDS = 0.2


class Hanging(HostArena):
    """It waits in the named calls until it is let go."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.hangs: set[str] = set()
        self.free = threading.Event()
        self.fails = False
        self.asked = 0

    def _hang(self, call: str) -> None:
        self.asked += 1
        if self.fails:
            raise StoreError("out of order")
        if call in self.hangs:
            assert self.free.wait(30)

    def complete_store(self, name):  # type: ignore[no-untyped-def]
        self._hang("complete_store")
        super().complete_store(name)

    def prepare_load(self, name):  # type: ignore[no-untyped-def]
        self._hang("prepare_load")
        return super().prepare_load(name)

    def delete(self, names):  # type: ignore[no-untyped-def]
        self._hang("delete")
        return super().delete(names)


@pytest.fixture
def hanging() -> Hanging:
    return Hanging()


@pytest.fixture
def place(tmp_path: Path, hanging: Hanging) -> Place:
    """Its tier is over a guarded store that may hang."""
    made = Place(tmp_path, "host")
    made.tier.close()
    made.store = GuardedStore(hanging, seconds=SECONDS, clock=made.world.clock)
    terms = made.tier._terms
    made.tier = SealedTier(
        made.store, made.world.keys, made.world.shred, made.staging, made.world.clock, terms
    )
    return made


def answered(store: GuardedStore) -> None:
    """Wait until the call that hung has ended."""
    until = time.monotonic() + 20
    while not store.is_open and time.monotonic() < until:
        time.sleep(0.005)
    assert store.is_open


def test_nothing_hangs_where_the_store_does(place: Place, hanging: Hanging) -> None:
    """Each call that hangs costs one deadline, all that come meanwhile nothing; and then all is as it was."""
    acme, store = place.label("acme"), place.store
    assert isinstance(store, GuardedStore)
    assert place.keep(acme, "p", 4) == 4 == place.bring(acme, "p", 4)
    hanging.hangs = {"prepare_load"}
    began = time.monotonic()
    assert place.bring(acme, "p", 4) == 0
    for _ in range(20):
        assert place.bring(acme, "p", 4) == 0 and place.keep(acme, "q", 4) == 0
    assert time.monotonic() - began < 20 * SECONDS, "void: no time would tell one deadline from twenty"
    assert store.late == 1 and store.refused >= 20
    hanging.free.set()
    hanging.hangs = set()
    answered(store)
    assert place.bring(acme, "p", 4) == 4 and place.keep(acme, "q", 4) == 4
    assert place.tier.erase("e", Selector("acme"), 0).done
    assert hanging.used_bytes == 0, "the load that answered late holds nothing"
    place.tier.close()


def test_what_came_of_a_store_that_was_not_waited_for_ends(place: Place, hanging: Hanging) -> None:
    """It completed after nobody waited any more: there, in no index, and deleted with the next occasion."""
    acme, store = place.label("acme"), place.store
    assert isinstance(store, GuardedStore)
    hanging.hangs = {"complete_store"}
    assert place.keep(acme, "p", 4) == 0 and len(place.tier) == 0
    hanging.free.set()
    hanging.hangs = set()
    answered(store)
    assert len(place.tier.objects()) == 1, "void: nothing came of it"
    assert place.tier.lookup(acme, keys_of("p", 4), 0) == []
    place.tier.expire()
    assert len(place.tier.objects()) == 0
    assert place.keep(acme, "p", 4) == 4 == place.bring(acme, "p", 4)
    place.tier.close()


def test_an_erasure_takes_effect_while_the_store_hangs(place: Place, hanging: Hanging) -> None:
    ada = place.label("acme", "ada")
    assert place.keep(ada, "p", 4) == 4
    hanging.hangs = {"delete"}
    done = place.tier.erase("e", Selector("acme", "ada"), 0)
    assert not done.done and place.tier.lookup(ada, keys_of("p", 4), 0) == []
    assert not [key for key in place.world.shred.living() if key.kind == "subject"], "its key is destroyed"
    hanging.free.set()
    hanging.hangs = set()
    assert isinstance(place.store, GuardedStore)
    answered(place.store)
    assert place.tier.erase("e", Selector("acme", "ada"), 0).done and len(place.tier.objects()) == 0
    place.tier.close()


def test_a_store_that_fails_is_left_alone_for_longer_each_time(hanging: Hanging) -> None:
    clock = VirtualClock()
    store = GuardedStore(hanging, seconds=5, clock=clock, failures=2, pause_seconds=1)
    hanging.fails = True
    pauses = []
    for _ in range(12):
        with pytest.raises(StoreError, match="out of order"):
            store.prepare_load(bytes(32))
        before = hanging.asked
        waited = 0
        while not store.is_open:
            with pytest.raises(StoreError, match="not asked now"):
                store.prepare_load(bytes(32))
            clock.advance(500_000)
            waited += 500_000
        assert hanging.asked == before
        pauses.append(waited // 1_000_000)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 64, 64, 64, 64]
    hanging.fails = False
    assert store.prepare_load(bytes(32)) is None
    hanging.fails = True
    with pytest.raises(StoreError, match="out of order"):
        store.prepare_load(bytes(32))
    assert store.is_open, "one success forgives"
    hanging.fails = False
    store.close()
