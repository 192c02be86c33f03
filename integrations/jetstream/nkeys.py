"""Keys and signed claims of NATS: nkeys in their text form, and JWTs that servers and clients read.

1. A key's text is base32 of a prefix that says its kind, 32 bytes, and a CRC-16; a seed's has `S` before it.
2. A claim is signed by the key that issues it (`ed25519-nkey`). The server checks it; nothing here reads one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from typing import Any, Final, NamedTuple

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kvcustody.errors import ConfigError

OPERATOR, ACCOUNT, USER = "O", "A", "U"
_PREFIX: Final = {OPERATOR: 14 << 3, ACCOUNT: 0, USER: 20 << 3}
_SEED: Final = 18 << 3
_RAW_BYTES: Final = 32


class NatsKey(NamedTuple):
    """A private key of one kind. `public` is its name in claims."""

    kind: str
    raw: bytes

    def __repr__(self) -> str:
        return f"NatsKey({self.public})"

    @classmethod
    def generate(cls, kind: str) -> NatsKey:
        """A fresh key."""
        return cls(kind, secrets.token_bytes(_RAW_BYTES))

    @classmethod
    def from_seed(cls, text: str) -> NatsKey:
        """The key of a seed's text; raises `ConfigError` for any other text."""
        try:
            data = base64.b32decode(text + "=" * (-len(text) % 8))
        except (binascii.Error, ValueError):
            data = b""
        if len(data) == _RAW_BYTES + 4 and _crc(data[:-2]) == data[-2:]:
            kind = (data[0] & 7) << 5 | data[1] >> 3
            for name, prefix in _PREFIX.items():
                if data[0] & 0xF8 == _SEED and kind == prefix:
                    return cls(name, data[2:-2])
        raise ConfigError("this is no seed of a NATS key")

    @property
    def seed(self) -> str:
        """Its text."""
        prefix = _PREFIX[self.kind]
        return _text(bytes((_SEED | prefix >> 5, (prefix & 31) << 3)) + self.raw)

    @property
    def public(self) -> str:
        """The text of its public key."""
        public = self._key().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return _text(bytes((_PREFIX[self.kind],)) + public)

    def sign(self, data: bytes) -> bytes:
        """The signature, 64 bytes."""
        return self._key().sign(data)

    def claim(self, subject: str, name: str, nats: dict[str, Any], *, issued: int, expires: int | None = None) -> str:
        """A JWT by this key about the public key `subject`; times are UTC seconds."""
        claims: dict[str, Any] = {
            "iat": issued,
            "iss": self.public,
            "name": name,
            "sub": subject,
            "nats": nats,
        }
        if expires is not None:
            claims["exp"] = expires
        digest = hashlib.sha256(orjson.dumps(claims, option=orjson.OPT_SORT_KEYS)).digest()
        claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
        head = _url(orjson.dumps({"typ": "JWT", "alg": "ed25519-nkey"}))
        body = f"{head}.{_url(orjson.dumps(claims))}"
        return f"{body}.{_url(self.sign(body.encode()))}"

    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.raw)


def _text(data: bytes) -> str:
    return base64.b32encode(data + _crc(data)).decode().rstrip("=")


def _url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _crc(data: bytes) -> bytes:
    """CRC-16/XMODEM, little-endian."""
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")
