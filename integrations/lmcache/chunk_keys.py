"""The owner of an LMCache object, and its name in our tiers.

whose = directory.label_of(key.cache_salt)        # None: no governed engine told of it, so it is not kept
chunk_key(key)                                    # 32 bytes: of this chunk, model, rank and group
layout_of(key, size)                              # 32 bytes that differ where its bytes would mean something else
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Protocol

_LENGTH, _PLACE = struct.Struct("<I"), struct.Struct("<QQ")


class ObjectKey(Protocol):
    """The fields of `lmcache.v1.distributed.api.ObjectKey` that we read."""

    @property
    def chunk_hash(self) -> bytes:
        """The hash of the chunk's tokens and all earlier ones."""

    @property
    def model_name(self) -> str:
        """The model's name."""

    @property
    def kv_rank(self) -> int:
        """The part of the model's KV state."""

    @property
    def object_group_id(self) -> int:
        """The group of layers."""

    @property
    def cache_salt(self) -> str:
        """The salt, which names the owner."""


def chunk_key(key: ObjectKey) -> bytes:
    """Return a digest over every field except the salt, each with its length; the domain replaces the salt."""
    chunk, model = key.chunk_hash, key.model_name.encode()
    parts = (
        _LENGTH.pack(len(chunk)), chunk, _LENGTH.pack(len(model)), model,
        _PLACE.pack(key.kv_rank, key.object_group_id),
    )  # fmt: skip
    return hashlib.blake2b(b"".join(parts), digest_size=32, person=b"kvcustody chunk").digest()


@lru_cache(64)
def layout_of(model_name: str, size: int) -> bytes:
    """Return a digest by which objects of another model or size are rejected."""
    return hashlib.blake2b(f"lmcache {model_name} {size}".encode(), digest_size=32).digest()
