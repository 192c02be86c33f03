"""The caller's part of a request: token ids, counts, extra content and hints. Nothing here can widen access.

1. Token ids are integers of 31 bits: a list, or another sequence, of ints, or an integer array of one dimension.
   Nothing is rounded, wrapped or parsed into one: two prompts that differ never have the same bytes.
2. A count of tokens is an integer that is not negative; True is none.
3. Everything is read before anything is held for the request, so what is refused leaves nothing behind.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.prefix.key_chain import Extras
from kvcustody.allocator.prefix.longest_prefix import Prompt
from kvcustody.errors import ConfigError
from kvcustody.governance.edge.erase_epochs import Epochs
from kvcustody.governance.edge.route_receipt import RouteReceipt
from kvcustody.governance.identity.extra_content import is_framed
from kvcustody.policies.document.token_priorities import KindRange

Tokens = Sequence[int] | NDArray[np.int32]
_NO_EXTRAS: Mapping[int, bytes] = {}
_INT32 = np.dtype(np.int32)
_TOKEN_LIMIT = 1 << 31
_BYTES_PER_TOKEN = 4


class Hints(NamedTuple):
    """A caller's hints; each can only narrow. `salt` separates further, `classification` can only raise.

    `kinds`: spans of the prompt that hold content of a kind of the policy's `eviction.kinds`; each can only lower the
    priority at which its blocks are kept, among the tenant's own. A kind that the policy does not know says nothing.
    Those that a door marked (`is_marked`) are the operator's word, not the caller's, and count as the policy's.
    `epochs`: what a door's token says that it knew of erasures, None where no door stands before the engine. Where the
    engine knows otherwise, the request shares nothing with any other (`edge.worker_epochs`).
    `receipt`: of the request's way through a door and a router (`edge.route_receipt`).
    `latency` is one of `LATENCY_CLASSES`: whether it may wait for a tier that is tried, or is in a hurry.
    """

    classification: str | None = None
    salt: str | None = None
    kinds: tuple[KindRange, ...] = ()
    latency: str = ""
    epochs: Epochs | None = None
    receipt: RouteReceipt | None = None


NO_HINTS = Hints()
LATENCY_CLASSES = ("", "interactive", "batch")


def check_latency(latency: str) -> str:
    """Raise `ConfigError` for an unknown latency class."""
    if latency not in LATENCY_CLASSES:
        raise ConfigError("hint `latency`: is not a class; give `interactive`, `batch` or nothing")
    return latency


KINDS_MAX = 64  # that a caller gives, and as many that the door marks


_PIECE_TOKENS = 2048  # what a list's integers and their bytes may take of a first-level cache, and some


@lru_cache(maxsize=2 * _PIECE_TOKENS + 1)
def _packer(count: int) -> Callable[..., bytes]:
    """What packs so many ints; `struct.pack` would read its format and copy the arguments at each call."""
    return struct.Struct(f"<{count}i").pack


def _packed(tokens: Sequence[int], count: int) -> bytes:
    """A list of ints as int32-LE bytes. In pieces where it is long: packing walks its integers three times."""
    if count <= 2 * _PIECE_TOKENS:
        return _packer(count)(*tokens)
    whole = count - count % _PIECE_TOKENS
    pack = _packer(_PIECE_TOKENS)
    parts = [pack(*tokens[at : at + _PIECE_TOKENS]) for at in range(0, whole, _PIECE_TOKENS)]
    parts.append(_packer(count - whole)(*tokens[whole:]))
    return b"".join(parts)


def _are_positive(data: bytes, count: int) -> bool:
    """No word has its sign bit; for a short prompt numpy's own start costs more than the look."""
    if count <= 2 * _PIECE_TOKENS:
        return data[3::4].isascii()
    return bool(np.minimum.reduce(np.frombuffer(data, dtype=np.int32)) >= 0)


