"""Our adapter with LMCache's own keys and objects: whose a chunk is, what rests on disk, when it ends, what is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache.v1.distributed.internal_api import L2AdapterListener

from standins.engines.lmcache.chunk_world import ChunkWorld, chunk, content, key
from standins.integrations import chunk_site
from standins.integrations.chunk_site import POLICY

SIZE = 2 * 2 * 4 * 64 * 32


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChunkWorld]:
    made = ChunkWorld(tmp_path, monkeypatch)
    yield made
    made.close()


def test_what_is_stored_comes_back_and_rests_sealed(world: ChunkWorld) -> None:
    salt = world.salt("acme")
    keys, objects = [key(n, salt) for n in range(4)], [chunk(n + 1) for n in range(4)]
    assert world.store(keys, objects) == 4 * SIZE
    assert world.found([*keys, key(9, salt)]) == [True] * 4 + [False]
    come = world.load(keys)
    assert [content(one) for one in come if one] == [content(one) for one in objects]
    files = world.files()
    assert len(files) == 4
    for one in objects:
        for start in (0, 512, 4096):
            piece = content(one)[start : start + 64]
            assert not any(piece in path.read_bytes() for path in files)
    names = " ".join(path.name for path in files)
    assert salt not in names and "acme" not in names


def test_nobody_else_finds_it(world: ChunkWorld) -> None:
    mine, theirs = world.salt("acme"), world.salt("beta")
    other, forged = world.salt("acme", "other"), "ab" * 32
    assert len({mine, theirs, other}) == 3
    assert world.store([key(1, mine)], [chunk(1)]) == SIZE
    assert world.found([key(1, mine)]) == [True], "control"
    for salt in (theirs, other, forged, ""):
        assert world.found([key(1, salt)]) == [False]
        assert world.load([key(1, salt)]) == [None]
    for moved in (key(2, mine), key(1, mine, model="tiny2"), key(1, mine, rank=1)):
        assert world.load([moved]) == [None]
    assert world.store([key(5, forged), key(5, "")], [chunk(5), chunk(5)]) == 0
    assert world.adapter.report_status()["refused"] == {"unknown salt": 2}


def test_files_that_change_places_are_misses(world: ChunkWorld) -> None:
    salt = world.salt("acme")
    keys = [key(n, salt) for n in range(3)]
    world.store(keys[:2], [chunk(1), chunk(2)])
    first, second = world.files()
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    assert world.load(keys[:2]) == [None, None]
    assert world.found(keys[:2]) == [False, False], "what does not open is ended"
    world.store(keys[2:], [chunk(3)])
    assert world.load(keys[2:]) != [None], "control"


def test_a_copy_ends_at_its_deadline_while_nobody_asks(world: ChunkWorld) -> None:
    short, long = world.salt("brief", classification="brief"), world.salt("acme")
    world.store([key(1, short), key(1, long)], [chunk(1), chunk(2)])
    assert world.found([key(1, short), key(1, long)]) == [True, True]
    time.sleep(3)
    assert len(world.files()) == 1
    assert world.found([key(1, short), key(1, long)]) == [False, True]


def test_what_policy_keeps_on_the_device_is_not_kept(world: ChunkWorld) -> None:
    salt = world.salt("secret", classification="restricted")
    assert world.store([key(1, salt)], [chunk(1)]) == 0
    assert world.files() == []


def test_own_copies_are_found_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ChunkWorld(tmp_path, monkeypatch)
    salt, theirs = first.salt("acme"), first.salt("beta")
    first.store([key(1, salt)], [chunk(1)])
    first.close()
    again = ChunkWorld(tmp_path, monkeypatch)
    try:
        assert again.found([key(1, theirs), key(1, salt)]) == [False, True]
        (come,) = again.load([key(1, salt)])
        assert come is not None and content(come) == content(chunk(1))
    finally:
        again.close()


def test_lmcache_hears_of_what_ended(world: ChunkWorld) -> None:
    class Listener(L2AdapterListener):  # type: ignore[misc]
        def __init__(self) -> None:
            self.stored: list[object] = []
            self.deleted: list[object] = []

        def on_l2_keys_stored(self, keys: list[object], sizes: list[int]) -> None:
            self.stored += keys

        def on_l2_keys_accessed(self, keys: list[object]) -> None:
            pass

        def on_l2_keys_deleted(self, keys: list[object]) -> None:
            self.deleted += keys

    listener = Listener()
    world.adapter.register_listener(listener)
    salt = world.salt("acme")
    keys = [key(n, salt) for n in range(3)]
    world.store(keys, [chunk(n + 1) for n in range(3)])
    assert world.adapter.get_usage().bytes_by_cache_salt == {salt: 3 * SIZE}
    world.adapter.delete(keys[:2])
    assert world.found(keys) == [False, False, True]
    time.sleep(1.1)
    world.store([key(7, salt)], [chunk(7)])
    assert listener.deleted == keys[:2]
    assert world.adapter.get_usage().total_bytes_used == 2 * SIZE


def test_a_tenant_holds_no_more_of_the_tier_than_its_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a tier that has room for ten chunks: two, the ones that it stored last."""
    room = 10 * (SIZE + 4096)
    small = POLICY.replace("  acme: {quota: {guaranteed: 0%, cap: 100%", "  acme: {quota: {guaranteed: 0%, cap: 25%")
    assert small != POLICY
    monkeypatch.setattr(chunk_site, "POLICY", small)
    world = ChunkWorld(tmp_path, monkeypatch, KVCUSTODY_NVME_TIER_BYTES=str(room))
    try:
        mine, theirs = world.salt("acme"), world.salt("beta")
        for number in range(5):
            world.store([key(number, mine)], [chunk(number + 1)])
            world.store([key(number, theirs)], [chunk(number + 1)])
        assert world.found([key(number, mine) for number in range(5)]) == [False] * 3 + [True] * 2
        assert world.found([key(number, theirs) for number in range(5)]) == [True] * 5, "control: no such cap"
        assert len(world.files()) == 7
    finally:
        world.close()
