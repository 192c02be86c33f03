"""Backups of a file of keys that somebody told of: until when each is kept, and whether one from before a moment opens.

    backups = KeyBackups(path)                   # of the file of keys
    backups.add(made_us, until_us)               # `kvcustody keys backup`
    backups.open_until(before_us, now_us)        # UTC µs: the latest end of those from before; 0: none
    backups.end_all()                            # `kvcustody keys rewrap --end-old`: none from before opens any more

1. They stand beside the file of keys (`.backups`). A backup that nobody told of is not known. That one is gone by its
   date is the word of who made it.
2. A record is appended and synced, or torn by a crash: then it is none, and so is the backup.
3. Clocks differ by `CLOCKS_DIFFER_US` at most: a backup that seems so much later may be from before.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from kvcustody.audit.evidence.query.key_orders import CLOCKS_DIFFER_US
from kvcustody.errors import KeyringError
from kvcustody.files import sync_path

_RECORD = struct.Struct("<QQI")  # made, kept until, CRC-32
_TIMES = struct.Struct("<QQ")
_BYTES_MAX = 1 << 20


class KeyBackups:
    """The known backups of one file of keys."""

    def __init__(self, keys: Path) -> None:
        self.path = keys.with_name(keys.name + ".backups")

    def add(self, made_us: int, until_us: int) -> None:
        """Tell of one, before it is made. Raises `KeyringError` where that cannot be kept."""
        times = _TIMES.pack(made_us, until_us)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o600)
            try:
                torn = os.fstat(descriptor).st_size % _RECORD.size
                os.write(descriptor, bytes(-torn % _RECORD.size) + times + _crc(times))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_path(self.path.parent)
        except OSError as error:
            raise self._failed("cannot be written", error) from None

    def open_until(self, before_us: int, now_us: int) -> int:
        """When the last of those that were made before a moment is gone; 0: none of them is there now.

        Raises `KeyringError` where they cannot be read.
        """
        ends = (until_us for made_us, until_us in self._read() if made_us <= before_us + CLOCKS_DIFFER_US)
        return max((until_us for until_us in ends if until_us > now_us), default=0)

    def end_all(self) -> None:
        """What wrapped the keys before is destroyed: no backup that is known opens."""
        try:
            self.path.unlink(missing_ok=True)
            sync_path(self.path.parent)
        except OSError as error:
            raise self._failed("cannot be removed", error) from None

    def _read(self) -> list[tuple[int, int]]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("cannot be read", error) from None
        try:
            content = os.read(descriptor, _BYTES_MAX)
        finally:
            os.close(descriptor)
        records = (
            content[end - _RECORD.size : end] for end in range(_RECORD.size, len(content) + 1, _RECORD.size)
        )
        return [
            _TIMES.unpack(record[: _TIMES.size])
            for record in records
            if _crc(record[: _TIMES.size]) == record[_TIMES.size :]
        ]

    def _failed(self, what: str, error: OSError) -> KeyringError:
        return KeyringError(f"backups of keys `{self.path}`: {what} ({error.strerror})", path=self.path)


def _crc(times: bytes) -> bytes:
    return zlib.crc32(times).to_bytes(4, "little")
