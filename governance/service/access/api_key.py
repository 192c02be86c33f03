"""The form of an API key, its hash, and a verification that costs the same for every key that does not work.

1. `kvcs_<prefix>_<secret>_<checksum>`: 12 hexadecimal digits to find it by, 256 random bits, and a CRC-32 that
   scanners of source code can check offline. Only an argon2id hash of the whole is stored.
2. A well-formed key that is unknown costs one argon2id verification, as a known one with a wrong secret does.
3. A verified key is remembered for a while under a digest of itself, keyed for this process alone; what its row says
   (revoked, expired, replaced) is read at every request all the same.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.governance.service.access.service_secret import keyed_digest

if TYPE_CHECKING:
    from argon2 import PasswordHasher

MARK = "kvcs"
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_CHARACTERS = 43  # 62**43 > 2**256
_FORM = re.compile(rf"{MARK}_([0-9a-f]{{12}})_([0-9A-Za-z]{{{_SECRET_CHARACTERS}}})_([0-9a-f]{{8}})")
_TIME_COST, _MEMORY_KIB, _LANES = 2, 19_456, 1  # argon2id, as OWASP advises
_CACHED_MAX = 4096
_CACHED_SECONDS = 300.0
_AT_ONCE = 2  # verifications: each takes 19 MiB and a core


class NewKey(NamedTuple):
    """A key that was just made: shown once, and kept nowhere."""

    prefix: str
    key: str
    hash: str


class KeyHasher:
    """Makes keys and verifies them; thread-safe."""

    def __init__(self) -> None:
        self._hasher = _hasher()
        self._unknown = self._hasher.hash(secrets.token_hex(32))  # nobody has the key to this
        self._process_key = secrets.token_bytes(32)
        self._verified: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        self.verifications = 0

    def make(self) -> NewKey:
        """A new random key."""
        prefix = secrets.token_hex(6)
        body = f"{MARK}_{prefix}_" + "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_CHARACTERS))
        key = f"{body}_{zlib.crc32(body.encode()):08x}"
        return NewKey(prefix, key, self._hasher.hash(key))

    def verify(self, key: str, stored: str | None) -> bool:
        """Whether `key` has the hash `stored`; None stands for a key that nobody knows (rule 2)."""
        digest = keyed_digest(self._process_key, key.encode())
        if stored is not None and self._remembers(digest, stored):
            return True
        from argon2.exceptions import VerificationError

        with self._slots:
            self.verifications += 1
            try:
                self._hasher.verify(stored or self._unknown, key)
                matches = True
            except VerificationError:
                matches = False
        if not matches or stored is None:
            return False
        with self._lock:
            self._verified[digest] = (stored, time.monotonic() + _CACHED_SECONDS)
            while len(self._verified) > _CACHED_MAX:
                self._verified.popitem(last=False)
        return True

    def remembers(self, key: str, stored: str) -> bool:
        """Whether `key` was verified against this hash minutes ago; no more than a keyed digest."""
        return self._remembers(keyed_digest(self._process_key, key.encode()), stored)

    def _remembers(self, digest: str, stored: str) -> bool:
        with self._lock:
            known = self._verified.get(digest)
            if known is None:
                return False
            if known[0] != stored or time.monotonic() >= known[1]:
                del self._verified[digest]
                return False
            return True


def prefix_of(key: str) -> str | None:
    """The prefix of a well-formed key whose checksum is right, else None."""
    found = _FORM.fullmatch(key)
    if found is None:
        return None
    body = key.rpartition("_")[0]
    return found[1] if f"{zlib.crc32(body.encode()):08x}" == found[3] else None


def _hasher() -> PasswordHasher:
    try:
        from argon2 import PasswordHasher
    except ImportError:
        raise ConfigError("argon2-cffi is not installed; pip install 'kvcustody[service]'") from None
    return PasswordHasher(time_cost=_TIME_COST, memory_cost=_MEMORY_KIB, parallelism=_LANES)
