"""A tier in Mooncake Store, with its real master: what is stored comes back to who has the keys, and ends by them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcustody.errors import ConfigError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.heirs import TierHolder
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.mooncake_client import MooncakeClient, MooncakePlace
from kvcustody.governance.tiers.stores.remote_store import ENVELOPE_BYTES, RemoteStore
from standins.engines.mooncake.store_world import Client, Master
from standins.governance.tier_place import ABSOLUTE_US, Place


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """With one process that gives it memory."""
    made = Master(tmp_path_factory.mktemp("master"), None)
    with Client(made, "default") as memory:
        assert memory.setup == 0
        yield made
    made.close()


class InMooncake(Place):
    """A worker's tier in the store."""

    def __init__(self, folder: Path, master: Master, worker: str, prefix: str, *heir_of: str) -> None:
        self.master = master
        holder = TierHolder(worker, "default", f"{worker}-1")
        super().__init__(folder, "remote", worker=worker, prefix=prefix, holder=holder, heir_of=heir_of)

    def made(self) -> RemoteStore:
        where = MooncakePlace(self.master.address, self.master.http, self.prefix)
        client = MooncakeClient(where, buffer_bytes=16 << 20, seconds=5)
        return RemoteStore(
            client,
            worker=self.worker,
            capacity_bytes=self.capacity,
            object_bytes_max=1 << 20,
            in_flight=2,
            heir_of=self.heir_of,
            utc_us=self.world.clock.utc_us,
        )

    def close(self) -> None:
        self.tier.close()
        self.staging.close()
        self.world.close()


@pytest.fixture
def place(tmp_path: Path, master: Master) -> Iterator[InMooncake]:
    made = InMooncake(tmp_path, master, "a", tmp_path.name)
    yield made
    made.close()


def test_the_first_writer_wins_and_what_is_listed_is_there(place: InMooncake) -> None:
    """Mooncake itself answers 0 to both puts."""
    store = place.store
    name, other = bytes(range(32)), bytes(range(1, 33))
    for key, data in ((name, os.urandom(5000)), (other, os.urandom(100))):
        into = store.prepare_store(key, len(data))
        assert into is not None
        into[:] = data
        assert store.complete_store(key)
        found = store.prepare_load(key)
        assert found == data and store.peek(key, 50) == data[:50]
        del found
        store.complete_load(key)
    into = store.prepare_store(name, 9)
    assert into is not None
    into[:] = b"another's"
    assert store.complete_store(name) is False
    assert [(one.name, one.size) for one in store.page(b"", 9)] == [(name, 5000), (other, 100)]
    assert [one.name for one in store.page(name, 9)] == [other]
    assert store.delete([name, bytes(32)])[:4] == (1, 5000, (bytes(32),), ())
    assert store.prepare_load(name) is None and [one.name for one in store.page(b"", 9)] == [other]
    store.delete([other])


def test_another_worker_has_own_hits_and_nobody_else(place: InMooncake, tmp_path: Path, master: Master) -> None:
    b = InMooncake(tmp_path, master, "b", place.prefix)
    acme = place.label("acme")
    assert b.label("acme").tenant == "acme" and place.keep(acme, "p", 8) == 8 == place.bring(acme, "p", 8)
    assert b.bring(acme, "p", 8) == 8
    assert b.bring(b.label("beta"), "p", 8) == 0 == b.bring(b.label("acme", "ada"), "p", 8)
    assert b.keep(acme, "p", 8) == 0 and len(b.tier) == 0
    b.close()
    place.tier.close()
    place.open()
    assert place.tier.found_at_start == 2 and place.bring(acme, "p", 8) == 8, "after a restart"
    (tmp_path / "elsewhere").mkdir()
    stranger = InMooncake(tmp_path / "elsewhere", master, "c", place.prefix)
    assert stranger.bring(stranger.label("acme"), "p", 8) == 0
    stranger.close()
    place.tier.erase("e", Selector("acme"), 0)


