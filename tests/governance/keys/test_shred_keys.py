"""Shred keys: what is destroyed is nowhere, in no process; what a crash cut short is nobody's."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import KeyringError
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.shred_keys import ShredKeys
from standins.governance.memory_scan import copies

SUBJECTS = [hashlib.sha256(bytes([at])).digest() for at in range(200)]


def opened(path: Path) -> ShredKeys:
    root = KeyBuffer()
    root.take(hashlib.sha256(b"root").digest())
    return ShredKeys.open(path, RootKeyWrapping(root), VirtualClock())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shred.keys"


@pytest.fixture
def keys(path: Path) -> Iterator[ShredKeys]:
    made = opened(path)
    yield made
    made.close()


def test_each_has_a_secret_of_its_own_that_comes_back(keys: ShredKeys, path: Path) -> None:
    """More than the file has room for at first; the same again from a file that is opened anew."""
    made = {subject: keys.of_subject(subject) for subject in SUBJECTS}
    secrets = {id_: bytes(keys.secret(id_).view()) for id_ in (key.id for key in made.values())}
    assert len(set(secrets.values())) == len(SUBJECTS) == len(secrets)
    assert keys.of_subject(SUBJECTS[0]) == made[SUBJECTS[0]]
    again = opened(path)
    assert {key.id for key in again.living()} == secrets.keys()
    assert all(again.secret(id_).view() == secret for id_, secret in secrets.items())
    again.close()


def test_a_bucket_ends_after_all_that_falls_into_it(keys: ShredKeys) -> None:
    early = keys.of_bucket("internal", 60, 60)
    assert early.until_us == 60 and keys.of_bucket("internal", 1, 60) == early
    late, other = keys.of_bucket("internal", 61, 60), keys.of_bucket("public", 60, 60)
    assert len({early.id, late.id, other.id}) == 3 and late.until_us == 120
    subject = keys.of_subject(SUBJECTS[0])
    assert keys.destroy_due(59) == []
    assert {receipt.key.id for receipt in keys.destroy_due(60)} == {early.id, other.id}
    assert {key.id for key in keys.living()} == {late.id, subject.id}


def test_what_is_destroyed_is_not_in_the_file(keys: ShredKeys, path: Path) -> None:
    before = path.read_bytes()
    ada, bob = keys.of_subject(SUBJECTS[0]), keys.of_subject(SUBJECTS[1])
    keys.secret(ada.id)
    held = path.read_bytes()
    assert ada.id in held and SUBJECTS[0] not in held
    receipt = keys.destroy(ada.id)
    assert receipt.key == ada and receipt.buffers_wiped == 1
    left = path.read_bytes()
    assert ada.id not in left and bob.id in left
    at = held.index(ada.id)
    assert left[at : at + 200] == bytes(200) == before[at : at + 200]
    with pytest.raises(KeyringError, match="destroyed"):
        keys.destroy(ada.id)
    with pytest.raises(KeyringError, match="destroyed"):
        keys.secret(ada.id)
    assert keys.find_subject(SUBJECTS[0]) is None and keys.find_subject(SUBJECTS[1]) == bob
    assert keys.of_subject(SUBJECTS[0]).id != ada.id


def test_the_file_names_nobody(keys: ShredKeys, path: Path) -> None:
    """Nor a digest that somebody with a list of names could make: the same name in another file is another digest."""
    name = b"idp\0acme\0ada"
    label = keys.of_subject(name).label
    held = path.read_bytes()
    assert name not in held and b"acme" not in held
    for size in (16, 32, 64):
        assert hashlib.blake2b(name, digest_size=size).digest()[:16] not in held
    other = opened(path.with_name("other.keys"))
    assert other.of_subject(name).label != label and keys.of_subject(name).label == label
    other.close()


def test_another_process_sees_it_with_its_next_use(keys: ShredKeys, path: Path) -> None:
    other = opened(path)
    key = keys.of_subject(SUBJECTS[0])
    assert other.of_subject(SUBJECTS[0]) == key
    held = other.secret(key.id)
    changes = other.changes()
    keys.destroy(key.id)
    assert other.changes() != changes and not other.is_living(key.id)
    with pytest.raises(KeyringError):
        other.secret(key.id)
    assert not held.filled, "its buffer is wiped too"
    new = keys.of_subject(SUBJECTS[0])
    assert other.of_subject(SUBJECTS[0]) == new and other.secret(new.id).view() == keys.secret(new.id).view()
    for subject in SUBJECTS[1:]:
        keys.of_subject(subject)
    assert {one.id for one in other.living()} == {one.id for one in keys.living()}, "the file grew"
    other.close()


CHILD = """
import hashlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_shred_keys import SUBJECTS, opened
keys = opened(Path(sys.argv[1]))
one = keys.of_subject(SUBJECTS[0])
keys.secret(one.id)
print(one.id.hex(), flush=True)
sys.stdin.readline()
keys.destroy(one.id)
print("destroyed", flush=True)
sys.stdin.readline()
"""


def test_no_copy_is_left_in_the_memory_of_the_process_that_used_it(path: Path) -> None:
    """Read from another process: one copy while it lives, in its buffer, and none after."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdin is not None and child.stdout is not None
    with child:
        id_ = bytes.fromhex(child.stdout.readline().decode().strip())
        mine = opened(path)
        secret = bytes(mine.secret(id_).view())
        assert copies(child.pid, secret) == 1, "void: the scan does not find it"
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"destroyed\n"
        assert copies(child.pid, secret) == 0
        mine.close()
        child.stdin.write(b"\n")


