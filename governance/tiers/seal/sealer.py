"""Seals content and facts into an object and opens it again, for any store of bytes.

    key = ExtendedNonceKey(...)                                 # of the domain, its subject and its time bucket
    size = seal_into(key, name, facts, content, arena)          # arena[:size] may leave the process
    open_into(key, name, facts, arena[:size], content)          # or SealError, and content is zeros

1. What is bound: the name under which it was asked for, and every field of the facts that the reader expects. An object
   that was swapped, renamed, cut, extended, is older, or is another's, does not open.
2. No plaintext that did not authenticate is left in `content`.
3. The nonce is random for each object, and the object's key binds its name too.
4. Nothing is allocated for content: `content` and `arena` are the caller's.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeAlias

from cryptography.exceptions import InvalidTag

from kvcustody.errors import CustodyError, SealError
from kvcustody.governance.tiers.seal.extended_nonce import NONCE_BYTES, TAG_BYTES, ExtendedNonceKey
from kvcustody.governance.tiers.seal.object_layout import (
    CHECKED,
    CHECKSUM_BYTES,
    ENCLOSED,
    FACTS_BYTES,
    HEADER_BYTES,
    OBJECT_BYTES_MAX,
    Header,
    ObjectFacts,
    header_bytes,
    object_bytes,
    read_header,
)

Bytes: TypeAlias = bytes | bytearray | memoryview
_CONTENT, _FACTS = b"kvso/1 content", b"kvso/1 facts"  # what a derived nonce is for: `person` of BLAKE2b


def seal_into(
    key: ExtendedNonceKey,
    name: bytes,
    facts: ObjectFacts,
    content: Bytes,
    into: memoryview,
    *,
    facts_key: ExtendedNonceKey | None = None,
    checked: bool = False,
) -> int:
    """Seal `content` under `name`; returns the object's length in `into`.

    `facts_key`: enclose the facts, sealed under this key; `checked`: end with a checksum that needs no key. Raises
    `SealError` where `into` is too short or the content too long.
    """
    flags = (ENCLOSED if facts_key is not None else 0) | (CHECKED if checked else 0)
    size, drawn = len(content), os.urandom(NONCE_BYTES)
    at = HEADER_BYTES if facts_key is None else HEADER_BYTES + FACTS_BYTES + TAG_BYTES
    end = at + size + TAG_BYTES
    whole = end + (CHECKSUM_BYTES if checked else 0)
    if size > OBJECT_BYTES_MAX or whole > len(into):
        raise SealError(f"sealed object: `{whole}` bytes do not fit into `{len(into)}`")
    plain, begin = facts.to_bytes(), header_bytes(flags, size, name, drawn)
    into[:HEADER_BYTES] = begin
    if facts_key is not None:
        cipher, nonce = facts_key.of_message(_nonce(drawn, name, _FACTS))
        cipher.encrypt_into(nonce, plain, begin, into[HEADER_BYTES:at])
    cipher, nonce = key.of_message(_nonce(drawn, name, _CONTENT))
    cipher.encrypt_into(nonce, content, begin + plain, into[at:end])
    if checked:
        _checksum(into, end)
    return whole


def open_into(key: ExtendedNonceKey, name: bytes, facts: ObjectFacts, sealed: memoryview, into: memoryview) -> None:
    """Open a store's bytes for `name`, expecting `facts`; `into` has the content's length.

    Raises `SealError`, with `into` all zeros, unless every byte is what was sealed under this name with these facts.
    """
    try:
        header = read_header(sealed)
        _open_content(key, header, name, bytes(sealed[:HEADER_BYTES]) + facts.to_bytes(), sealed, into)
    except SealError:
        into[:] = bytes(len(into))
        raise


def open_enclosed(
    facts_key: ExtendedNonceKey,
    name: bytes,
    sealed: memoryview,
    into: memoryview,
    key_of: Callable[[ObjectFacts], ExtendedNonceKey],
) -> None:
    """Open an object without an index entry in one pass: `key_of` gets its facts and returns its key.

    `sealed` may go on behind the object. Raises `SealError`, and what `key_of` raises, with `into` all zeros.
    """
    try:
        header = read_header(sealed, object_bytes(len(into), enclosed=True, checked=False))
        plain = _open_facts(facts_key, header, name, sealed)
        key = key_of(ObjectFacts.from_bytes(plain))
        _open_content(key, header, name, bytes(sealed[:HEADER_BYTES]) + plain, sealed, into)
    except CustodyError:
        into[:] = bytes(len(into))
        raise


def read_facts(facts_key: ExtendedNonceKey, name: bytes, sealed: memoryview, size: int | None = None) -> ObjectFacts:
    """Open the facts of the object under `name` without an index entry. Raises `SealError`.

    They say how to open it; that its content belongs to them, `open_into` finds. `size`: the object's length, where
    `sealed` is its beginning alone.
    """
    return ObjectFacts.from_bytes(_open_facts(facts_key, read_header(sealed, size), name, sealed))


def _open_content(
    key: ExtendedNonceKey, header: Header, name: bytes, bound: bytes, sealed: memoryview, into: memoryview
) -> None:
    if header.name != name or header.size != len(into):
        raise SealError("sealed object: is not the one that was asked for")
    cipher, nonce = key.of_message(_nonce(header.nonce, name, _CONTENT))
    at = header.content_at
    try:
        cipher.decrypt_into(nonce, sealed[at : at + header.size + TAG_BYTES], bound, into)
    except InvalidTag:
        raise SealError("sealed object: does not open with what is known of it") from None


def _open_facts(facts_key: ExtendedNonceKey, header: Header, name: bytes, sealed: memoryview) -> bytes:
    if header.name != name or not header.flags & ENCLOSED:
        raise SealError("sealed object: is not the one that its place says, or encloses no facts")
    if len(sealed) < HEADER_BYTES + FACTS_BYTES + TAG_BYTES:
        raise SealError("sealed object: ends before its facts")
    cipher, nonce = facts_key.of_message(_nonce(header.nonce, name, _FACTS))
    enclosed = sealed[HEADER_BYTES : HEADER_BYTES + FACTS_BYTES + TAG_BYTES]
    try:
        return cipher.decrypt(nonce, enclosed, sealed[:HEADER_BYTES])
    except InvalidTag:
        raise SealError("sealed object: its facts do not open here") from None


def is_sound(sealed: memoryview) -> bool | None:
    """Whether the bytes match their checksum; None where the object has none.

    It finds rot, and needs no key; it says nothing against who can write.
    """
    try:
        header = read_header(sealed)
    except SealError:
        return False
    if not header.flags & CHECKED:
        return None
    found = zlib.crc32(sealed[: header.content_end])
    return found == int.from_bytes(sealed[header.content_end :], "little")


def _checksum(into: memoryview, end: int) -> None:
    into[end : end + CHECKSUM_BYTES] = zlib.crc32(into[:end]).to_bytes(CHECKSUM_BYTES, "little")


def _nonce(drawn: bytes, name: bytes, person: bytes) -> bytes:
    """Of this object and this use; two objects that share random bytes differ in name."""
    return blake2b(drawn + name, digest_size=NONCE_BYTES, person=person).digest()
