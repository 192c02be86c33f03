"""What is destroyed stays on file by its random id: which, when; and what lives is told without any secret."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import KeyringError
from kvcustody.governance.keys import shred_keys, shred_receipts
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.shred_keys import ShredKeys, read_shred_keys, rewrap_shred_keys
from kvcustody.governance.keys.shred_receipts import DestroyedKey, ShredReceipts

MINUTE = 60_000_000
SUBJECTS = [hashlib.sha256(bytes([at])).digest() for at in range(100)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shred.keys"


@pytest.fixture
def keys(path: Path) -> Iterator[ShredKeys]:
    made = opened(path)
    yield made
    made.close()


def root(secret: bytes) -> RootKeyWrapping:
    key = KeyBuffer()
    key.take(secret.ljust(32, b"\0"))
    return RootKeyWrapping(key)


def opened(path: Path, secret: bytes = b"root") -> ShredKeys:
    return ShredKeys.open(path, root(secret), VirtualClock())


def test_a_destroyed_key_is_told_by_its_id_and_a_living_one_is_not(keys: ShredKeys, path: Path) -> None:
    ada, bob = keys.of_subject(SUBJECTS[0]), keys.of_subject(SUBJECTS[1])
    bucket = keys.of_bucket("internal", MINUTE, MINUTE)
    assert ShredReceipts(path).read() == []
    receipt = keys.destroy(ada.id)
    (due,) = keys.destroy_due(MINUTE)
    told = ShredReceipts(path).read()
    assert told == [
        DestroyedKey(ada.id, "subject", "", ada.created_us, 0, receipt.utc_us),
        DestroyedKey(bucket.id, "bucket", "internal", bucket.created_us, MINUTE, due.utc_us),
    ]
    assert bob.id not in {one.id for one in told}
    assert keys.living() == [bob] == read_shred_keys(path)


def test_receipts_name_nobody(keys: ShredKeys, path: Path) -> None:
    """Neither a subject nor what the file of keys calls it: who has both files cannot tell whose key is gone."""
    ada = keys.of_subject(b"idp\0acme\0ada")
    keys.destroy(ada.id)
    held = ShredReceipts(path).path.read_bytes()
    assert ada.id in held
    assert ada.label.encode() not in held and bytes.fromhex(ada.label) not in held and b"acme" not in held
    assert ShredReceipts(path).path.stat().st_mode & 0o077 == 0


def test_a_receipt_comes_after_the_end_that_it_tells_of(
    keys: ShredKeys, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is written, the key's record is blank already; the control is the record of another."""
    ada, bob = keys.of_subject(SUBJECTS[0]), keys.of_subject(SUBJECTS[1])
    seen: list[bytes] = []
    real = shred_receipts._append

    def append(file: Path, records: bytes) -> int:
        seen.append(path.read_bytes())
        return real(file, records)

    monkeypatch.setattr(shred_receipts, "_append", append)
    keys.destroy(ada.id)
    assert ada.id not in seen[0] and bob.id in seen[0]


def test_what_cannot_be_written_comes_with_the_next_one(
    keys: ShredKeys, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk keeps no key alive."""
    ids = [keys.of_subject(subject).id for subject in SUBJECTS[:3]]

    def full(file: Path, records: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shred_receipts, "_append", full)
        keys.destroy(ids[0])
        keys.destroy(ids[1])
    assert read_shred_keys(path) == keys.living() and len(keys.living()) == 1
    assert ShredReceipts(path).read() == []
    keys.destroy(ids[2])
    assert [one.id for one in ShredReceipts(path).read()] == ids


def test_a_torn_or_changed_receipt_is_not_read(keys: ShredKeys, path: Path) -> None:
    ids = [keys.of_subject(subject).id for subject in SUBJECTS[:4]]
    for id_ in ids[:3]:
        keys.destroy(id_)
    file = ShredReceipts(path).path
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # in the second
    file.write_bytes(bytes(content) + b"torn")
    assert [one.id for one in ShredReceipts(path).read()] == [ids[0], ids[2]]
    keys.destroy(ids[3])
    assert [one.id for one in ShredReceipts(path).read()] == [ids[0], ids[2], ids[3]]


def test_the_newest_are_kept_and_buckets_leave_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shred_receipts, "RECEIPTS_MAX", 8)
    receipts = ShredReceipts(path)
    written = [
        DestroyedKey(bytes([at]) * 16, "subject" if at % 6 == 0 else "bucket", "low", at + 1, at + 2, at + 3)
        for at in range(17)
    ]
    for one in written:
        assert receipts.add([one])
    left = receipts.read()
    assert [one for one in left if one.kind == "subject"] == [one for one in written if one.kind == "subject"]
    assert len(left) == 8 and [one for one in left if one.kind == "bucket"] == written[11:12] + written[13:17]


def test_another_process_reads_what_lives_without_a_root_key(keys: ShredKeys, path: Path) -> None:
    for subject in SUBJECTS:
        keys.of_subject(subject)
    keys.of_bucket("internal", MINUTE, MINUTE)
    before = path.read_bytes()
    assert read_shred_keys(path) == keys.living() and len(keys.living()) == len(SUBJECTS) + 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("what", ["other", "open", "link", "absent"])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, path: Path, what: str) -> None:
    opened(path).close()
    if what == "other":
        path.write_bytes(b"something else".ljust(512, b"."))
    elif what == "open":
        path.chmod(0o644)
    elif what == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
    with pytest.raises(KeyringError, match="shred keys"):
        read_shred_keys(path)
    assert what != "absent" or not path.exists()


def test_under_another_root_key_each_is_as_it_was(path: Path) -> None:
    """And the old root key opens none of them any more."""
    old, new = root(b"old"), root(b"new")
    keys = opened(path, b"old")
    subjects_by_id = {keys.of_subject(subject).id: subject for subject in SUBJECTS[:70]}
    gone = keys.of_subject(SUBJECTS[99])
    keys.destroy(gone.id)
    secrets = {id_: bytes(keys.secret(id_).view()) for id_ in subjects_by_id}
    keys.close()
    assert rewrap_shred_keys(path, old, new) == 71, "with the naming secret"
    again = opened(path, b"new")
    assert {id_: bytes(again.secret(id_).view()) for id_ in subjects_by_id} == secrets
    assert all(again.of_subject(subject).id == id_ for id_, subject in subjects_by_id.items())
    assert not again.is_living(gone.id)
    again.close()
    late = opened(path, b"old")
    with pytest.raises(KeyringError):
        late.secret(next(iter(subjects_by_id)))
    late.close()
    assert rewrap_shred_keys(path, old, new) == 0, "again changes nothing"
    before = path.read_bytes()
    with pytest.raises(KeyringError):
        rewrap_shred_keys(path, root(b"other"), root(b"third"))
    assert path.read_bytes() == before


def test_the_replaced_file_is_blanked(path: Path) -> None:
    keys = opened(path, b"old")
    id_ = keys.of_subject(SUBJECTS[0]).id
    keys.close()
    with path.open("rb") as before:
        assert id_ in before.read()
        rewrap_shred_keys(path, root(b"old"), root(b"new"))
        before.seek(0)
        assert before.read().strip(b"\0") == b"" and os.fstat(before.fileno()).st_nlink == 0
    assert shred_keys.read_shred_keys(path)[0].id == id_
