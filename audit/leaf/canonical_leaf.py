"""A leaf, and what events need to become one; `leaf_schema` defines its content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import orjson

from kvcustody.errors import LedgerError

LEAF_BYTES_MAX = 8192
HANDOVER_BYTES_MAX = 1 << 15  # two post-quantum keys, a signature of each: a handover is not continued
_CANONICAL = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER


class PseudonymSource(Protocol):
    """Provides the random pseudonym of a subject, or of a session (stored with its subject)."""

    def __call__(self, tenant: str, subject: str, session: str = "") -> str:
        """Return the pseudonym, created on first use."""


class Context(NamedTuple):
    """What turns an incarnation's events into leaves. `sign`: returns the signature of an order's leaf
    (`signed_orders`).
    """

    incarnation: str
    offset_us: int
    pseudonym: PseudonymSource
    sign: Callable[[bytes], str] | None = None


class Leaf(NamedTuple):
    """One canonical leaf: its log, its decoded body and its bytes."""

    log: str
    body: dict[str, Any]
    data: bytes


def parse(data: bytes) -> Leaf:
    """Return a leaf from its bytes; raises `LedgerError` if they are not a leaf."""
    try:
        body = orjson.loads(data)
        return Leaf(body["log"], body, data)
    except (ValueError, KeyError, TypeError) as problem:
        raise LedgerError("bytes that are not a leaf were found in a spill") from problem


def canonical(body: dict[str, Any]) -> bytes:
    """Return the canonical bytes of a leaf body; raises `LedgerError` if the profile forbids a value."""
    try:
        return orjson.dumps(body, option=_CANONICAL)
    except (TypeError, ValueError) as problem:
        raise LedgerError(f"`{body.get('kind')}` cannot be written as a canonical leaf: {problem}") from problem
