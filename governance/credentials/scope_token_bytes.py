"""The bytes of an identity inside a scope token, and the text that carries them.

- A flag announces every text, and its length stands before it. So missing and empty texts differ, no text can pass for
  another, and different identities give different bytes.
- Each byte sequence has exactly one text: unpadded base64url without stray bits, which vLLM accepts as a salt.

    identity := text*, salt?                     issuer, tenant, then those that the flags announce
    text     := length, UTF-8
    epochs   := number, number, number           those of fleet, tenant and private scope
    number   := its size in bytes, then these, the greatest first
    length   := one byte below 128, else two with the first bit set; 0 announces a lower-case UUID in 16 bytes
"""

from __future__ import annotations

import binascii
import re
import uuid
from typing import Final

from kvcustody.governance.edge.erase_epochs import Epochs
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import Hints
from kvcustody.ids import SessionId, SubjectId, TenantId

SALT_DIGEST_BYTES: Final = 12
SALTED: Final = 1 << 7

_SUBJECT_ASSERTED, _SESSION_ASSERTED = 1 << 5, 1 << 6
_FLAGS = {name: 1 << bit for bit, name in enumerate(("subject", "session", "classification", "route", "hint"))}
_CHARACTERS_MAX = 8_192  # seven texts of 128 characters of four bytes each stay below
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ALL = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_LAST = (_ALL, b"", _ALL[::16], _ALL[::4])  # by length modulo 4: a last character without stray bits
_TO_BASE64 = bytes.maketrans(b"-_", b"+/")
_FROM_BASE64 = bytes.maketrans(b"+/", b"-_")


def pack_identity(principal: Principal, route: str | None, hint: str | None) -> tuple[int, bytes]:
    """The flags and the length-prefixed texts of a record."""
    flags = _SUBJECT_ASSERTED * principal.subject_asserted | _SESSION_ASSERTED * principal.session_asserted
    parts = [write_text(principal.issuer), write_text(principal.tenant)]
    optional = (principal.subject, principal.session, principal.classification, route, hint)
    for bit, text in zip(_FLAGS.values(), optional, strict=True):
        if text is not None:
            flags |= bit
            parts.append(write_text(text))
    return flags, b"".join(parts)


def write_text(text: str) -> bytes:
    """A text with its length before it."""
    if len(text) == 36 and _UUID.fullmatch(text) is not None:
        return b"\x00" + bytes.fromhex(text.replace("-", ""))
    data = text.encode("utf-8")
    size = len(data)
    return (bytes((size,)) if size < 128 else (0x8000 | size).to_bytes(2, "big")) + data


def read_text(record: bytes, at: int) -> tuple[str, int]:
    """The text that `write_text` wrote at a place, and the place behind it; only for authentic bytes."""
    size, start = record[at], at + 1
    if size == 0:
        return str(uuid.UUID(bytes=record[start : start + 16])), start + 16
    if size >= 128:
        size, start = (size & 0x7F) << 8 | record[start], start + 1
    return record[start : start + size].decode("utf-8"), start + size


def read_identity(flags: int, record: bytes) -> tuple[Principal, Hints]:
    """The identity behind bytes of `pack_identity`, salt digest included; only for bytes known to be authentic."""
    at = 0

    def text() -> str:
        nonlocal at
        found, at = read_text(record, at)
        return found

    issuer, tenant = text(), text()
    texts = {name: text() if flags & bit else None for name, bit in _FLAGS.items()}
    subject, session = texts["subject"], texts["session"]
    principal = Principal(
        issuer=issuer,
        tenant=TenantId(tenant),
        subject=None if subject is None else SubjectId(subject),
        session=None if session is None else SessionId(session),
        subject_asserted=bool(flags & _SUBJECT_ASSERTED),
        session_asserted=bool(flags & _SESSION_ASSERTED),
        classification=texts["classification"],
        route=texts["route"],
    )
    salt = encoded(record[at:]) if flags & SALTED else None
    assert len(record) - at == (SALT_DIGEST_BYTES if flags & SALTED else 0)
    return principal, Hints(texts["hint"], salt)


def write_epochs(epochs: Epochs) -> bytes:
    """Epochs with the size of each before it."""
    sizes = ((number.bit_length() + 7) // 8 for number in epochs)
    return b"".join(bytes((size,)) + number.to_bytes(size, "big") for size, number in zip(sizes, epochs, strict=True))


def read_epochs(record: bytes) -> tuple[Epochs, int]:
    """The epochs that `write_epochs` wrote at the begin, and the place behind them; only for authentic bytes."""
    at, numbers = 0, []
    for _ in Epochs._fields:
        start, at = at + 1, at + 1 + record[at]
        numbers.append(int.from_bytes(record[start:at], "big"))
    return Epochs(*numbers), at


def encoded(data: bytes) -> str:
    """Unpadded base64url."""
    return binascii.b2a_base64(data, newline=False).translate(_FROM_BASE64).rstrip(b"=").decode("ascii")


def decoded(text: object) -> bytes | None:
    """The bytes of canonical base64url, else `None`: no padding, no other characters, no stray bits."""
    if type(text) is not str or not 0 < len(text) <= _CHARACTERS_MAX or not text.isascii():
        return None
    data = text.encode("ascii")
    if data.translate(None, _ALL) or data[-1] not in _LAST[len(data) % 4]:
        return None
    return binascii.a2b_base64(data.translate(_TO_BASE64) + b"=" * (-len(data) % 4))
