"""What a caller hands over with a request: token ids and hints. Nothing here can widen anything."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.prefix.longest_prefix import Prompt
from kvcustody.errors import ConfigError

Tokens = Sequence[int] | NDArray[np.int32]
_NO_EXTRAS: Mapping[int, bytes] = {}


class Hints(NamedTuple):
    """What a caller may ask for; each can only narrow. `salt` separates further, `classification` can only raise."""

    classification: str | None = None
    salt: str | None = None


NO_HINTS = Hints()


_PIECE_TOKENS = 2048  # what a list's integers and their bytes may take of a first-level cache, and some
_PACK_PIECE = struct.Struct(f"<{_PIECE_TOKENS}i").pack


def _packed(tokens: Sequence[int], count: int) -> bytes:
    """A list of ints as int32-LE bytes. In pieces where it is long: packing walks its integers three times."""
    if count <= 2 * _PIECE_TOKENS:
        return struct.pack(f"<{count}i", *tokens)
    whole = count - count % _PIECE_TOKENS
    parts = [_PACK_PIECE(*tokens[at : at + _PIECE_TOKENS]) for at in range(0, whole, _PIECE_TOKENS)]
    parts.append(struct.pack(f"<{count - whole}i", *tokens[whole:]))
    return b"".join(parts)


def _are_positive(data: bytes, count: int) -> bool:
    """No word has its sign bit; for a short prompt numpy's own start costs more than the look."""
    if count <= 2 * _PIECE_TOKENS:
        return data[3::4].isascii()
    return bool(np.minimum.reduce(np.frombuffer(data, dtype=np.int32)) >= 0)


def read_prompt(
    tokens: Tokens, block_tokens: int, extras: Mapping[int, bytes] | None, *, keep_last: bool
) -> Prompt:
    """The prompt as int32-LE bytes, made once. With `keep_last` the last token is always computed, never attached.

    Raises `ConfigError` for ids that are not integers of 31 bits: a negative word frames extra content.
    """
    count = len(tokens)
    try:
        if isinstance(tokens, np.ndarray):
            data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        else:
            data = _packed(tokens, count)
    except (struct.error, TypeError, ValueError) as error:
        raise ConfigError(f"token ids must be integers of 31 bits: {error}") from error
    if not _are_positive(data, count):
        raise ConfigError("token ids must be integers of 31 bits: found a negative one")
    whole = count // block_tokens
    limit = (count - 1) // block_tokens if keep_last else whole
    return Prompt(data, count, whole, limit, 4 * block_tokens, extras or _NO_EXTRAS)
