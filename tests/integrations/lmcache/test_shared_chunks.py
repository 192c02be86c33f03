"""Chunks of two servers in one real store, without LMCache: look-ups, custody and ends as its adapter asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcustody.governance.settings import load_settings
from kvcustody.integrations.lmcache.custody_thread import Chunks, CustodyThread, kept_shape
from standins.governance.store_servers import VALKEY, StoreServer, ValkeyServer, servers
from standins.integrations.chunk_site import CHUNK_BYTES, CHUNK_TOKENS, Chunk, ChunkSite

CONTENT = memoryview(bytes(range(256)) * (CHUNK_BYTES // 256))
Opened = Callable[[str], Callable[[Callable[[Chunks], Any]], Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], StoreServer]]:
    yield from servers(tmp_path_factory)


@pytest.fixture
def worker(tmp_path: Path, server: Callable[[str], StoreServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """`worker(name)`: what has a call done by one more server's worker; `worker.site` tells salts."""
    there = server(VALKEY)
    assert isinstance(there, ValkeyServer)
    closing: list[Callable[[], None]] = []

    def of(name: str) -> Callable[[Callable[[Chunks], Any]], Any]:
        url = f"valkey://127.0.0.1:{there.port}/0/{tmp_path.name}"
        site = ChunkSite(tmp_path, monkeypatch, url=url, worker=name)
        thread = CustodyThread(load_settings())
        closing.extend((site.close, thread.close))
        thread.open(CHUNK_BYTES, CHUNK_TOKENS)

        def done(call: Callable[[Chunks], Any]) -> Any:
            return thread.run(call).result(20)

        done(lambda chunks: None)  # it is open before the next one is
        done.salt = site.salt  # type: ignore[attr-defined]
        return done

    yield of
    for close in reversed(closing):
        close()


def loads(chunks: Chunks, named: Chunk) -> bool:
    into = memoryview(bytearray(CHUNK_BYTES))
    is_there = chunks.load(named, into)
    assert bytes(into) == (bytes(CONTENT) if is_there else bytes(CHUNK_BYTES))
    return is_there


def test_what_one_stored_another_has_and_its_owner_alone_ends(worker: Opened) -> None:
    first, second = worker("lmcache-1"), worker("lmcache-2")
    mine, theirs = (Chunk(bytes(32), first.salt(tenant)) for tenant in ("acme", "beta"))  # type: ignore[attr-defined]
    assert not second(lambda chunks: chunks.has(mine)), "control"
    assert first(lambda chunks: chunks.store(mine, CONTENT))
    assert second(lambda chunks: chunks.store(mine, CONTENT)), "it is there: nothing has to be kept again"
    assert second(lambda chunks: loads(chunks, mine)) and not second(lambda chunks: loads(chunks, theirs))
    assert [one(lambda chunks: len(chunks.tiers[0])) for one in (first, second)] == [1, 0]
    assert second(lambda chunks: chunks.forget(mine))
    assert not second(lambda chunks: chunks.has(mine, seeks=False)), "no more than its own view of it"
    assert first(lambda chunks: loads(chunks, mine) and chunks.forget(mine))
    assert not first(lambda chunks: loads(chunks, mine)) and not second(lambda chunks: loads(chunks, mine))
    assert kept_shape(load_settings()) is not None, "the next start knows how large objects are"


def test_a_store_is_asked_no_further_than_to_the_first_chunk_that_nobody_has(worker: Opened) -> None:
    """Each part of the model for itself; what this worker stored behind a hole it finds."""
    first, second = worker("lmcache-1"), worker("lmcache-2")
    salt = first.salt("acme")  # type: ignore[attr-defined]
    parts = [[Chunk(bytes([n]) * 32, salt, kv_rank=rank) for n in range(6)] for rank in (0, 1)]
    for kept in (parts[0][0], parts[0][3], parts[1][0], parts[1][1]):
        assert first(lambda chunks, kept=kept: chunks.store(kept, CONTENT))  # type: ignore[misc]
    assert second(lambda chunks: chunks.store(parts[0][5], CONTENT))
    before = second(lambda chunks: chunks.tiers[0].sought)
    found = second(lambda chunks: chunks.has_each([*parts[0], *parts[1]]))
    assert found == [True, False, False, False, False, True, True, True, False, False, False, False]
    assert second(lambda chunks: chunks.tiers[0].sought) - before == 5


@pytest.mark.system
def test_the_next_chunks_are_on_their_way_while_one_is_opened(worker: Opened, monkeypatch: Any) -> None:
    """Whatever each holds; of what is not there nothing comes, and nothing stays on its way."""
    first, second = worker("lmcache-1"), worker("lmcache-2")
    salt = first.salt("acme")  # type: ignore[attr-defined]
    named = [Chunk(bytes([n]) * 32, salt) for n in range(24)]
    contents = [memoryview(bytes([n]) * CHUNK_BYTES) for n in range(24)]
    for one, content in zip(named, contents, strict=True):
        assert one is named[11] or first(lambda chunks, of=(one, content): chunks.store(*of))  # type: ignore[misc]
    into = [memoryview(bytearray(CHUNK_BYTES)) for _ in named]
    ahead: list[int] = []

    def load(chunks: Chunks) -> list[bool]:
        [tier] = chunks.tiers
        started = tier._index.store._loading  # type: ignore[attr-defined]
        loads = tier.load
        monkeypatch.setattr(tier, "load", lambda *of: (ahead.append(len(started)), loads(*of))[1])
        came = chunks.load_each(list(zip(named, into, strict=True)))
        assert not started
        return came

    assert second(load) == [one is not named[11] for one in named]
    assert [bytes(one) for one in into] == [
        bytes(CHUNK_BYTES) if at == 11 else bytes(content) for at, content in enumerate(contents)
    ]
    assert max(ahead) == 8 and ahead[-1] == 1, "as many as the setting says, and no more than are wanted"
