"""A bounded local file for events while the database is away, or until a signed checkpoint covers them.

1. `append` returned means fsynced; it keeps all of its records or none. Records are compressed together, in frames that
   need no other to be read.
2. A frame is read back only if its length and CRC-32 agree; the tail that a crash tore is counted, and its file kept
   beside the others as `.torn`.
3. The segments together never exceed the limit: past it `append` raises `SpillFullError` and changes nothing.
4. A segment is deleted only after the caller has made all of it durable elsewhere, or is kept as `.kept`; one of which
   a record was refused is set aside as `.refused`. A live process holds a lock on its own, so another never replays it.
5. A live process holds every segment of its own open until it is retired. If its file was removed or replaced, it is
   written again from there before anything is added and before a replay. So data that was called durable does not
   depend on a name that may disappear.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from kvcustody.audit.write.compression import CompressionError, compress, decompress
from kvcustody.errors import LedgerError
from kvcustody.files import private_folder, sync_path

SPILL, KEPT = ".spill", ".kept"
_MAGIC = b"KVCSPILL2\n"
_HEAD = struct.Struct("<II")  # length, CRC-32 of the payload
_FRAME_BYTES, _FRAME_BYTES_MAX = 4 << 20, 64 << 20  # of records: when a frame is full, and what one may hold
_SEGMENT_BYTES = 16 << 20
_RATE_SECONDS = 60


class SpillFullError(LedgerError):
    """The spill cannot take more: its limit is reached or its disk refuses."""

    code = "KVC611"


class SpillSegment:
    """One closed segment, locked while it is read."""

    def __init__(self, path: Path, descriptor: int, held: dict[Path, int] | None = None) -> None:
        self.path = path
        self.torn_bytes = self.read_bytes = 0
        self.refused = 0  # records that could be made durable nowhere else
        self._descriptor = descriptor
        self._held = {} if held is None else held  # the process's own, by their paths

    def records(self) -> Iterator[bytes]:
        """Yield every whole record in order; `torn_bytes` is known at the end."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            size = os.fstat(file.fileno()).st_size
            if file.read(len(_MAGIC)) != _MAGIC:
                self.torn_bytes = size
                return
            while head := file.read(_HEAD.size):
                start = file.tell() - len(head)
                length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
                payload = file.read(length) if length <= size else b""
                whole = length and len(payload) == length and zlib.crc32(payload) == checksum
                try:
                    records = _unpacked(payload) if whole else []
                except CompressionError:
                    whole = False
                if not whole:
                    self.torn_bytes = size - start
                    return
                end = file.tell()
                yield from records
                self.read_bytes = end

    def retire(self, *, keep: bool = False) -> None:
        """Delete the segment, or `keep` it; set it aside as `.torn` or `.refused` if parts of it exist nowhere else."""
        with suppress(FileNotFoundError):  # somebody was quicker; all of it is elsewhere
            if keep and not self.refused:
                with suppress(FileExistsError):  # a process died right here
                    self.path.with_suffix(KEPT).hardlink_to(self.path)
            if self.torn_bytes or self.refused:
                self.path.rename(self.path.with_suffix(".torn" if self.torn_bytes else ".refused"))
            else:
                self.path.unlink()
            sync_path(self.path.parent)
        if self.path in self._held:
            os.close(self._held.pop(self.path))
        self.close()

    def spill_again(self) -> None:
        """Mark a kept segment for being submitted again."""
        self.path.rename(self.path.with_suffix(SPILL))
        sync_path(self.path.parent)
        self.close()

    def close(self) -> None:
        """Release the lock, unless it is the process's own; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SpillFile:
    """Appends records to the process's own segment; lists every segment that may be replayed."""

    def __init__(
        self,
        directory: Path,
        incarnation: str,
        *,
        limit_bytes: int,
        suffix: str = SPILL,
        durable: bool = True,
    ) -> None:
        """Without `durable` what was appended survives the process, and the machine from the next `sync` on."""
        self._directory = directory
        self._stem = incarnation + ("-" if suffix == SPILL else "-k")  # a spill that is kept has its own name
        self._suffix = suffix
        self._durable = durable
        self._unsynced = False
        self._written: tuple[tuple[int, int], ...] = ()  # bytes by the second, of the last minute; read on any thread
        self.limit_bytes = limit_bytes
        self._number = 0
        self._descriptor = -1
        self._path = directory
        self._size = 0
        self._held: dict[Path, int] = {}  # own segments that are closed and not retired (rule 5)
        try:
            private_folder(directory)
        except OSError as problem:
            raise LedgerError(f"spill directory `{directory}`: {problem.strerror}", path=directory) from problem

    def append(self, records: list[bytes]) -> int:
        """Write all records and fsync; return their bytes. Raises `SpillFullError` before writing any."""
        data = b"".join(map(_framed, _packed(records)))
        self._restore()
        if self.bytes() + len(data) > self.limit_bytes:
            raise SpillFullError(f"the spill holds its limit of `{self.limit_bytes}` bytes", limit=self.limit_bytes)
        try:
            self._open()
            self._unsynced = not self._durable
            _write(self._descriptor, data, durable=self._durable)
        except OSError as problem:
            self._undo()
            raise SpillFullError(f"spill `{self._directory}`: {problem.strerror}", path=self._directory) from problem
        self._size += len(data)
        now, (last, size) = int(time.monotonic()), self._written[-1] if self._written else (-1, 0)
        before = self._written[:-1] if last == now else self._written
        self._written = (*before[-_RATE_SECONDS:], (now, len(data) + (size if last == now else 0)))
        if self._size >= _SEGMENT_BYTES:
            self.rotate()
        return len(data)

    def bytes(self) -> int:
        """Return the bytes of all segments in the directory."""
        return sum(size for size in map(_size, self._directory.glob("*" + self._suffix)) if size > len(_MAGIC))

    def bytes_per_second(self) -> float:
        """Return its growth rate in the last minute; 0.0 if it did not grow."""
        now = int(time.monotonic())
        lately = [(second, size) for second, size in self._written if now - second <= _RATE_SECONDS]
        if not lately:
            return 0.0
        return sum(size for _, size in lately) / max(1, now - lately[0][0])

    def sync(self) -> None:
        """Make appended records survive a machine failure too; raises `SpillFullError` if the disk refuses."""
        if not self._unsynced or self._descriptor < 0:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as problem:
            raise SpillFullError(f"spill `{self._directory}`: {problem.strerror}", path=self._directory) from problem
        self._unsynced = False

    def rotate(self) -> Path | None:
        """Close the own segment, if one is open; the next append begins another."""
        if self._descriptor < 0:
            return None
        with suppress(SpillFullError):  # what is not durable is a copy, and its caller asks `sync` itself
            self.sync()
        self._held[self._path] = self._descriptor
        self._descriptor = -1
        return self._path

    def segments(self, *, rotate: bool = True) -> list[SpillSegment]:
        """Close the own segment and lock every one that no other live process holds, oldest first.

        Without `rotate` the own one stays open, and is left out.

        Raises `SpillFullError` where one of the own is gone and cannot be written again (rule 5).
        """
        self._restore()
        if rotate:
            self.rotate()
        segments = []
        for path in sorted(self._directory.glob("*" + self._suffix), key=lambda path: (_changed_ns(path), path.name)):
            if path in self._held:
                segments.append(SpillSegment(path, os.dup(self._held[path]), self._held))
                continue
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                continue
            segments.append(SpillSegment(path, descriptor))
        return segments

    def forget(self, path: Path) -> None:
        """Stop holding a closed segment that was deleted or renamed."""
        if path in self._held:
            os.close(self._held.pop(path))

    def close(self) -> None:
        """Release the own segments; the next append begins another."""
        for descriptor in (self._descriptor, *self._held.values()):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = -1
        self._held.clear()

    def _restore(self) -> None:
        """Write own segments again whose files are not in their places any more (rule 5)."""
        own = {**self._held, self._path: self._descriptor} if self._descriptor >= 0 else self._held
        for path, descriptor in [pair for pair in own.items() if not _is(*pair)]:
            try:
                private_folder(self._directory)
                next_path = self._next()
                again = _make(next_path, os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            except OSError as problem:
                raise SpillFullError(
                    f"spill `{path}` was removed and cannot be written again: {problem.strerror}", path=path
                ) from problem
            os.close(descriptor)
            if descriptor == self._descriptor:
                self._path, self._descriptor = next_path, again
            else:
                del self._held[path]
                self._held[next_path] = again

    def _open(self) -> None:
        if self._descriptor < 0:
            self._path = self._next()
            self._descriptor, self._size = _make(self._path, _MAGIC), len(_MAGIC)

    def _next(self) -> Path:
        """Where the next segment goes."""
        self._number += 1
        return self._directory / f"{self._stem}{self._number:06d}{self._suffix}"

    def _undo(self) -> None:
        """Take back a part that was written; a segment without a record goes, so that retries leave no files."""
        if self._descriptor < 0:
            return
        try:
            if self._size > len(_MAGIC):
                os.ftruncate(self._descriptor, self._size)
                return
            self._path.unlink()
            os.close(self._descriptor)
        except OSError:  # the next append begins another segment: nothing is ever written behind a torn part
            self._held[self._path] = self._descriptor
        self._descriptor = -1


def lock_worker_name(directory: Path, worker: str) -> int:
    """Hold a worker's name on this machine for the life of the process: one process at a time."""
    path = directory / f"worker-{quote(worker, safe='')}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as problem:
        raise LedgerError(f"spill directory `{directory}`: {problem.strerror}", path=directory) from problem
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(descriptor)
        raise LedgerError(f"worker `{worker}` is already running", worker=worker) from problem
    return descriptor


def _make(path: Path, data: bytes) -> int:
    """Return a new file that holds `data`, durable and locked; None if that fails."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _write(descriptor, data)
        sync_path(path.parent)
    except OSError:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)
        raise
    return descriptor


def _packed(records: list[bytes]) -> Iterator[bytes]:
    """Records as frames; none of them has a line's end in it."""
    frame: list[bytes] = []
    size = 0
    for record in records:
        frame.append(record)
        size += len(record)
        if size >= _FRAME_BYTES:
            yield compress(b"\n".join(frame))
            frame, size = [], 0
    if frame:
        yield compress(b"\n".join(frame))


def _framed(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _unpacked(payload: bytes) -> list[bytes]:
    return decompress(payload, bytes_max=_FRAME_BYTES_MAX).split(b"\n")


def _write(descriptor: int, data: bytes, *, durable: bool = True) -> None:
    """Append all of it, fsynced where it is to be durable."""
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    if durable:
        os.fsync(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    """Return whether the path is the open file's."""
    try:
        there = path.stat()
    except OSError:
        return False
    held = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
