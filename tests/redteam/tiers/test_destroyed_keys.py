"""E5: after the key of a tenant, a subject or a time bucket is destroyed, no copy of what needs it opens anywhere.

Whoever kept every ciphertext puts each back under its name: in the store of the running process, and in the folder
before the next start. A second process reads this one's memory for what was destroyed and what was made of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.tiers import seal_keys
from standins.governance.memory_scan import copies
from standins.governance.sealed_objects import World
from standins.governance.tier_place import Place
from standins.redteam.hostile_store import put
from standins.redteam.key_ends import ENDS

End = Callable[[Place, DomainLabel], None]


@pytest.fixture(params=["host", "nvme"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, request.param, capacity=64 << 20)
    yield made
    made.tier.close()
    made.staging.close()
    made.world.close()


def stocked(place: Place, label: DomainLabel, objects: int) -> dict[bytes, bytes]:
    """The ciphertext of every object that was kept of this domain."""
    for number in range(objects):
        assert place.keep(label, f"p{number}", 4) == 4
    held = {one.name: place.store.peek(one.name, one.size) for one in place.store.page(b"", 1 << 20)}
    assert len(held) == objects and None not in held.values()
    return {name: data for name, data in held.items() if data is not None}


def opened(place: Place, label: DomainLabel, objects: int) -> int:
    return sum(place.bring(label, f"p{number}", 4) > 0 for number in range(objects))


def with_books_of_before(place: Place, act: Callable[[], None]) -> None:
    """`act`, after which the tier's index is as it was: what it would look for still."""
    index, owners, domains = (
        place.tier._index.rows,
        list(place.tier._index.owners),
        dict(place.tier._index.domains),
    )
    shreds = list(place.tier._index.shreds), dict(place.tier._index.shred_numbers)
    rows = [(name, index.row(row)) for name, row in index.names()]
    act()
    place.tier._index.owners[:], place.tier._index.domains = owners, domains
    place.tier._index.shreds, place.tier._index.shred_numbers = list(shreds[0]), dict(shreds[1])
    for name, row in rows:
        if place.tier._index.rows.find(name) < 0:
            place.tier._index.rows.add(name, row)


@pytest.mark.parametrize("objects", [40, pytest.param(5_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("end", ENDS)
def test_none_of_them_opens_again(place: Place, end: str, objects: int) -> None:
    """Neither as it is found by the tier, nor with the tier's books of before put back, too."""
    label = place.label("acme", "ada")
    held = stocked(place, label, objects)
    assert opened(place, label, objects) == objects, "void: they do not open before"
    with_books_of_before(place, lambda: ENDS[end](place, label))
    for name, data in held.items():
        put(place.store, name, data)
    assert len(place.tier) == objects and opened(place, label, objects) == 0


def test_with_their_keys_they_would(place: Place) -> None:
    """The control: the same without a key's destruction. All come back."""
    label = place.label("acme", "ada")
    held = stocked(place, label, 40)
    with_books_of_before(place, lambda: place.tier.destroy(list(held)) and None)
    for name, data in held.items():
        put(place.store, name, data)
    assert opened(place, label, 40) == 40


@pytest.mark.parametrize("end", [*ENDS, None])
def test_nor_after_a_restart_over_a_folder_that_was_put_back(tmp_path: Path, end: str | None) -> None:
    """With a key file of the time after, whatever the folder is. Without an end they come back: the control."""
    place, objects = Place(tmp_path, "nvme"), 20
    label = place.label("acme", "ada")
    held = stocked(place, label, objects)
    if end is not None:
        ENDS[end](place, label)
        assert len(place.tier.objects()) == 0
    place.store.close()  # type: ignore[attr-defined]
    for name, data in held.items():
        path = tmp_path / "tier" / name.hex()[:2] / name.hex()
        path.write_bytes(data)
    place.world.close()
    place.world.open()
    place.open()
    assert opened(place, label, objects) == (objects if end is None else 0)
    place.tier.close()
    place.staging.close()
    place.world.close()


# -- the memory of the process that used them --------------------------------------------------------------------------

CHILD = """
import gc, sys
from pathlib import Path
from standins.redteam.key_ends import ENDS
from standins.governance.tier_place import Place
place = Place(Path(sys.argv[1]), sys.argv[2])
label = place.label("acme", "ada")
for number in range(20):
    assert place.keep(label, f"p{number}", 4) == 4 == place.bring(label, f"p{number}", 4)
print("used", flush=True)
sys.stdin.readline()
ENDS[sys.argv[3]](place, label)
print("destroyed", flush=True)
sys.stdin.readline()
"""


def secrets_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the process has in use: each part, and the key that is made of all."""
    world, object_keys = World(folder), list[bytes]()
    label = world.spec("acme", "ada")
    shreds = {key.kind: key.id for key in world.shred.living()}
    real = seal_keys.ExtendedNonceKey

    def seen(key: KeyBuffer) -> object:
        object_keys.append(bytes(key.view()))
        return real(key)

    with monkeypatch.context() as patch:
        patch.setattr(seal_keys, "ExtendedNonceKey", seen)
        world.keys.of(label, shreds["subject"], shreds["bucket"])
    found = {kind: bytes(world.shred.secret(id_).view()) for kind, id_ in shreds.items()}
    found["tenant"] = bytes(world.keyring._secret(label.owner, 1).view())
    found["object's key"] = object_keys[0]
    world.close()
    return found


@pytest.mark.system("a copy of a destroyed key stays in memory")
@pytest.mark.parametrize("end", ENDS)
def test_no_copy_of_it_is_left_in_memory(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier has stored and restored under it; the scan finds each secret before, so it would after."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), "host", end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdin is not None and child.stdout is not None
    with child:
        assert child.stdout.readline() == b"used\n"
        secrets = secrets_of(tmp_path, monkeypatch)
        before = {name: copies(child.pid, secret) for name, secret in secrets.items()}
        assert before[end] >= 1 and before["object's key"] >= 1, f"void: not found before: {before}"
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"destroyed\n"
        after = {name: copies(child.pid, secrets[name]) for name in (end, "object's key")}
        child.stdin.write(b"\n")
        child.stdin.flush()
    assert after == {end: 0, "object's key": 0}, before
