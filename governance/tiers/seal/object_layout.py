"""The layout of a sealed object: its parts, and what is bound to its content (docs/reference/formats/sealed-object.md).

    header (72) ‖ facts, sealed (0, or 328 + 16) ‖ content, sealed (n + 16) ‖ CRC-32 (0 or 4)

1. The header is all that is readable without a key: which format, how long, under what name. It tells nothing of
   whose the object is, what it holds, or which others belong to it.
2. `ObjectFacts` say whose and what it is. They are bound to the content always; they are enclosed, sealed under a key
   of their own, where the object must be understood by a process that has no index of it.
3. Whatever is read is checked against bounds before anything is allocated or opened. No byte that a store chose moves
   anything but a length check.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple, Self

from kvcustody.errors import SealError
from kvcustody.governance.tiers.seal.extended_nonce import TAG_BYTES

MAGIC = b"KVSO"
VERSION = 1
XAES_256_GCM = 1  # the suite; others get numbers of their own
ENCLOSED, CHECKED = 1, 2  # flags: facts are in the object, a checksum ends it
NAME_BYTES = 32
SHRED_ID_BYTES = 16
CLASSIFICATION_BYTES = 32
OBJECT_BYTES_MAX = 1 << 32  # of content; AES-GCM itself ends at 2^36
NO_SHRED = bytes(SHRED_ID_BYTES)

_HEADER = struct.Struct("<4sBBH Q 32s 24s")
_FACTS = struct.Struct("<32s 32s 32s 32s 32s 32s 32s HH III QQ I 16s 16s Q 16s 12x")
HEADER_BYTES = _HEADER.size
FACTS_BYTES = _FACTS.size
CHECKSUM_BYTES = 4
_ENCLOSED_AT = HEADER_BYTES + FACTS_BYTES + TAG_BYTES  # where content begins behind enclosed facts
_AROUND = [  # bytes of an object beside its content, by its flags
    (_ENCLOSED_AT if flags & ENCLOSED else HEADER_BYTES) + TAG_BYTES + (CHECKSUM_BYTES if flags & CHECKED else 0)
    for flags in range(1 + (ENCLOSED | CHECKED))
]


class ObjectFacts(NamedTuple):
    """An object's owner and content. Digests are 32 bytes; times are UTC microseconds.

    `first` and `last` are the keys of its first and last block, `parent` that of the block before (zeros: none);
    `depth` is the first block's place in its chain, `tokens` how many its blocks hold. `shard` of `shards` workers made
    it. What `subject` and `bucket` name are the shred keys that it needs beside the tenant's epoch secret.
    `ceiling_us`: nothing that is restored from it lives longer; `due_us`: when the object itself ends. `tenant` is a
    pseudonym, for whoever has no index of it and must end what is a tenant's.
    """

    domain: bytes
    classification: str
    model: bytes
    layout: bytes
    parent: bytes
    first: bytes
    last: bytes
    shard: int
    shards: int
    depth: int
    blocks: int
    tokens: int
    born_us: int
    ceiling_us: int
    epoch: int
    subject: bytes
    bucket: bytes
    due_us: int
    tenant: bytes

    def to_bytes(self) -> bytes:
        """Return the fixed layout. Raises `SealError` for a value that does not fit."""
        return _FACTS.pack(self[0], _classification_bytes(self[1]), *self[2:])

    @classmethod
    def from_bytes(cls, packed: bytes) -> Self:
        """Parse enclosed facts. The bytes must come from an opened object, which authenticates them."""
        domain, classification, *others = _FACTS.unpack(packed)
        return cls(domain, classification.rstrip(b"\0").decode(), *others)


class Header(NamedTuple):
    """The part of an object that is readable without a key. `size` is its content's length."""

    flags: int
    size: int
    name: bytes
    nonce: bytes

    def to_bytes(self) -> bytes:
        """The 72 bytes."""
        return header_bytes(*self)

    @property
    def content_at(self) -> int:
        """Where the sealed content begins."""
        return _ENCLOSED_AT if self.flags & ENCLOSED else HEADER_BYTES

    @property
    def content_end(self) -> int:
        """Where its tag ends."""
        return self.content_at + self.size + TAG_BYTES

    @property
    def object_bytes(self) -> int:
        """The whole object's length."""
        return self.size + _AROUND[self.flags]


def header_bytes(flags: int, size: int, name: bytes, nonce: bytes) -> bytes:
    """Return the 72 bytes without making a `Header`."""
    return _HEADER.pack(MAGIC, VERSION, XAES_256_GCM, flags, size, name, nonce)


@lru_cache(64)
def _classification_bytes(classification: str) -> bytes:
    encoded = classification.encode()
    if len(encoded) > CLASSIFICATION_BYTES or b"\0" in encoded:
        raise SealError(f"classification `{classification}`: a sealed object has room for {CLASSIFICATION_BYTES} bytes")
    return encoded


def object_bytes(content: int, *, enclosed: bool, checked: bool) -> int:
    """Return the length of an object with `content` bytes."""
    return content + _AROUND[ENCLOSED * enclosed | CHECKED * checked]


def read_header(sealed: memoryview, size: int | None = None) -> Header:
    """Parse the header of a store's bytes. Raises `SealError` unless they are an object of this format and length.

    `size`: the length of the object, where `sealed` is its beginning alone.
    """
    size = len(sealed) if size is None else size
    if len(sealed) < HEADER_BYTES:
        raise SealError(f"sealed object: `{len(sealed)}` bytes are fewer than a header has")
    magic, version, suite, *others = _HEADER.unpack_from(sealed)
    if magic != MAGIC:
        raise SealError("sealed object: does not begin as one")
    if version != VERSION or suite != XAES_256_GCM:
        raise SealError(f"sealed object: format `{version}`, suite `{suite}` is not known here")
    header = Header._make(others)
    if header.flags & ~(ENCLOSED | CHECKED) or header.size > OBJECT_BYTES_MAX:
        raise SealError("sealed object: flags or length are out of bounds")
    says = header.object_bytes
    if says != size:
        raise SealError(f"sealed object: has `{size}` bytes, its header says `{says}`")
    return header
