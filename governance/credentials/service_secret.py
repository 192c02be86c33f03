"""The service's own secret: 32 random bytes in a 0600 file, from which every other secret of it is derived.

1. Cursors, kept answers, sessions, request digests and labels each have a key of their own (HKDF-SHA256).
2. Whoever reads the file can forge cursors and sessions; it opens no key of any tenant and no block.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvcustody.governance.credentials.scope_token_secret import open_scope_key


class ServiceSecret:
    """Keys derived by purpose."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    def key(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose."""
        info = b"kvcustody/service/" + purpose.encode()
        return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(self._root)

    def __repr__(self) -> str:
        return "ServiceSecret(withheld)"


def open_secret(path: Path) -> ServiceSecret:
    """Open the secret in `path`, and create it first if it is missing; raises `KeyringError`."""
    with open_scope_key(path) as buffer:
        return ServiceSecret(bytes(buffer.view()))


def keyed_digest(key: bytes, *parts: bytes) -> str:
    """Return a digest of 64 hexadecimal digits over parts, each framed by its length."""
    made = hashlib.blake2b(digest_size=32, key=key)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.hexdigest()


def same(one: str, other: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))