def test_the_first_heir_of_a_dead_worker_has_its_copies(place: InMooncake, tmp_path: Path, master: Master) -> None:
    acme = place.label("acme")
    assert place.keep(acme, "p", 8) == 8
    place.store.close()  # as one that is killed: it does not say that it stopped
    heir, late = (InMooncake(tmp_path, master, worker, place.prefix, "a") for worker in ("b", "c"))
    assert (heir.tier.found_at_start, late.tier.found_at_start) == (2, 0)
    assert heir.bring(acme, "p", 8) == 8 == late.bring(acme, "p", 8)
    place.open()
    assert place.tier.found_at_start == 0 and place.bring(acme, "p", 8) == 8, "it begins anew"
    heir.tier.erase("e", Selector("acme"), 0)
    assert len(heir.tier.objects()) == 0 == late.bring(acme, "p", 8)
    for one in (heir, late):
        one.close()


def test_a_removal_proves_nothing_and_a_key_s_end_does(place: InMooncake) -> None:
    """Evicted: gone from the listing, no evidence until its bucket's key ends. Erased: by the subject's key at once."""
    acme, ada = place.label("acme"), place.label("acme", "ada")
    assert place.keep(acme, "p", 4) == 4 == place.keep(ada, "q", 4)
    place.tier.end_tenant("acme")
    assert place.tier.objects() == {} and place.ends() == ["evicted", "evicted"]
    assert [one.cause for one in place.events() if one.step == "destroyed"] == []
    assert place.keep(ada, "r", 4) == 4
    assert place.tier.erase("e", Selector("acme", "ada"), 0).done
    evidence = [(one.cause, one.number) for one in place.events() if one.step == "destroyed"]
    assert sorted(evidence) == [("key-destroyed", number) for number in (1, 2, 3)]
    assert place.keep(acme, "s", 4) == 4 and place.tier.end_tenant("acme") == 1
    assert len([one for one in place.events() if one.step == "destroyed"]) == 3
    place.world.clock.advance(2 * ABSOLUTE_US)
    place.tier.expire()
    assert {one.number for one in place.events() if one.step == "destroyed"} == {1, 2, 3, 4}


def test_what_others_put_in_its_place_is_not_attached(place: InMooncake, master: Master) -> None:
    """Nobody authenticates to Mooncake: whoever reaches it replaces objects. Control: the object itself comes."""
    acme = place.label("acme")
    assert place.keep(acme, "p", 4) == 4 == place.bring(acme, "p", 4)
    [name] = place.tier.objects()
    key = f"{place.prefix}/objects/{name.hex()}"
    with Client(master, "default") as somebody:
        assert somebody("is_exist", key) == 1, "void: it is another's name"
        for data in ("x" * ENVELOPE_BYTES, "x" * 3000):
            assert somebody("remove", key, True) == 0 and somebody("put", key, data) == 0
            assert place.bring(acme, "p", 4) == 0
            place.world.clock.advance(2_000_000)
            place.orphans(repair=True)
            assert place.keep(acme, "p", 4) == 4 == place.bring(acme, "p", 4)
    place.tier.erase("e", Selector("acme"), 0)


def test_a_master_that_lost_its_memory(tmp_path: Path) -> None:
    """Killed, and with it all that it knew: misses, and lost copies end with their keys."""
    folder = tmp_path / "master"
    folder.mkdir()
    master = Master(folder, None)
    with Client(master, "default") as memory:
        assert memory.setup == 0
        place = InMooncake(tmp_path, master, "a", "lost")
        acme = place.label("acme")
        assert place.keep(acme, "p", 8) == 8 == place.bring(acme, "p", 8)
        master.close()
        guarded = GuardedStore(place.store, seconds=0.2, clock=place.world.clock)
        place.tier._index.store = guarded
        for _ in range(5):
            assert place.bring(acme, "p", 8) == 0 and place.keep(acme, "q", 4) == 0
        assert guarded.late + guarded.refused > 0
        place.world.clock.advance(2 * ABSOLUTE_US)
        place.tier.expire()
        ended = {one.number for one in place.events() if one.step == "ended"}
        assert ended == {one.number for one in place.seen if one.step == "destroyed"} and len(ended) == 2
        place.staging.close()
        place.world.close()


def test_a_master_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the master does not answer"):
        MooncakeClient(MooncakePlace("127.0.0.1:9", "http://127.0.0.1:9"), buffer_bytes=1 << 20, seconds=1)
