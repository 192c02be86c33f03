"""Two servers' adapters over one real store, with LMCache's own keys and objects: who finds what another stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcustody.governance.erasure.selector import Selector
from standins.engines.lmcache.chunk_world import ChunkWorld, chunk, content, key
from standins.governance.store_servers import StoreServer, ValkeyServer, servers
from standins.waiting import until

SIZE = 2 * 2 * 4 * 64 * 32
MINE = [chunk(n + 1) for n in range(3)]
Made = Callable[[str], ChunkWorld]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    for server in servers(tmp_path_factory):
        made: StoreServer = server("valkey")
        assert isinstance(made, ValkeyServer)
        yield made


@pytest.fixture
def server(tmp_path: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """`server(worker)`: the adapter of one LMCache server more, on the same keys and store."""
    worlds: list[ChunkWorld] = []

    def of(worker: str) -> ChunkWorld:
        url = f"valkey://127.0.0.1:{valkey.port}/0/{tmp_path.name}"
        worlds.append(ChunkWorld(tmp_path, monkeypatch, url=url, worker=worker))
        return worlds[-1]

    yield of
    for one in worlds:
        one.close()


def brought(world: ChunkWorld, salt: str, **part: int | str) -> int:
    """How many of the chunks come, each with its content; a look-up finds no others."""
    keys = [key(n, salt, **part) for n in range(3)]  # type: ignore[arg-type]
    found, come = world.found(keys), world.load(keys)
    assert found == [one is not None for one in come]
    assert all(one is None or content(one) == content(mine) for one, mine in zip(come, MINE, strict=True))
    return sum(found)


def test_another_server_brings_back_what_one_stored_and_nobody_else_does(server: Made) -> None:
    """Bound to the domain with its weights, and to the model's name, part and layer group; also after a restart."""
    first, second = server("lmcache-1"), server("lmcache-2")
    salt = first.salt("acme")
    assert second.salt("acme") == salt
    assert first.store([key(n, salt) for n in range(3)], MINE) == 3 * SIZE
    assert brought(second, salt) == 3
    for other in (
        first.salt("beta"),
        first.salt("acme", "other"),
        first.salt("acme", model=bytes([1]) * 32),
        "ab" * 32,
    ):
        assert brought(second, other) == 0
    for part in ({"model": "tiny2"}, {"rank": 1}, {"group": 1}):
        assert brought(second, salt, **part) == 0
    second.adapter.close()
    again = server("lmcache-2")
    assert brought(again, salt) == 3, "after a restart"


def test_one_server_alone_has_custody(server: Made) -> None:
    """What another has stored counts as kept, is no copy here, and a delete here ends nothing there."""
    first, second = server("lmcache-1"), server("lmcache-2")
    salt = first.salt("acme")
    keys = [key(n, salt) for n in range(3)]
    assert first.store(keys, MINE) == 3 * SIZE
    assert second.store(keys, MINE) == 3 * SIZE and second.adapter.report_status()["refused"] == {}

    def copies(world: ChunkWorld) -> int:
        return world.adapter.custody.run(lambda chunks: len(chunks.tiers[0])).result(20)

    assert (copies(first), copies(second)) == (3, 0)
    second.adapter.delete(keys)
    assert brought(first, salt) == 3
    first.adapter.delete(keys[1:])
    assert brought(first, salt) == 1 == copies(first)
    assert until(lambda: brought(second, salt) == 1)
    scans = [
        world.adapter.custody.run(lambda chunks: chunks.worker.recover().findings).result(20)
        for world in (first, second)
    ]
    assert scans == [(), ()]


def test_an_erasure_ends_it_for_both(server: Made) -> None:
    first, second = server("lmcache-1"), server("lmcache-2")
    ada, bob = first.salt("acme", "ada"), first.salt("acme", "bob")
    for salt in (ada, bob):
        first.store([key(n, salt) for n in range(3)], MINE)
        assert brought(second, salt) == 3
    first.adapter.custody.run(
        lambda chunks: chunks.governor.call(lambda mine: mine.erase(Selector("acme", "ada", None)))
    ).result(20).result(20)
    of_ada = [key(n, ada) for n in range(3)]
    for world in (first, second):
        assert until(lambda world=world: not any(world.found(of_ada)))  # type: ignore[misc]
        assert brought(world, ada) == 0
    assert brought(first, bob) == 3 == brought(second, bob)


def test_a_store_that_is_killed_gives_misses(tmp_path: Path, server: Made, valkey: ValkeyServer) -> None:
    first, second = server("lmcache-1"), server("lmcache-2")
    salt = first.salt("acme")
    first.store([key(n, salt) for n in range(3)], MINE)
    assert brought(second, salt) == 3
    valkey.kill()
    try:
        for world in (first, second):
            assert world.load([key(n, salt) for n in range(3)]) == [None] * 3
            assert world.store([key(7, salt)], [chunk(7)]) == 0
            assert world.adapter.report_status()["is_healthy"]
    finally:
        valkey.start()
    third = server("lmcache-3")
    assert brought(third, salt) == 0 and third.store([key(7, salt)], [chunk(7)]) == SIZE
