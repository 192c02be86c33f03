"""Whose an LMCache object is, and what it is called in our tiers.

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
    """What we read of `lmcache.v1.distributed.api.ObjectKey`."""

    @property
    def chunk_hash(self) -> bytes:
        """Of the chunk's tokens and all before them."""

    @property
    def model_name(self) -> str:
        """The model's name."""

    @property
    def kv_rank(self) -> int:
        """Which part of the model's KV state."""

    @property
    def object_group_id(self) -> int:
        """Which group of layers."""

    @property
    def cache_salt(self) -> str:
        """Whose it is."""


def chunk_key(key: ObjectKey) -> bytes:
    """Return a digest over every field but the salt, each with its length: the domain stands for that."""
    chunk, model = key.chunk_hash, key.model_name.encode()
    parts = (
        _LENGTH.pack(len(chunk)), chunk, _LENGTH.pack(len(model)), model,
        _PLACE.pack(key.kv_rank, key.object_group_id),
    )  # fmt: skip
    return hashlib.blake2b(b"".join(parts), digest_size=32, person=b"kvcustody chunk").digest()


@lru_cache(64)
def layout_of(model_name: str, size: int) -> bytes:
    """Return a digest: objects of another model or size are not ours."""
    return hashlib.blake2b(f"lmcache {model_name} {size}".encode(), digest_size=32).digest()
