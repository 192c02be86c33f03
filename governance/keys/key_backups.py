"""Known backups of a key file: how long each is kept, and whether a backup from before a moment can still be opened.

    backups = KeyBackups(path)                   # of the file of keys
    backups.add(made_us, until_us)               # `kvcustody keys backup`
    backups.open_until(before_us, now_us)        # UTC µs: the latest end of those from before; 0: none
    backups.moved(now_us, root)                  # `kvcustody keys rewrap` begins: from now on there is another root key
    backups.end(root)                            # `--end-old`: what this root key alone opens is no backup any more

1. They are listed beside the file of keys (`.backups`). A backup that nobody reported is not known. Only its maker's
   statement shows that a backup is destroyed by its date.
2. A record is appended and synced. A record that a crash cut short does not count, and neither does its backup.
3. Clocks differ by `CLOCKS_DIFFER_US` at most: a backup that seems so much later may be from before.
4. A backup is under the root key that the next move leaves. Between two moves away from one root key, of which the
   first was cut short, a backup may be under both root keys. Then the end of neither root key ends it.
5. Records are only ever appended, so a record added while another root key ends is not lost.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from kvcustody.audit.evidence.query.key_orders import CLOCKS_DIFFER_US
from kvcustody.errors import KeyringError
from kvcustody.files import sync_path

_RECORD = struct.Struct("<QQI")  # when, kept until or (with a mark) a root key's number, CRC-32
_TIMES = struct.Struct("<QQ")
_MOVED, _ENDED = 1 << 63, 1 << 62
_NUMBER = _ENDED - 1


class _Known(NamedTuple):
    """What a file of records says, each in the order of writing."""

    backups: list[tuple[int, int]]  # made, kept until
    moves: list[tuple[int, int]]  # when, away from which root key
    ended: set[int]  # root keys


class KeyBackups:
    """The known backups of one file of keys."""

    def __init__(self, keys: Path) -> None:
        self.path = keys.with_name(keys.name + ".backups")

    def add(self, made_us: int, until_us: int) -> None:
        """Note a backup before it is made. Raises `KeyringError` where that cannot be stored."""
        self._append(made_us, until_us)

    def moved(self, at_us: int, root: bytes) -> None:
        """Note that keys move away from this root key, by its verification key. Raises as `add`."""
        self._append(at_us, _MOVED | _number(root))

    def end(self, root: bytes) -> None:
        """Note that this root key is destroyed: backups that only it opens no longer count (rule 4). Raises as
        `add`.
        """
        if self.path.exists():
            self._append(0, _ENDED | _number(root))

    def _append(self, at_us: int, value: int) -> None:
        record = _TIMES.pack(at_us, value)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o600)
            try:
                torn = os.fstat(descriptor).st_size % _RECORD.size
                os.write(descriptor, bytes(-torn % _RECORD.size) + record + _crc(record))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_path(self.path.parent)
        except OSError as error:
            raise self._failed("cannot be written", error) from None

    def open_until(self, before_us: int, now_us: int) -> int:
        """Return when the last backup from before a moment is destroyed; 0: there is none now.

        Raises `KeyringError` where they cannot be read.
        """
        known = self._read()
        ends = (
            until_us
            for made_us, until_us in known.backups
            if made_us <= before_us + CLOCKS_DIFFER_US and until_us > now_us and not _is_ended(made_us, known)
        )
        return max(ends, default=0)

    def _read(self) -> _Known:
        known = _Known([], [], set())
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return known
        except OSError as error:
            raise self._failed("cannot be read", error) from None
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
            content = file.read()
        for end in range(_RECORD.size, len(content) + 1, _RECORD.size):
            record = content[end - _RECORD.size : end]
            if _crc(record[: _TIMES.size]) != record[_TIMES.size :]:
                continue
            at_us, value = _TIMES.unpack(record[: _TIMES.size])
            if value & _MOVED:
                known.moves.append((at_us, value & _NUMBER))
            elif value & _ENDED:
                known.ended.add(value & _NUMBER)
            else:
                known.backups.append((at_us, value))
        return known

    def _failed(self, what: str, error: OSError) -> KeyringError:
        return KeyringError(f"backups of keys `{self.path}`: {what} ({error.strerror})", path=self.path)


def _is_ended(made_us: int, known: _Known) -> bool:
    """Whether one root key alone opens what was backed up then, and is destroyed (rule 4)."""
    before = next((root for at_us, root in reversed(known.moves) if at_us < made_us), None)
    after = next((root for at_us, root in known.moves if at_us >= made_us), None)
    return after in known.ended and after != before


def _number(root: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(root, digest_size=8).digest(), "little") & _NUMBER


def _crc(record: bytes) -> bytes:
    return zlib.crc32(record).to_bytes(4, "little")
