"""Shred keys: random secrets that many sealed objects depend on; destroying one ends them all at once.

    keys = ShredKeys.open(path, wrapping, clock)
    bucket = keys.of_bucket("internal", ceiling_us, width_us)      # the time bucket in which a ceiling falls
    subject = keys.of_subject(whose)
    receipt = keys.destroy(subject.id)

1. Each is random, stored wrapped, in a file of fixed records apart from the tiers; in memory only in a `KeyBuffer`.
2. Destroying one overwrites its record in place and syncs it before the receipt is made. Another process that has the
   file open sees it with its next use; its buffer is wiped then. A forked child opens the file for itself.
3. A record that a crash cut short has no key: it is free, and so is one that was being destroyed.
4. Whose a key is stands in the file as a digest under a secret of the file's own: who reads it cannot try names.
5. A destroyed id never comes back: ids are random, and a subject or bucket that is asked for again gets a new key.
6. What was destroyed is told in a file beside this one (`shred_receipts`); what lives by `read_shred_keys`, which needs
   no root key and sees no secret.
7. What somebody cuts off the file is destroyed, and a file without its header gets no further key until it is opened
   again. Neither ends whoever has it open.
8. A key that a receipt names and that is there when the file is opened was put back by a copy of the file. It is
   destroyed again before anything else is read from it, and `returned` counts it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from kvcustody.clock import Clock
from kvcustody.errors import KeyringError, ReturnedKeysError
from kvcustody.files import discard_drafts, sync_path, write_file
from kvcustody.governance.identity.domain_spec import KeyOwner
from kvcustody.governance.keys.locked_buffer import KeyBuffer, derive
from kvcustody.governance.keys.root_key_wrapping import WRAPPED_BYTES, WrappingPort
from kvcustody.governance.keys.shred_receipts import DestroyedKey, ShredReceipts
from kvcustody.logger import get_logger

_log = get_logger(__name__)

ID_BYTES = 16
_MAGIC = b"kvcustody/shred@1".ljust(32, b"\0")
_HEADER_BYTES = 256
_RECORD_BYTES = 256
_CHANGES_AT = 64  # eight bytes of the header: how often a record was written
_GROWTH = 64  # records that are added together
_CUT = -2  # in place of a number of changes: the file has no header any more
_BUCKET, _SUBJECT, _NAMING = 1, 2, 3
_NAMES = {_BUCKET: "bucket", _SUBJECT: "subject", _NAMING: "naming"}
_OF_FILE = bytes(32)  # whose the secret is under which the file names
_RECORD = struct.Struct(
    f"<B 3x I {ID_BYTES}s 32s Q Q {WRAPPED_BYTES}s 48s"
)  # kind, CRC-32, id, whose, times, key, label
_ID_AT = 8  # in a record, behind kind and checksum
_LABEL_BYTES = 48
_OF_TENANT = "@"  # in a subject's label, between the subject's digest and its tenant's
_KNOWN_MAX = 4096  # names of buckets and subjects that are not digested again
_DERIVATION_SALT = b"kvcustody/v1/shred/derived-key"


class ShredKey(NamedTuple):
    """One living shred key. `until_us`: the end of a bucket's key (UTC); 0: a subject's, which ends with its erasure.

    `label`: a bucket's classification; of a subject's key digests of the subject and of its tenant, joined by `@`.
    """

    id: bytes
    kind: str
    label: str
    created_us: int
    until_us: int


class ShredReceipt(NamedTuple):
    """A shred key was destroyed at `utc_us`: its record is overwritten and synced, and its buffers are wiped."""

    key: ShredKey
    utc_us: int
    buffers_wiped: int

    @property
    def destroyed(self) -> DestroyedKey:
        """What stays on file: for a subject's key only its id."""
        id_, kind, label, created_us, until_us = self.key
        named = label if kind == _NAMES[_BUCKET] else ""
        return DestroyedKey(id_, kind, named, created_us, until_us, self.utc_us)


