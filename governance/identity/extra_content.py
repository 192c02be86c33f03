"""Content other than token ids that conditions K/V values, framed so that no token run can pose as it.

- A frame begins with the word -1. Token ids are never negative, so reading left to right a keyed stream of
  int32 words splits into tokens and frames in one way only.
- A frame has its length and is padded to whole words; its content is a typed record (`tlv`).
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

from kvcustody.errors import IdentityError
from kvcustody.governance.identity import tlv

VERSION = 1
_HEAD = struct.Struct("<iI")
_RECORD_BYTES_MAX = 1 << 16


class Media(NamedTuple):
    """An image, audio or video item; the digest is over the decoded content."""

    digest: bytes
    shape: tuple[int, ...]
    dtype: str
    palette: bytes | None = None


class PromptEmbeddings(NamedTuple):
    """Embeddings given in place of tokens."""

    digest: bytes
    shape: tuple[int, ...]
    dtype: str


class Positions(NamedTuple):
    """Positional overrides: an offset and, for multi-axis rotary embeddings, the positions' digest."""

    offset: int
    digest: bytes | None = None


Extra: TypeAlias = Media | PromptEmbeddings | Positions

_SCHEMAS: dict[type[Extra], str] = {
    Media: "kvcustody/extra-media",
    PromptEmbeddings: "kvcustody/extra-embeddings",
    Positions: "kvcustody/extra-positions",
}


def frame(extra: Extra) -> bytes:
    """Return the bytes that a keyed state takes for `extra`, before the tokens that it conditions."""
    fields: dict[int, tlv.Value] = dict(enumerate(extra, start=1))
    try:
        record = tlv.encode(_SCHEMAS[type(extra)], VERSION, fields)
    except (KeyError, TypeError, ValueError) as error:
        raise IdentityError(f"extra content: {error}") from error
    if len(record) > _RECORD_BYTES_MAX:
        raise IdentityError(f"extra content: record of `{len(record)}` bytes, at most {_RECORD_BYTES_MAX}")
    return _HEAD.pack(-1, len(record)) + record + bytes(-len(record) % 4)


def is_framed(frames: bytes) -> bool:
    """Whether these bytes are one or more complete frames and nothing else."""
    at = 0
    while at + _HEAD.size <= len(frames):
        word, length = _HEAD.unpack_from(frames, at)
        if word != -1:
            return False
        at += _HEAD.size + length + -length % 4
    return 0 < at == len(frames)
