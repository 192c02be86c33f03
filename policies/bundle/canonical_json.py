"""Canonical JSON (RFC 8785) for what is signed: one spelling for a value, and every other spelling refused.

1. `encode` writes the subset without floats: objects with ASCII keys, arrays, strings, booleans, null, and integers
   below 2^53.
2. `decode` accepts exactly the bytes that `encode` would write, so white space, duplicate or unsorted keys, other
   escapes and other spellings of a number never reach what reads the value.
"""

from __future__ import annotations

import json
from typing import Any

from kvcustody.errors import PolicyError

EXACT = 1 << 53
_DEPTH_MAX = 16


class BundleRejected(PolicyError):  # noqa: N818, a verdict, as in the tree's `LedgerUnavailable`
    """Bytes that were to be trusted are malformed, not signed by whom the trust configuration asks, or out of date."""

    code = "KVC111"


def encode(value: Any) -> bytes:
    """The canonical bytes of a value; raises `BundleRejected` where the subset has none for it."""
    _check(value, 0)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except UnicodeEncodeError:
        raise BundleRejected("canonical form: a text holds half of a surrogate pair") from None


def decode(data: bytes, what: str) -> dict[str, Any]:
    """The object that these canonical bytes are; `what` is how a refusal calls them. Raises `BundleRejected`."""
    try:
        value = json.loads(data.decode())
        canonical = encode(value)
    except (ValueError, RecursionError):
        raise BundleRejected(f"{what} is not JSON") from None
    except BundleRejected as error:
        raise BundleRejected(f"{what}: {error.message}") from None
    if canonical != data:
        raise BundleRejected(
            f"{what} is not in canonical form: it was edited, or written by something else than kvcustody"
        )
    if not isinstance(value, dict):
        raise BundleRejected(f"{what} is not an object")
    return value


def _check(value: Any, depth: int) -> None:
    kind = type(value)
    if depth > _DEPTH_MAX:
        raise BundleRejected(f"canonical form: deeper than {_DEPTH_MAX} levels")
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or not key.isascii():
                raise BundleRejected("canonical form: a key is not ASCII text")
            _check(item, depth + 1)
    elif kind in (list, tuple):
        for item in value:
            _check(item, depth + 1)
    elif kind is int:
        if not -EXACT < value < EXACT:
            raise BundleRejected(f"canonical form: the integer `{value}` is not below 2^53")
    elif kind not in (str, bool, type(None)):
        raise BundleRejected(f"canonical form: `{kind.__name__}` is not part of it")