class ShredKeys:
    """The shred keys of one deployment. Safe for threads, and for processes that share the file."""

    def __init__(self, path: Path, descriptor: int, port: WrappingPort, clock: Clock) -> None:
        self.path = path
        self._file = descriptor
        self._port = port
        self._clock = clock
        self._lock = threading.RLock()
        self._slots: dict[bytes, int] = {}  # of living keys, by id
        self._ids: dict[tuple[int, bytes], bytes] = {}  # by kind and whose
        self._free: list[int] = []
        self._secrets: dict[bytes, KeyBuffer] = {}
        self._known: dict[tuple[int, bytes], ShredKey] = {}  # by kind and name
        self._known_at = -1  # how often a record had been written by then
        self._changes, self._size = -1, 0  # of the file, when it was read
        self._receipts = ShredReceipts(path)
        self.returned = self._destroy_returned()

    @classmethod
    def open(cls, path: Path, port: WrappingPort, clock: Clock) -> Self:
        """Open the file, and create it if absent. Raises `KeyringError` where others may read or write it."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                _prepare(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise KeyringError(f"shred keys `{path}`: cannot be opened ({error.strerror})", path=path) from None
        return cls(path, descriptor, port, clock)

    # -- whose ----------------------------------------------------------------------------------------------------

    def of_bucket(self, classification: str, ceiling_us: int, width_us: int) -> ShredKey:
        """Return the key of the bucket that contains `ceiling_us`, created on first use. It may be destroyed once the
        bucket ends.
        """
        until_us = -(-ceiling_us // width_us) * width_us
        return self._named(_BUCKET, f"{classification}\0{until_us}".encode(), classification, until_us)

    def of_subject(self, subject: bytes, tenant: str = "") -> ShredKey:
        """Return the key of the subject with this unique name in bytes, created on first use.

        Its label says whose tenant's it is, so that an erasure of the tenant finds it (`of_tenant`).
        """
        return self._named(_SUBJECT, subject, tenant)

    def find_subject(self, subject: bytes) -> ShredKey | None:
        """Return a subject's key, or None without one."""
        whose = self._digest(subject)
        with self._shared():
            id_ = self._ids.get((_SUBJECT, whose))
            return None if id_ is None else self._key(id_)

    def of_tenant(self, tenant: str) -> list[ShredKey]:
        """Return every living key of the tenant's subjects, and those of unknown tenants, which may be the tenant's."""
        subjects = [key for key in self.living() if key.kind == _NAMES[_SUBJECT]]
        mine = self._tenant_label(tenant)
        return [key for key in subjects if key.label.partition(_OF_TENANT)[2] in (mine, "")]

    def pseudonym(self, name: bytes) -> bytes:
        """Return 16 bytes that replace a name in what these keys' holders write; the same in every process."""
        return self._digest(b"pseudonym\0" + name)[:ID_BYTES]

    def derive(self, info: bytes, into: KeyBuffer) -> None:
        """Derive a key from the file's own secret, for what its holders write about their contents. The caller wipes
        it.
        """
        derive(self._naming(), salt=_DERIVATION_SALT, info=info, into=into)

    def _named(self, kind: int, name: bytes, of: str = "", until_us: int = 0) -> ShredKey:
        """The key with this name, which is looked for once while no record changes: an object needs two.

        `of`: a bucket's classification, a subject's tenant.
        """
        changes = self.changes()
        if changes == self._known_at:
            known = self._known.get((kind, name))
            if known is not None:
                return known
        whose = self._digest(name)
        key = self._of(kind, whose, of if kind == _BUCKET else self._subject_label(whose, of), until_us)
        with self._lock:
            if changes != self._known_at or len(self._known) >= _KNOWN_MAX:
                self._known, self._known_at = {}, changes
            if self.changes() == changes:  # else it may be gone again
                self._known[kind, name] = key
        return key

    def _tenant_label(self, tenant: str) -> str:
        return self.pseudonym(tenant.encode()).hex()[:16]

    def _subject_label(self, whose: bytes, tenant: str) -> str:
        label = whose.hex()[:16]
        return f"{label}{_OF_TENANT}{self._tenant_label(tenant)}" if tenant else label

    def _digest(self, whose: bytes) -> bytes:
        return hashlib.blake2b(whose, key=self._naming().view(), digest_size=32).digest()

    def _naming(self) -> KeyBuffer:
        return self.secret(self._of(_NAMING, _OF_FILE, "", 0).id)

    def _of(self, kind: int, whose: bytes, label: str, until_us: int) -> ShredKey:
        with self._lock:
            id_ = self._ids.get((kind, whose))
            if id_ is not None and self._is_there(id_):
                return self._key(id_)
            with self._shared():
                id_ = self._ids.get((kind, whose))
                if id_ is None:
                    id_ = self._make(kind, whose, label, until_us)
                return self._key(id_)

    def _make(self, kind: int, whose: bytes, label: str, until_us: int) -> bytes:
        if self._changes == _CUT:
            raise KeyringError(
                f"shred keys `{self.path}`: is shorter than before; its keys are lost, and it gets no key before a "
                "restart",
                path=self.path,
            )
        if not self._free:
            self._grow()
        slot, id_ = self._free.pop(), os.urandom(ID_BYTES)
        with KeyBuffer.random() as secret:
            wrapped = self._port.wrap(secret, owner=_owner(kind, whose), epoch=1)
        created_us = self._clock.utc_us()
        named = label.encode()[:_LABEL_BYTES]
        body = _RECORD.pack(kind, 0, id_, whose, created_us, until_us, wrapped, named)
        body = _RECORD.pack(kind, zlib.crc32(body), id_, whose, created_us, until_us, wrapped, named)
        self._write(slot, body)
        self._slots[id_], self._ids[kind, whose] = slot, id_
        return id_

    # -- use ------------------------------------------------------------------------------------------------------

    def secret(self, id_: bytes) -> KeyBuffer:
        """Return the secret of a living key, for a library call that does not keep it. Raises `KeyringError`."""
        with self._lock:
            if not self._is_there(id_):
                with self._shared():
                    if id_ not in self._slots:
                        raise KeyringError(f"shred key `{id_.hex()}`: does not exist or is destroyed")
            secret = self._secrets.get(id_)
            if secret is None or not secret.filled:
                kind, _, _, whose, _, _, wrapped, _ = self._record(self._slots[id_])
                secret = self._port.unwrap(wrapped, owner=_owner(kind, whose), epoch=1)
                self._secrets[id_] = secret
            return secret

    def is_living(self, id_: bytes) -> bool:
        """Whether the key still exists, here or in another process that has the file."""
        with self._lock:
            if self._is_there(id_):
                return True
            with self._shared():
                return id_ in self._slots

    def changes(self) -> int:
        """A number that rises whenever any process creates or destroys a key; caches of keys compare it."""
        found = os.pread(self._file, 8, _CHANGES_AT)
        return int.from_bytes(found, "little") if len(found) == 8 else _CUT

    def living(self) -> list[ShredKey]:
        """Every living key, buckets first, by their end."""
        with self._shared():
            keys = [self._key(id_) for id_ in self._slots]
        keys = [key for key in keys if key.kind != _NAMES[_NAMING]]
        return sorted(keys, key=_order)

    # -- ends -----------------------------------------------------------------------------------------------------

    def destroy(self, id_: bytes) -> ShredReceipt:
        """Overwrite the key's record, sync it, wipe its buffer. Raises `KeyringError` where it is destroyed already."""
        with self._shared():
            if id_ not in self._slots:
                raise KeyringError(f"shred key `{id_.hex()}`: does not exist or is destroyed")
            return self._destroy([id_])[0]

    def destroy_due(self, now_us: int) -> list[ShredReceipt]:
        """Destroy every bucket's key whose bucket has ended (UTC)."""
        with self._shared():
            due = [id_ for id_ in self._slots if 0 < self._key(id_).until_us <= now_us]
            return self._destroy(due)

    def _destroy_returned(self) -> int:
        """Rule 8; how many keys."""
        with self._shared():
            gone = {receipt.id for receipt in self._receipts.read()}
            returned = self._destroy([id_ for id_ in self._slots if id_ in gone])
        if returned:
            why = ReturnedKeysError(self.path, len(returned))
            _log.error(why.message, code=why.code, path=str(self.path), keys=len(returned))
        return len(returned)

    def _destroy(self, ids: list[bytes]) -> list[ShredReceipt]:
        receipts = []
        for id_ in ids:
            key, slot = self._key(id_), self._slots.pop(id_)
            kind, _, _, whose, *_ = self._record(slot)
            self._write(slot, b"")
            del self._ids[kind, whose]
            self._free.append(slot)
            receipts.append(ShredReceipt(key, self._clock.utc_us(), self._wipe(id_)))
        self._receipts.add([receipt.destroyed for receipt in receipts])
        return receipts

    def close(self) -> None:
        """Wipe every buffer and close the file."""
        with self._lock:
            for secret in self._secrets.values():
                secret.wipe()
            self._secrets.clear()
            self._known.clear()
            os.close(self._file)

    # -- the file -------------------------------------------------------------------------------------------------

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Alone with the file, and up to date with it."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                self._read()
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> None:
        """Read the file, where it changed since."""
        changes, size = self.changes(), os.fstat(self._file).st_size
        was_cut, self._size = size < self._size, size
        if was_cut:
            _log.error("shred keys were cut off their file", path=str(self.path), bytes=size)
        elif changes == self._changes:
            return
        content = os.pread(self._file, size, 0)
        self._slots, self._ids, self._free, self._changes = {}, {}, [], changes
        for slot in range((len(content) - _HEADER_BYTES) // _RECORD_BYTES):
            kind, crc, id_, whose, *others = _RECORD.unpack_from(content, _at(slot))
            if kind in _NAMES and zlib.crc32(_RECORD.pack(kind, 0, id_, whose, *others)) == crc:
                self._slots[id_], self._ids[kind, whose] = slot, id_
            else:
                self._free.append(slot)
        for id_ in [id_ for id_ in self._secrets if id_ not in self._slots]:
            self._wipe(id_)

    def _write(self, slot: int, body: bytes) -> None:
        """Put a record in its place, synced; whoever else has the file open reads it again."""
        self._changes = (self._changes + 1) % (1 << 64)  # whoever has the file may have written the largest
        try:
            os.pwrite(self._file, self._changes.to_bytes(8, "little"), _CHANGES_AT)
            os.pwrite(self._file, body.ljust(_RECORD_BYTES, b"\0"), _at(slot))
            os.fsync(self._file)
        except OSError as error:
            raise KeyringError(
                f"shred keys `{self.path}`: cannot be written ({error.strerror})", path=self.path
            ) from None

    def _grow(self) -> None:
        have = max(0, os.fstat(self._file).st_size - _HEADER_BYTES) // _RECORD_BYTES
        more = max(_GROWTH, have)
        try:
            _reserve(self._file, _HEADER_BYTES + (have + more) * _RECORD_BYTES)
        except OSError as error:
            raise KeyringError(
                f"shred keys `{self.path}`: no room for another ({error.strerror})", path=self.path
            ) from None
        self._free = list(range(have + more - 1, have - 1, -1))

    def _record(self, slot: int) -> tuple[int, int, bytes, bytes, int, int, bytes, bytes]:
        record = self._bytes(_at(slot), _RECORD.size)
        kind, crc, id_, whose, created_us, until_us, wrapped, label = _RECORD.unpack(record)
        return kind, crc, id_, whose, created_us, until_us, wrapped, label

    def _is_there(self, id_: bytes) -> bool:
        """Whether the record is in its place still: what another process destroyed is not, whatever is known here."""
        slot = self._slots.get(id_)
        if slot is None:
            return False
        return os.pread(self._file, ID_BYTES, _at(slot) + _ID_AT) == id_

    def _bytes(self, at: int, size: int) -> bytes:
        """A part of the file. Raises `KeyringError` where somebody cut it short: a mapping would end the process."""
        found = os.pread(self._file, size, at)
        if len(found) < size:
            raise KeyringError(f"shred keys `{self.path}`: is shorter than before; its keys are lost", path=self.path)
        return found

    def _key(self, id_: bytes) -> ShredKey:
        kind, _, _, _, created_us, until_us, _, label = self._record(self._slots[id_])
        return ShredKey(id_, _NAMES[kind], _text(label), created_us, until_us)

    def _wipe(self, id_: bytes) -> int:
        secret = self._secrets.pop(id_, None)
        if secret is None:
            return 0
        secret.wipe()
        return 1


def read_shred_keys(path: Path) -> list[ShredKey]:
    """Return the living keys of a file, as `ShredKeys.living`. Raises `KeyringError`; the file is only read."""
    content = whole_file(path)
    keys = []
    for slot in range((len(content) - _HEADER_BYTES) // _RECORD_BYTES):
        kind, crc, id_, *others = _RECORD.unpack_from(content, _at(slot))
        if kind in (_BUCKET, _SUBJECT) and zlib.crc32(_RECORD.pack(kind, 0, id_, *others)) == crc:
            _, created_us, until_us, _, label = others
            keys.append(ShredKey(id_, _NAMES[kind], _text(label), created_us, until_us))
    return sorted(keys, key=_order)


def rewrap_shred_keys(path: Path, old: WrappingPort, new: WrappingPort) -> int:
    """Move every key to another root key, in one durable replacement; returns their number. No worker may have the file
    open.

    What is under the new root key already stays as it is, so that a call that was cut short can be made again. Raises
    `KeyringError` for a key that neither opens: nothing was changed then.
    """
    content = bytearray(whole_file(path))
    moved = 0
    for slot in range((len(content) - _HEADER_BYTES) // _RECORD_BYTES):
        kind, crc, id_, whose, created_us, until_us, wrapped, label = _RECORD.unpack_from(content, _at(slot))
        parts = (id_, whose, created_us, until_us)
        if kind not in _NAMES or zlib.crc32(_RECORD.pack(kind, 0, *parts, wrapped, label)) != crc:
            continue
        owner = _owner(kind, whose)
        try:
            secret = old.unwrap(wrapped, owner=owner, epoch=1)
        except KeyringError:
            new.unwrap(wrapped, owner=owner, epoch=1).wipe()
            continue
        with secret:
            again = new.wrap(secret, owner=owner, epoch=1)
        crc = zlib.crc32(_RECORD.pack(kind, 0, *parts, again, label))
        _RECORD.pack_into(content, _at(slot), kind, crc, *parts, again, label)
        moved += 1
    _replace(path, bytes(content))
    return moved


def _replace(path: Path, content: bytes) -> None:
    """The new file in the place of the old one, whose bytes are blanked then."""
    try:
        discard_drafts(path)
        before = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            write_file(path, content)
            os.pwrite(before, bytes(os.fstat(before).st_size), 0)
            os.fsync(before)
        finally:
            os.close(before)
    except OSError as error:
        raise KeyringError(f"shred keys `{path}`: cannot be replaced ({error.strerror})", path=path) from None


def whole_file(path: Path) -> bytes:
    """Return the file's content at a moment when nobody writes it. Raises `KeyringError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KeyringError(f"shred keys `{path}`: cannot be opened ({error.strerror})", path=path) from None
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        _check(path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        content = file.read()
    if content[: len(_MAGIC)] not in (_MAGIC, bytes(len(_MAGIC)), b""):
        raise KeyringError(f"shred keys `{path}`: is not a file of shred keys; give another path", path=path)
    return content


def _check(path: Path, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise KeyringError(f"shred keys `{path}`: is open to others; chmod 600 it, or give another path", path=path)


def _prepare(path: Path, descriptor: int) -> None:
    _check(path, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    begun = os.pread(descriptor, len(_MAGIC), 0)
    if begun in (b"", bytes(len(_MAGIC))):  # new, or its making was cut short
        _reserve(descriptor, _HEADER_BYTES + _GROWTH * _RECORD_BYTES)
        os.pwrite(descriptor, _MAGIC, 0)  # last: a file without it holds no key
        os.fsync(descriptor)
        sync_path(path.parent)
    elif begun != _MAGIC:
        raise KeyringError(f"shred keys `{path}`: is not a file of shred keys; give another path", path=path)
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def _reserve(descriptor: int, size: int) -> None:
    """Give the file that many bytes of the disk: a record is written to room that is there."""
    before = os.fstat(descriptor).st_size
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.ftruncate(descriptor, before)
        raise
    os.fsync(descriptor)


def _order(key: ShredKey) -> tuple[str, int, int, bytes]:
    return key.kind, key.until_us, key.created_us, key.id


def _text(label: bytes) -> str:
    return label.rstrip(b"\0").decode(errors="replace")


def _at(slot: int) -> int:
    return _HEADER_BYTES + slot * _RECORD_BYTES


def _owner(kind: int, whose: bytes) -> KeyOwner:
    return KeyOwner(f"shred-{_NAMES[kind]}", "", whose.hex())
