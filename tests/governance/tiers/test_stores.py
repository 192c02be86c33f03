"""One suite for every store: what was completed comes back whole, what was deleted is nowhere, nothing else changes."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcustody.errors import ConfigError, StoreError
from kvcustody.governance.tiers.stores import file_store
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.stores.node_arenas import MemoryNode, NodeArenas
from kvcustody.governance.tiers.stores.store_protocol import Deleted, Listed, TierStore
from standins.governance.store_servers import KINDS, StoreServer

CAPACITY = 1 << 20
TWO = [MemoryNode(0, frozenset({0}), {0: 10, 1: 21}), MemoryNode(1, frozenset({1}), {0: 21, 1: 10})]
TURNS = cycle((0, 1, 1))  # on which node the caller runs
Open = Callable[[], TierStore]


@pytest.fixture(params=["host", "nodes", "nvme", *KINDS])
def open_store(request: pytest.FixtureRequest, tmp_path: Path, server: Callable[[str], StoreServer]) -> Open:
    if request.param in KINDS:
        return partial(server(request.param).store, tmp_path.name, capacity=CAPACITY)
    if request.param == "host":
        return lambda: HostArena(CAPACITY)
    if request.param == "nodes":
        return lambda: NodeArenas(CAPACITY, TWO, here=lambda _: next(TURNS), prefer=lambda *_: True)
    return lambda: FileStore(tmp_path / "tier", CAPACITY)


@pytest.fixture
def store(open_store: Open) -> Iterator[TierStore]:
    made = open_store()
    yield made
    made.close()


def name(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") * 4


def largest(store: TierStore) -> int:
    """Room in one piece: an object lies on one node."""
    return CAPACITY // (len(store.arenas) if isinstance(store, NodeArenas) else 1)


def put(store: TierStore, key: bytes, data: bytes) -> bool:
    into = store.prepare_store(key, len(data))
    if into is None:
        return False
    into[:] = data
    return store.complete_store(key)


def get(store: TierStore, key: bytes) -> bytes | None:
    found = store.prepare_load(key)
    if found is None:
        return None
    data = bytes(found)
    found.release()
    store.complete_load(key)
    return data


def everything(store: TierStore, limit: int = 7) -> list[Listed]:
    found: list[Listed] = []
    while page := store.page(found[-1].name if found else b"", limit):
        found += page
    return found


def test_what_is_completed_is_there_and_what_is_not_is_not(store: TierStore) -> None:
    data = os.urandom(5000)
    into = store.prepare_store(name(1), 5000)
    assert into is not None and get(store, name(1)) is None
    into[:] = data
    assert get(store, name(1)) is None and everything(store) == []
    store.complete_store(name(1))
    assert get(store, name(1)) == data and everything(store) == [Listed(name(1), 5000)]
    assert store.prepare_store(name(2), 100) is not None
    store.abandon_store(name(2))
    with pytest.raises(StoreError, match="was not prepared"):
        store.complete_store(name(2))
    assert get(store, name(2)) is None and get(store, name(1)) == data


def test_an_object_is_replaced_whole_or_stays(store: TierStore) -> None:
    """Where many share the store the first writer of a name wins, whole."""
    if store.is_shared:
        assert put(store, name(1), b"a" * 9000)
        assert not put(store, name(1), b"b" * 100) and not put(store, name(1), b"c" * 20000)
        assert get(store, name(1)) == b"a" * 9000 and everything(store) == [Listed(name(1), 9000)]
        assert store.used_bytes == 9000
        return
    assert put(store, name(1), b"a" * 9000) and put(store, name(1), b"b" * 100)
    assert get(store, name(1)) == b"b" * 100 and everything(store) == [Listed(name(1), 100)]
    assert put(store, name(1), b"c" * 20000) and get(store, name(1)) == b"c" * 20000


def test_a_delete_says_what_it_did(store: TierStore) -> None:
    assert all(put(store, name(at), bytes([at]) * 1000) for at in range(1, 4))
    assert store.delete([name(1), name(9), name(2)])[:4] == (2, 2000, (name(9),), ())
    assert get(store, name(1)) is None and get(store, name(3)) == b"\x03" * 1000
    assert everything(store) == [Listed(name(3), 1000)]


def test_what_is_read_stays_while_it_is_read(store: TierStore) -> None:
    """Deleted in the meantime, and another stored that needs the room: the reader's bytes do not change."""
    big = largest(store) // 2 + 10_000
    data = os.urandom(big)
    assert put(store, name(1), data)
    reading = store.prepare_load(name(1))
    assert reading is not None
    assert store.delete([name(1)]).objects == 1
    assert get(store, name(1)) is None
    put(store, name(2), os.urandom(big))
    assert reading == data
    reading.release()
    store.complete_load(name(1))
    store.delete([name(2)])
    assert put(store, name(3), os.urandom(big)), "its room is free now"