@pytest.mark.parametrize("part", [40, 100, 150])
def test_a_record_that_was_cut_short_has_no_key(path: Path, part: int) -> None:
    keys = opened(path)
    ada, bob = keys.of_subject(SUBJECTS[0]), keys.of_subject(SUBJECTS[1])
    keys.close()
    whole = bytearray(path.read_bytes())
    at = whole.index(ada.id) - 8
    whole[at + part : at + 256] = bytes(256 - part)
    path.write_bytes(whole)
    again = opened(path)
    assert [key.id for key in again.living()] == [bob.id]
    assert again.of_subject(SUBJECTS[0]).id != ada.id
    again.close()


def test_a_file_whose_making_was_cut_short_is_made_whole(path: Path) -> None:
    path.touch(mode=0o600)
    with path.open("r+b") as file:
        file.truncate(256 + 64 * 256)
    made = opened(path)
    made.of_subject(SUBJECTS[0])
    assert len(made.living()) == 1
    made.close()


def test_a_file_that_is_not_ours_is_refused(path: Path) -> None:
    path.write_bytes(b"something else")
    path.chmod(0o600)
    with pytest.raises(KeyringError, match="not a file of shred keys"):
        opened(path)
    path.chmod(0o640)
    with pytest.raises(KeyringError, match="chmod 600"):
        opened(path)
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(KeyringError, match="cannot be opened"):
        opened(link)
    with pytest.raises(KeyringError, match="cannot be opened"):
        opened(path.parent / "absent" / "keys")


def test_under_another_root_key_nothing_is_had(keys: ShredKeys, path: Path) -> None:
    key = keys.of_subject(SUBJECTS[0])
    other = ShredKeys.open(path, RootKeyWrapping(KeyBuffer.random()), VirtualClock())
    with pytest.raises(KeyringError, match="does not open"):
        other.secret(key.id)
    other.close()


@pytest.mark.parametrize("size", [0, 100, 256, 300])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_somebody_cuts_short_ends_no_process(path: Path, size: int, mapped: bool) -> None:
    """What it kept is lost, and said so. Control: the same file mapped ends the process that looks at it (SIGBUS)."""
    keys = opened(path)
    made = keys.of_subject(SUBJECTS[0])
    assert keys.is_living(made.id)
    keys.close()
    script = f"""
import mmap, os, sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
from kvcustody.errors import KeyringError
from test_shred_keys import SUBJECTS, opened
path = Path({str(path)!r})
keys = opened(path)
made = keys.of_subject(SUBJECTS[0])
mapped = mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
os.truncate(path, {size})
if {mapped}:
    mapped[4096 * (len(mapped) // 4096) - 1]
lost = 0
for act in (
    keys.changes, keys.living, lambda: keys.secret(made.id), lambda: keys.is_living(made.id),
    lambda: keys.of_subject(SUBJECTS[1]), lambda: keys.destroy(made.id),
):
    try:
        act()
    except KeyringError as error:
        lost += 1
print("ended in order", lost)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    if mapped:
        assert done.returncode == -signal.SIGBUS, done
    else:
        assert done.returncode == 0 and "ended in order" in done.stdout, done.stderr
        assert int(done.stdout.split()[-1]) >= 1, "a cut file is told"
