"""What a caller hands over with a request: token ids and hints. Nothing here can widen anything."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.lookup import Prompt
from kvcustody.errors import ConfigError

Tokens = Sequence[int] | NDArray[np.int32]
_NO_EXTRAS: Mapping[int, bytes] = {}


class Hints(NamedTuple):
    """What a caller may ask for; each can only narrow. `salt` separates further, `classification` can only raise."""

    classification: str | None = None
    salt: str | None = None


NO_HINTS = Hints()


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
            data = struct.pack(f"<{count}i", *tokens)
    except (struct.error, TypeError, ValueError) as error:
        raise ConfigError(f"token ids must be integers of 31 bits: {error}") from error
    if np.minimum.reduce(np.frombuffer(data, dtype=np.int32)) < 0:
        raise ConfigError("token ids must be integers of 31 bits: found a negative one")
    whole = count // block_tokens
    limit = (count - 1) // block_tokens if keep_last else whole
    return Prompt(data, count, whole, limit, 4 * block_tokens, extras or _NO_EXTRAS)