def test_full_is_no_room_and_changes_nothing(store: TierStore) -> None:
    count = 0
    while put(store, name(count), bytes([count]) * 100_000):
        count += 1
    assert count >= 9 and store.used_bytes <= store.capacity_bytes
    assert all(get(store, name(at)) == bytes([at]) * 100_000 for at in range(count))
    assert store.delete([name(0)]).objects == 1
    assert put(store, name(count), bytes(100_000))


def test_it_is_listed_in_pages_by_name(store: TierStore) -> None:
    keys = [name(at) for at in range(40)]
    assert all(put(store, key, b"x" * 10) for key in keys)
    for limit in (1, 7, 40, 100):
        assert [one.name for one in everything(store, limit)] == sorted(keys)


def test_thousands_of_operations_are_as_a_dictionary_has_them(store: TierStore) -> None:
    drawn, held = random.Random(3), dict[bytes, bytes]()
    for _ in range(150 if store.is_shared else 1500):
        key, what = name(drawn.randrange(60)), drawn.random()
        if what < 0.55:
            data = drawn.randbytes(drawn.choice((1, 100, 4096, 5000, 30_000)))
            if put(store, key, data):
                assert not (store.is_shared and key in held), "the first writer wins"
                held[key] = data
        elif what < 0.8:
            assert get(store, key) == held.get(key)
        else:
            gone = store.delete([key])
            assert gone.objects == (1 if held.pop(key, None) is not None else 0)
    assert {one.name: one.size for one in everything(store)} == {key: len(data) for key, data in held.items()}
    assert all(get(store, key) == data for key, data in held.items())
    store.delete(list(held))
    assert store.used_bytes == 0 and put(store, name(1), bytes(largest(store) - 4096)), "all room is one again"


# -- the host ----------------------------------------------------------------------------------------------------------


def test_what_ends_in_the_host_is_zero() -> None:
    """Deleted, replaced, abandoned and closed: none of it is in the arena. Control: it was."""
    arena = HostArena(CAPACITY)
    mark = b"canary-" * 500
    assert put(arena, name(1), mark) and put(arena, name(2), mark)
    into = arena.prepare_store(name(3), len(mark))
    assert into is not None
    into[:] = mark
    assert bytes(arena._view).count(b"canary-") == 1500, "void: the scan does not find it"
    arena.delete([name(1)])
    arena.abandon_store(name(3))
    assert bytes(arena._view).count(b"canary-") == 500
    put(arena, name(2), b"x")
    assert bytes(arena._view).count(b"canary-") == 0
    put(arena, name(2), mark)
    arena.close()
    assert bytes(arena._view).count(b"canary-") == 0


def test_no_memory_is_said_at_start() -> None:
    with pytest.raises(ConfigError, match="give more"):
        HostArena(100)
    with pytest.raises(ConfigError, match="give less"):
        HostArena(1 << 62)


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_are_there_after_a_restart_and_drafts_are_not(tmp_path: Path) -> None:
    first = FileStore(tmp_path / "tier", CAPACITY)
    data = os.urandom(3000)
    assert put(first, name(1), data)
    first.close()
    draft = tmp_path / "tier" / name(1).hex()[:2] / (name(2).hex() + ".draft")
    draft.write_bytes(b"half")
    again = FileStore(tmp_path / "tier", CAPACITY)
    assert get(again, name(1)) == data and again.used_bytes == 3000 and not draft.exists()
    assert everything(again) == [Listed(name(1), 3000)]
    again.close()


def test_what_somebody_removes_or_cuts_is_a_miss_or_what_is_there(tmp_path: Path) -> None:
    """Cut bytes come back as they are: opening them is what tells."""
    store = FileStore(tmp_path / "tier", CAPACITY)
    assert put(store, name(1), b"x" * 1000) and put(store, name(2), b"y" * 1000)
    files = {number: tmp_path / "tier" / name(number).hex()[:2] / name(number).hex() for number in (1, 2)}
    files[1].unlink()
    os.truncate(files[2], 10)
    assert get(store, name(1)) is None and get(store, name(2)) == b"y" * 10
    os.truncate(files[2], 1 << 40)
    assert len(get(store, name(2)) or b"") == 1001, "of what grew no more is read than shows it"
    assert store.delete([name(1), name(2)]) == Deleted(1, 1000, (name(1),))
    files[2].parent.joinpath(name(2).hex()).symlink_to("/etc/hostname")
    store._sizes[name(2)] = 1
    assert store.prepare_load(name(2)) is None, "no link is followed"
    store.close()


