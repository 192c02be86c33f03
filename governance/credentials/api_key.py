"""The form of an API key, its digest, and a verification that costs almost nothing, whether or not a key works.

1. Only a BLAKE2b digest of the whole key is stored. Nobody can try so many keys, so an expensive digest would only slow
   down those who verify. A file of keys has a random salt, under which its digests are made. The form is
   `<mark>_<prefix>_<secret>_<checksum>`:
   - the mark names the kind of key: `kvcs` for the service, `kvce` for an engine;
   - the prefix is 12 hexadecimal digits to find it by;
   - the secret is 256 random bits;
   - the checksum is a CRC-32 that scanners of source code can check offline.
2. A well-formed key that is unknown costs one comparison of digests, as a known one with a wrong secret does.
3. The stored digest of a key that was made with another key, or in a session, names its origin in its parameters:
   `$blake2b$from=<prefix>$in=<digest of the session>$...`.
4. A verified key is remembered for a while, under a digest of itself whose key only this process has. Its row (revoked,
   expired, replaced) is still read at every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
import zlib
from collections import OrderedDict
from typing import NamedTuple

from kvcustody.governance.credentials.service_secret import keyed_digest

SERVICE_MARK, ENGINE_MARK = "kvcs", "kvce"
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_CHARACTERS = 43  # 62**43 > 2**256
_FORM = re.compile(rf"{SERVICE_MARK}_([0-9a-f]{{12}})_([0-9A-Za-z]{{{_SECRET_CHARACTERS}}})_([0-9a-f]{{8}})")
_CACHED_MAX = 4096
_CACHED_SECONDS = 300.0
_DIGEST, _DIGEST_BYTES = "$blake2b$", 32
_MADE_WITH = re.compile(r"\A\$blake2b\$from=([0-9a-f]{12})\$")
_MADE_IN = re.compile(r"\$in=([0-9a-f]{64})\$")


class NewKey(NamedTuple):
    """A key that was just made: shown once, and kept nowhere."""

    prefix: str
    key: str
    hash: str


class KeyHasher:
    """Makes keys and verifies them; thread-safe."""

    def __init__(self) -> None:
        self._unknown = _DIGEST + secrets.token_hex(_DIGEST_BYTES)  # nobody has the key to this
        self._process_key = secrets.token_bytes(32)
        self._verified: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()
        self.verifications = 0

    def make(self) -> NewKey:
        """A new random key of the service."""
        prefix, key = new_key(SERVICE_MARK)
        return NewKey(prefix, key, _DIGEST + digest_of(key))

    def verify(self, key: str, stored: str | None) -> bool:
        """Whether `key` has the hash `stored`; None stands for a key that nobody knows (rule 2)."""
        digest = keyed_digest(self._process_key, key.encode())
        if stored is not None and self._remembers(digest, stored):
            return True
        self.verifications += 1
        digest_part = (stored or self._unknown).rpartition("$")[2]
        if not same_digest(digest_of(key), digest_part) or stored is None:
            return False
        with self._lock:
            self._verified[digest] = (stored, time.monotonic() + _CACHED_SECONDS)
            while len(self._verified) > _CACHED_MAX:
                self._verified.popitem(last=False)
        return True

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


def with_source(stored: str, source: str, session: str) -> str:
    """What is stored of a key, with what it was made with (rule 3): a key by its prefix, a session by its digest."""
    if session:
        stored = stored.replace(_DIGEST, f"{_DIGEST}in={session}$", 1)
    return stored.replace(_DIGEST, made_with(source), 1) if source else stored


def made_with(source: str) -> str:
    """How what is stored of every key begins that was made with the key of this prefix (rule 3)."""
    return f"{_DIGEST}from={source}$"


def source_of(stored: str) -> str:
    """The prefix of the key that a key was made with, by what is stored of it (rule 3); empty: with none."""
    found = _MADE_WITH.match(stored)
    return "" if found is None else found[1]


def session_of(stored: str) -> str:
    """The digest of the session that a key ends with, by what is stored of it (rule 3); empty: with none."""
    found = _MADE_IN.search(stored)
    return "" if found is None else found[1]


def without_source(stored: str) -> str:
    """What is stored of a key that stands alone."""
    return _DIGEST + stored.rpartition("$")[2]


def new_key(mark: str) -> tuple[str, str]:
    """A new random key and its prefix (rule 1)."""
    prefix = secrets.token_hex(6)
    body = f"{mark}_{prefix}_" + "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_CHARACTERS))
    return prefix, f"{body}_{zlib.crc32(body.encode()):08x}"


def digest_of(key: str, salt: bytes = b"") -> str:
    """The digest of a key, 64 hexadecimal digits (rule 1)."""
    text = key.encode("utf-8", "surrogatepass")
    made = hashlib.blake2b(text, digest_size=_DIGEST_BYTES, key=salt, person=b"kvcustody-key")
    return made.hexdigest()


def same_digest(one: str, other: str) -> bool:
    """Compare two digests in constant time."""
    return hmac.compare_digest(one, other)
