"""A bounded local file for events while the database is away.

F1 `append` returned means fsynced; it keeps all of its records or none. F2 A record is read back only if
its length and CRC-32 agree; the tail that a crash tore is counted, and its file kept beside the others as
`.torn`.
F3 The segments together never exceed the limit: past it `append` raises `SpillFullError` and changes
nothing.
F4 A segment is deleted only after the caller has made all of it durable elsewhere; a live process holds a
lock on its own, so another never replays it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvcustody.errors import LedgerError

_MAGIC = b"KVCSPILL1\n"
_HEAD = struct.Struct("<II")  # length, CRC-32 of the payload


class SpillFullError(LedgerError):
    """The spill cannot take more: its limit is reached or its disk refuses."""

    code = "KVC611"


class Segment:
    """One closed segment, locked while it is read."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.torn_bytes = 0
        self._descriptor = descriptor

    def records(self) -> Iterator[bytes]:
        """Every whole record in order; `torn_bytes` is known when the iterator ends."""
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(_MAGIC)) != _MAGIC:
                self.torn_bytes = size
                return
            while head := file.read(_HEAD.size):
                start = file.tell() - len(head)
                length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
                payload = file.read(length) if length <= size else b""
                if not length or len(payload) != length or zlib.crc32(payload) != checksum:
                    self.torn_bytes = size - start
                    return
                yield payload

    def retire(self) -> None:
        """Delete the segment, or set it aside as `.torn` where part of it could not be read."""
        if self.torn_bytes:
            self.path.rename(self.path.with_suffix(".torn"))
        else:
            self.path.unlink()
        sync_directory(self.path.parent)
        self.close()

    def close(self) -> None:
        """Let go of the lock; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Spill:
    """Appends records to the process's own segment; lists every segment that may be replayed."""

    def __init__(self, directory: Path, incarnation: str, *, limit_bytes: int) -> None:
        self._directory = directory
        self._incarnation = incarnation
        self._limit_bytes = limit_bytes
        self._number = 0
        self._descriptor = -1
        self._path = directory
        self._size = 0
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as problem:
            raise LedgerError(
                f"spill directory `{directory}`: {problem.strerror}", path=directory
            ) from problem

    def append(self, records: list[bytes]) -> None:
        """Write all records and fsync; raises `SpillFullError` having written none."""
        data = b"".join(_HEAD.pack(len(record), zlib.crc32(record)) + record for record in records)
        if self.bytes() + len(data) > self._limit_bytes:
            raise SpillFullError(
                f"the spill holds its limit of `{self._limit_bytes}` bytes", limit=self._limit_bytes
            )
        try:
            self._open()
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            os.fsync(self._descriptor)
        except OSError as problem:
            self._undo()
            raise SpillFullError(
                f"spill `{self._directory}`: {problem.strerror}", path=self._directory
            ) from problem
        self._size += len(data)

    def bytes(self) -> int:
        """What all segments of the directory take together."""
        return sum(size for size in map(_size, self._directory.glob("*.spill")) if size > len(_MAGIC))

    def segments(self) -> list[Segment]:
        """Close the own segment and lock every one that no other live process holds, oldest first."""
        self.close()
        found = []
        for path in sorted(
            self._directory.glob("*.spill"), key=lambda path: (path.stat().st_mtime_ns, path.name)
        ):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                continue
            found.append(Segment(path, descriptor))
        return found

    def close(self) -> None:
        """Close the own segment; the next append begins another."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        if self._descriptor >= 0:
            return
        self._number += 1
        self._path = self._directory / f"{self._incarnation}-{self._number:06d}.spill"
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._size = 0
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.write(self._descriptor, _MAGIC)
        self._size = len(_MAGIC)
        sync_directory(self._directory)

    def _undo(self) -> None:
        """Take back a part that was written; a segment without a record goes, so that retries leave no files."""
        if self._descriptor < 0:
            return
        try:
            if self._size > len(_MAGIC):
                os.ftruncate(self._descriptor, self._size)
                return
            self._path.unlink()
        except OSError:
            pass  # the next append begins another segment: nothing is ever written behind a torn part
        self.close()


def sync_directory(directory: Path) -> None:
    """Make a creation, rename or deletion in the directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
