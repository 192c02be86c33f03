"""A notice that shows a governed engine that the cache layer beside it seals everything it keeps.

    notice = SealNotice(salts_path, shred, port)      # in the cache layer, as long as it lives
    is_sealing(salts_path, shred, port)               # in the engine, on the same machine

1. A notice is a file beside the one of salts, locked by the process that seals: it says nothing once that has ended,
   however it ended.
2. It is made with the file of shred keys: who does not have that cannot make one. It is of one port of this machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
from pathlib import Path

from kvcustody.errors import ConfigError
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.keys.shred_keys import ShredKeys

_USE = b"kvcustody/v1/seal-notice"
_DIGEST_BYTES = 32


class SealNotice:
    """Held by a process that keeps nothing in clear behind `port`. Raises `ConfigError` where another process
    holds it.
    """

    def __init__(self, salts_path: Path, shred: ShredKeys, port: int) -> None:
        self._path = _path(salts_path, port)
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"setting `scope_salts_path`: `{self._path}` cannot be written beside it ({error.strerror})"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise ConfigError(f"port {port}: another process says that it seals behind it") from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, _digest(shred, port), 0)

    def close(self) -> None:
        """Withdraw the notice."""
        os.close(self._file)


def is_sealing(salts_path: Path, shred: ShredKeys, port: int) -> bool:
    """Whether a living process holds the notice of this port."""
    try:
        file = os.open(_path(salts_path, port), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # it is held
        return hmac.compare_digest(os.pread(file, _DIGEST_BYTES + 1, 0), _digest(shred, port))
    finally:
        os.close(file)
    return False


def _path(salts_path: Path, port: int) -> Path:
    return salts_path.with_name(f"{salts_path.name}.sealing-{port}")


def _digest(shred: ShredKeys, port: int) -> bytes:
    with KeyBuffer() as secret:
        shred.derive(_USE, secret)
        return hashlib.blake2b(str(port).encode(), key=secret.view(), digest_size=_DIGEST_BYTES).digest()
