"""A store that hangs, fails, or comes back: who asks waits no longer than the deadline, and nothing wrong is found."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import DeviceError, StoreError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.copies.index import PublishedRun
from kvcustody.governance.tiers.stores import file_store
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.tier import SealedTier
from standins.governance.tier_place import Place, keys_of

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
        return super().complete_store(name)

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
    terms = made.tier._index.terms
    made.tier = SealedTier(made.store, made.world.keys, made.world.shred, made.staging, made.world.clock, terms)
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
    assert len(store.page(b"", 9)) == 1, "void: nothing came of it"
    assert place.tier.lookup(acme, keys_of("p", 4), 0) == []
    place.tier.expire()
    assert len(store.page(b"", 9)) == 0 == len(place.tier.objects())
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
            with pytest.raises(StoreError, match="is paused"):
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


def bring_three(place: Place, begun: threading.Event) -> int:
    """Bring three objects back; the first waits on its way to the device until the second is being read."""
    acme, keys = place.label("acme"), keys_of("p", 12)
    objects = place.tier.lookup(acme, keys, 0)

    def write(first: int, count: int, skip: int, data: memoryview) -> None:
        if not first:
            assert begun.wait(10), "the next is not read while this one is opened"

    return sum(one.blocks for one in place.tier.load(acme, keys, 0, objects, write))


def test_one_is_written_while_the_next_is_sealed(
    place: Place, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second leaves the device only when the store is asked to complete the first."""
    acme, writing, complete = place.label("acme"), threading.Event(), HostArena.complete_store

    def told(name: bytes) -> bool:
        writing.set()
        return complete(hanging, name)

    monkeypatch.setattr(hanging, "complete_store", told)
    now_us = place.world.clock.now_us()
    run = PublishedRun(acme, keys_of("p", 12), bytes(32), 0, now_us, now_us + 10**6, now_us + 10**6)

    def read(first: int, count: int, into: memoryview) -> None:
        assert not first or writing.wait(10), "the first is not written while the next is sealed"
        into[:] = bytes(len(into))

    assert isinstance(place.store, GuardedStore)
    place.store._seconds = 20
    assert place.tier.store(run, read) == 12 and len(place.tier) == 3
    place.tier.close()


def test_nobody_waits_for_what_stands_behind_a_write_that_is_late(place: Place, hanging: Hanging) -> None:
    """The next was given to the store before the one before it was late: one deadline, and neither is a copy."""
    acme, store = place.label("acme"), place.store
    assert isinstance(store, GuardedStore)
    store._seconds, store.prepares_in_memory = 1.0, True
    hanging.hangs = {"complete_store"}
    began = time.monotonic()
    assert place.keep(acme, "p", 12) == 0 and len(place.tier) == 0
    assert time.monotonic() - began < 1.8, "a second deadline was waited for"
    assert hanging.asked == 1 and store.late == 2, "void: the second was not given to it"
    hanging.free.set()
    hanging.hangs = set()
    answered(store)
    place.tier.expire()
    assert hanging.used_bytes == 0, "what came of them ends"
    place.tier.close()


def test_memory_that_is_had_too_late_is_given_back(
    place: Place, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme, store, prepare = place.label("acme"), place.store, HostArena.prepare_store

    def slow(name: bytes, size: int, until_us: int) -> memoryview | None:
        assert hanging.free.wait(30)
        return prepare(hanging, name, size, until_us)

    monkeypatch.setattr(hanging, "prepare_store", slow)
    assert isinstance(store, GuardedStore)
    assert place.keep(acme, "p", 4) == 0 and store.late == 1
    hanging.free.set()
    answered(store)
    store.page(b"", 1)  # behind everything that the thread was asked
    assert hanging.used_bytes == 0 and not hanging._prepared
    place.tier.close()


def test_memory_for_the_next_is_had_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is being written counts: no more is prepared than there is room for."""
    files, free, writing = FileStore(tmp_path / "tier", 3000), threading.Event(), threading.Event()

    def slow(descriptor: int, data: memoryview) -> None:
        writing.set()
        assert free.wait(10)
        os.write(descriptor, data)

    monkeypatch.setattr(file_store, "_write_all", slow)
    store = GuardedStore(files, seconds=20, clock=VirtualClock())
    first, second, third = (bytes([at]) * 32 for at in range(3))
    assert store.prepare_store(first, 1000) is not None
    store.start_store(first)
    assert writing.wait(10)
    assert store.prepare_store(second, 1000) is not None and store.used_bytes == 2000
    assert store.prepare_store(third, 1001) is None
    free.set()
    store.complete_store(first)
    store.abandon_store(second)
    assert store.used_bytes == 1000
    store.close()


def test_one_is_read_while_the_one_before_is_opened(
    place: Place, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.keep(place.label("acme"), "p", 12) == 12
    begun, calls, prepare = threading.Event(), list[bytes](), HostArena.prepare_load

    def told(name: bytes) -> memoryview | None:
        calls.append(name)
        if len(calls) == 2:
            begun.set()
        return prepare(hanging, name)

    monkeypatch.setattr(hanging, "prepare_load", told)
    assert bring_three(place, begun) == 12 and len(calls) == len(set(calls)) == 3
    assert place.tier.erase("e", Selector("acme"), 0).done and hanging.used_bytes == 0
    place.tier.close()


def test_what_is_read_ahead_and_not_wanted_is_let_go(
    place: Place, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first does not open, or the device fails: the second, which the thread has, holds no memory afterwards."""
    acme = place.label("acme")
    assert place.keep(acme, "p", 12) == 12
    objects = place.tier.lookup(acme, keys_of("p", 12), 0)

    def fails(*_: object) -> None:
        raise DeviceError("gone")

    with pytest.raises(DeviceError):
        place.tier.load(acme, keys_of("p", 12), 0, objects, fails)
    hanging._view[hanging._placed[objects[0].name].start + 100] ^= 1
    assert place.bring(acme, "p", 12) == 0 and place.ends() == ["broken"]
    assert place.bring(acme, "p", 12, 4) == 8
    assert place.tier.erase("e", Selector("acme"), 0).done
    assert isinstance(place.store, GuardedStore)
    place.store.page(b"", 1)  # behind everything that the thread was asked
    assert hanging.used_bytes == 0 and not hanging._loading
    place.tier.close()


def test_a_write_that_fails_late_is_no_copy(place: Place, hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was sealed, and the next with it; the store says only then that it has no room for the first."""
    acme, complete, first = place.label("acme"), HostArena.complete_store, list[bytes]()

    def once(name: bytes) -> bool:
        first.append(name)
        if len(first) == 1:
            raise StoreError("is full")
        return complete(hanging, name)

    monkeypatch.setattr(hanging, "complete_store", once)
    assert place.keep(acme, "p", 12) == 8 and len(place.tier) == 2
    assert place.bring(acme, "p", 12) == 0 and place.bring(acme, "p", 12, 4) == 8
    assert place.tier.counts.refused == 1 and first[0] not in place.tier.objects()
    place.tier.close()