def read_prompt(tokens: Tokens, block_tokens: int, extras: Mapping[int, bytes] | None, *, keep_last: bool) -> Prompt:
    """Return the prompt as int32-LE bytes. With `keep_last` the last token is always computed, never attached.

    Raises `ConfigError` for ids that are not integers of 31 bits, because a negative word frames extra content. Raises
    it too for extra content that is not framed bytes at a block of the prompt.
    """
    data = pack_tokens(tokens)
    count = len(data) // _BYTES_PER_TOKEN
    whole = count // block_tokens
    limit = (count - 1) // block_tokens if keep_last else whole
    framed = _read_extras(extras, -(-count // block_tokens)) if extras else _NO_EXTRAS
    return Prompt(data, count, whole, limit, _BYTES_PER_TOKEN * block_tokens, framed)


def read_kinds(kinds: Sequence[KindRange]) -> tuple[KindRange, ...]:
    """Return the kinds of content; `ConfigError` for more than 64 of a caller or a door, and for a bad span."""
    marks = sum(each.is_marked for each in kinds)
    if max(marks, len(kinds) - marks) > KINDS_MAX:
        raise ConfigError(f"hints: `{len(kinds)}` kinds of content, and at most {KINDS_MAX} are read")
    read = tuple(
        KindRange(read_count("hints: kinds", first), read_count("hints: kinds", last), kind, is_marked)
        for first, last, kind, is_marked in kinds
    )
    for first, last, kind, _ in read:
        if last <= first or not isinstance(kind, str):
            raise ConfigError(f"hints: kinds: `[{first}, {last})` of kind `{kind}` is no span of tokens")
    return read


def pack_tokens(tokens: Tokens) -> bytes:
    """Pack token ids as int32-LE bytes; `ConfigError` where one is not an integer of 31 bits."""
    if isinstance(tokens, np.ndarray):
        if tokens.dtype is not _INT32 or tokens.ndim != 1:
            tokens = _narrowed(tokens)
        data, count = tokens.tobytes(), len(tokens)
    else:
        if type(tokens) is not list:
            tokens = _listed(tokens)
        count = len(tokens)
        if count and isinstance(tokens[0], (bool, np.bool_)):  # within a list, True packs as the 1 that it equals
            raise _not_tokens("found a truth value")
        try:
            data = _packed(tokens, count)
        except (struct.error, TypeError, ValueError) as error:
            raise _not_tokens(str(error)) from error
    if not _are_positive(data, count):
        raise _not_tokens("found a negative one")
    return data


def read_token_array(tokens: Tokens, count: int | None = None) -> NDArray[np.int32]:
    """Return token ids as an int32 array of exactly `count`; `ConfigError` as `pack_tokens`."""
    if isinstance(tokens, np.ndarray) and tokens.dtype is _INT32 and tokens.ndim == 1:
        ids = tokens
        if not _are_positive(ids.tobytes(), len(ids)):
            raise _not_tokens("found a negative one")
    else:
        ids = np.frombuffer(pack_tokens(tokens), dtype="<i4")
    if count is not None and len(ids) != count:
        raise ConfigError(f"`{count}` token ids are needed, one for each request, not `{len(ids)}`")
    return ids


def read_count(what: str, value: int, at_least: int = 0) -> int:
    """Return a caller's count as an int; `ConfigError` for another value, or one below `at_least`."""
    if type(value) is int and value >= at_least:
        return value
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{what}: `{value}` is not an integer") from None
    if number < at_least:
        raise ConfigError(f"{what}: `{number}` is less than {at_least}")
    return number


def read_counts(what: str, values: Sequence[int]) -> Sequence[int]:
    """Return a caller's counts, each as `read_count` does."""
    for value in values:
        if type(value) is not int or value < 0:
            return [read_count(what, each) for each in values]
    return values


def _narrowed(tokens: NDArray[np.generic]) -> NDArray[np.int32]:
    """An array of another kind as int32, where that changes no id."""
    if tokens.ndim != 1:
        raise _not_tokens(f"found an array of {tokens.ndim} dimensions")
    if tokens.dtype.kind not in "iu":
        raise _not_tokens(f"found an array of `{tokens.dtype}`")
    if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < _TOKEN_LIMIT):
        raise _not_tokens(f"found `{int(tokens.min())}` to `{int(tokens.max())}`")
    return tokens.astype(np.int32)


def _listed(tokens: Sequence[int]) -> Sequence[int]:
    """A sequence that is no list, as it is; text and bytes are sequences, and no token ids."""
    if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not isinstance(tokens, Sequence):
        raise _not_tokens(f"found `{type(tokens).__name__}`")
    return tokens


def _not_tokens(found: str) -> ConfigError:
    return ConfigError(f"token ids must be integers of 31 bits, in a list or an integer array: {found}")


def _read_extras(extras: Mapping[int, bytes], blocks: int) -> Extras:
    """Extra content as a copy of the caller's, whose every frame is at a block of the prompt."""
    if not isinstance(extras, Mapping):
        raise ConfigError(f"extras: a mapping of framed bytes by block is needed, not `{type(extras).__name__}`")
    framed: dict[int, bytes] = {}
    for block, frame in extras.items():
        at = read_count("extras: block", block)
        if at >= blocks:
            raise ConfigError(f"extras: block `{at}` is not in the prompt, which has {blocks}")
        if not isinstance(frame, bytes) or not is_framed(frame):
            raise ConfigError(f"extras: block `{at}` has no framed bytes; make them with `extra_content.frame`")
        framed[at] = frame
    return framed
