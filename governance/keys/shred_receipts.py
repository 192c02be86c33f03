"""Receipts of destroyed shred keys, in a file beside the keys': which key, of what kind, when.

1. A receipt is written after its key's record was overwritten and synced, so it never tells of a key that is still
   there. A crash between the two leaves a destroyed key without a receipt.
2. It names nobody: a subject's key is an id of random bytes, a bucket's is that with its classification and end.
3. The newest `RECEIPTS_MAX` are kept, those of buckets leaving first; a torn or changed one is not read.
4. What cannot be written now is written with the next one: that a key ends never waits for its receipt.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from kvcustody.errors import KeyringError
from kvcustody.files import discard_drafts, sync_path, write_file

RECEIPTS_MAX = 65_536
_KINDS = {1: "bucket", 2: "subject"}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_RECORD = struct.Struct("<B 3x I 16s Q Q Q 48s")  # kind, CRC-32, id, created, until, destroyed, label


class DestroyedKey(NamedTuple):
    """One destroyed key; `label` is a bucket's classification. Times are UTC microseconds."""

    id: bytes
    kind: str
    label: str
    created_us: int
    until_us: int
    destroyed_us: int


class ShredReceipts:
    """The receipts beside one file of shred keys. Only the process that has that file locked writes them."""

    def __init__(self, keys: Path) -> None:
        self.path = keys.with_name(keys.name + ".destroyed")
        self._unwritten: list[DestroyedKey] = []

    def add(self, destroyed: list[DestroyedKey]) -> bool:
        """Append and sync; False where that must wait."""
        self._unwritten = [*self._unwritten, *destroyed][-RECEIPTS_MAX:]
        if not self._unwritten:
            return True
        try:
            size = _append(self.path, b"".join(map(_packed, self._unwritten)))
            self._unwritten = []
            if size > 2 * RECEIPTS_MAX * _RECORD.size:
                discard_drafts(self.path)
                write_file(self.path, b"".join(map(_packed, _newest(self.read()))))
        except OSError:
            return False
        return True

    def read(self) -> list[DestroyedKey]:
        """Return every complete receipt, oldest first. Raises `KeyringError` where the file cannot be read."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        except OSError as error:
            why = error.strerror
            raise KeyringError(f"receipts `{self.path}`: cannot be opened ({why})", path=self.path) from None
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
            content = file.read()
        ends = range(_RECORD.size, len(content) + 1, _RECORD.size)
        found = [_unpacked(content[end - _RECORD.size : end]) for end in ends]
        return [one for one in found if one is not None]


def _append(path: Path, records: bytes) -> int:
    """The size of the file with these at its end; what a crash left torn there is cut off first."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        whole = size - size % _RECORD.size
        if whole != size:
            os.ftruncate(descriptor, whole)
        at = whole
        while at < whole + len(records):
            at += os.pwrite(descriptor, records[at - whole :], at)
        os.fsync(descriptor)
        if not size:
            sync_path(path.parent)
        return at
    finally:
        os.close(descriptor)


def _newest(receipts: list[DestroyedKey]) -> list[DestroyedKey]:
    over = max(0, len(receipts) - RECEIPTS_MAX)
    buckets = [one for one in receipts if one.kind == "bucket"]
    gone = {one.id for one in buckets[:over]}
    return [one for one in receipts if one.id not in gone][-RECEIPTS_MAX:]


def _packed(one: DestroyedKey) -> bytes:
    named = one.label.encode()[:48]
    parts = (one.id, one.created_us, one.until_us, one.destroyed_us, named)
    crc = zlib.crc32(_RECORD.pack(_NUMBERS[one.kind], 0, *parts))
    return _RECORD.pack(_NUMBERS[one.kind], crc, *parts)


def _unpacked(record: bytes) -> DestroyedKey | None:
    kind, crc, id_, created_us, until_us, destroyed_us, named = _RECORD.unpack(record)
    parts = (id_, created_us, until_us, destroyed_us, named)
    if kind not in _KINDS or zlib.crc32(_RECORD.pack(kind, 0, *parts)) != crc:
        return None
    label = named.rstrip(b"\0").decode(errors="replace")
    return DestroyedKey(id_, _KINDS[kind], label, created_us, until_us, destroyed_us)