@pytest.mark.parametrize("what", ["link", "pipe", "file"])
@pytest.mark.parametrize("when", ["before the start", "while it runs"])
def test_something_else_in_the_place_of_a_folder_is_a_miss_and_is_found(tmp_path: Path, what: str, when: str) -> None:
    """It refuses no start, holds nobody, hides no other object, and a scan lists and ends it. Control: the object."""
    folder, target = tmp_path / "tier", tmp_path / "elsewhere"
    target.mkdir()
    store = FileStore(folder, CAPACITY)
    lost, other = bytes([0xAB]) * 32, bytes([0xCD]) * 32
    assert put(store, lost, b"x" * 1000) and put(store, other, b"y" * 1000)
    assert get(store, lost) == b"x" * 1000
    if when == "before the start":
        store.close()
    else:
        store._fans.clear()  # it has not been opened yet
    shutil.rmtree(folder / "ab")
    (target / lost.hex()).write_bytes(b"theirs")
    if what == "link":
        (folder / "ab").symlink_to(target)
    elif what == "pipe":
        os.mkfifo(folder / "ab")
    else:
        (folder / "ab").write_bytes(b"a file")
    if when == "before the start":
        store = FileStore(folder, CAPACITY)
    assert get(store, lost) is None and store.peek(lost, 10) is None and get(store, other) == b"y" * 1000
    with pytest.raises(StoreError, match="cannot be written"):
        put(store, lost, b"x")
    [strange] = [one.name for one in everything(store) if one.name != other]
    assert strange[0] == 0xAB
    assert store.delete([strange]).objects == 1 and not os.path.lexists(folder / "ab")
    assert (target / lost.hex()).read_bytes() == b"theirs", "nothing behind a link was touched"
    assert put(store, lost, b"x" * 10) and get(store, lost) == b"x" * 10
    store.close()


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_something_else_in_the_place_of_an_object_is_a_miss(tmp_path: Path, what: str) -> None:
    store = FileStore(tmp_path / "tier", CAPACITY)
    assert put(store, name(1), b"x" * 1000) and get(store, name(1)) == b"x" * 1000
    file = tmp_path / "tier" / name(1).hex()[:2] / name(1).hex()
    file.unlink()
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 1000)
    {"link": lambda: file.symlink_to(secret), "pipe": lambda: os.mkfifo(file), "folder": file.mkdir}[what]()
    assert get(store, name(1)) is None and store.peek(name(1), 10) is None
    store.close()
    again = FileStore(tmp_path / "tier", CAPACITY)
    assert get(again, name(1)) is None
    again.close()


def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files"):
        FileStore(other, CAPACITY)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    link = tmp_path / "link"
    link.symlink_to(other)
    with pytest.raises(ConfigError, match="no link"):
        FileStore(link, CAPACITY)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        FileStore(shared, CAPACITY)
    with pytest.raises(ConfigError, match="give a folder"):
        FileStore(tmp_path / "absent" / "tier", CAPACITY)
    ours = FileStore(tmp_path / "tier", CAPACITY)
    with pytest.raises(ConfigError, match="another process"):
        FileStore(tmp_path / "tier", CAPACITY)
    ours.close()
    FileStore(tmp_path / "tier", CAPACITY).close()


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "tier", CAPACITY)
    assert put(store, name(1), b"old" * 100)
    write = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) < 3000:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:1000])

    monkeypatch.setattr(os, "write", full)
    for key in (name(1), name(2)):
        with pytest.raises(StoreError, match="is full"):
            put(store, key, b"new" * 1500)
    monkeypatch.undo()
    assert get(store, name(1)) == b"old" * 100 and get(store, name(2)) is None
    assert store.used_bytes == 300 and everything(store) == [Listed(name(1), 300)]
    assert not list((tmp_path / "tier").rglob("*.draft"))
    store.close()


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_room_is_asked_for_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    """A disk that is full says so then; a file system that cannot tell is asked once, and written to."""
    store, asked, written = FileStore(tmp_path / "tier", CAPACITY), list[int](), list[int]()

    def fallocate(descriptor: int, mode: int, begin: int, size: int) -> int:
        asked.append(size)
        ctypes.set_errno(failure)
        return -1

    write = os.write
    monkeypatch.setattr(os, "write", lambda *of: written.append(1) or write(*of))
    assert put(store, name(0), b"x" * 5000)
    place = next(file for file in (tmp_path / "tier").rglob("*") if len(file.name) == 64)
    assert place.stat().st_size == 5000 and place.read_bytes() == b"x" * 5000
    monkeypatch.setattr(file_store, "_LIBC", SimpleNamespace(fallocate=fallocate))
    written.clear()
    if failure == errno.ENOSPC:
        for _ in range(2):
            with pytest.raises(StoreError, match="is full"):
                put(store, name(1), b"x" * 5000)
        assert asked == [5000, 5000] and not written and everything(store) == [Listed(name(0), 5000)]
    else:
        assert put(store, name(1), b"x" * 5000) and put(store, name(2), b"y" * 9)
        assert asked == [5000] and get(store, name(2)) == b"y" * 9
    store.close()
