"""Declared segments: prompt prefixes that an operator declared wider than their scope, recognised on the server.

- A segment is matched by a keyed digest over the token ids at the prompt's start. No caller names, hints or supplies
  one.
- The digest covers the whole blocks that end at least 8 tokens before the declared text ends. The margin is needed
  because a tokenizer may merge across the text's end.
- The key derives from the owner's epoch secret, the model and the block size. So a digest reveals nothing about the
  text, and ends with the epoch.
- At most 16 candidates are searched; one short hash of the first block decides whether any could match.

A policy stores a segment as its declared token count and 64 hex digits: 16 of the first block's digest, then 48 of the
digest at the last covered block. Both parts are compared, 256 bits together.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.errors import ConfigError, KeyringError
from kvcustody.governance.identity import tlv
from kvcustody.governance.identity.domain_spec import KeyOwner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KeyBuffer

MARGIN_TOKENS = 8
CANDIDATES_MAX = 16
_TOKEN_BYTES = 4
_FIRST_BYTES = 8
_REST_BYTES = 24
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DeclaredSegment(NamedTuple):
    """What `kvcustody policy segment add` writes into a policy: `digest` of 64 hex digits, and `tokens`."""

    digest: str
    tokens: int
    blocks: int
    epoch: int


class Candidate(NamedTuple):
    """A segment rule that is open to a reader: its policy id, its owner, and its stored digest."""

    id: str
    owner: KeyOwner
    digest: str
    tokens: int


class SegmentMatch(NamedTuple):
    """The longest segment that the prompt begins with, and the whole blocks it covers."""

    id: str
    owner: KeyOwner
    blocks: int


class _Shape(NamedTuple):
    """One candidate as searched: in order of length, then id."""

    blocks: int
    id: str
    rest: bytes


class _Group(NamedTuple):
    """The candidates under one owner's epoch, by the digest of their first block."""

    owner: KeyOwner
    primed: hashlib.blake2b
    by_first: dict[bytes, list[_Shape]]


class SegmentMatcher:
    """The candidates of one (reader, policy revision, model), primed once and searched per request.

    Build it anew when the policy or an owner's key epochs change. Every readable epoch of an owner is tried. So a
    segment keeps matching through a rotation, until the epoch that it was declared under is destroyed.
    """

    def __init__(self, keyring: Keyring, candidates: Iterable[Candidate], *, model: bytes, block_tokens: int) -> None:
        listed = tuple(candidates)
        if len(listed) > CANDIDATES_MAX:
            raise ConfigError(
                f"`{len(listed)}` segments are open to one tenant, at most {CANDIDATES_MAX}",
                count=len(listed),
            )
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._groups: list[_Group] = []
        for owner in dict.fromkeys(candidate.owner for candidate in listed):
            by_first = _by_first_block([c for c in listed if c.owner == owner], block_tokens)
            for epoch in keyring.epochs(owner) if by_first else ():
                primed = _primed(keyring, owner, epoch, model, block_tokens)
                self._groups.append(_Group(owner, primed, by_first))

    def match(self, tokens: bytes | memoryview) -> SegmentMatch | None:
        """The longest declared segment at the start of `tokens` (int32-LE), ties to the lowest id."""
        if not self._groups:
            return None
        prompt = memoryview(tokens).cast("B")
        if len(prompt) < self._block_bytes:
            return None
        best: SegmentMatch | None = None
        for owner, primed, by_first in self._groups:
            state = primed.copy()
            state.update(prompt[: self._block_bytes])
            shapes = by_first.get(state.digest()[:_FIRST_BYTES])
            found = None if shapes is None else self._longest(state, shapes, prompt)
            if found is not None and (best is None or (-found.blocks, found.id) < (-best.blocks, best.id)):
                best = SegmentMatch(found.id, owner, found.blocks)
        return best

    def __bool__(self) -> bool:
        return bool(self._groups)

    def _longest(self, state: hashlib.blake2b, shapes: Sequence[_Shape], prompt: memoryview) -> _Shape | None:
        """Hash on from the first block through each candidate's end, shortest first."""
        best: _Shape | None = None
        hashed = self._block_bytes
        for shape in shapes:
            end = shape.blocks * self._block_bytes
            if end > len(prompt):
                break
            state.update(prompt[hashed:end])
            hashed = end
            longer = best is None or shape.blocks > best.blocks
            if hmac.compare_digest(state.digest()[:_REST_BYTES], shape.rest) and longer:
                best = shape
        return best


def declare(
    keyring: Keyring,
    owner: KeyOwner,
    tokens: Sequence[int] | NDArray[np.integer],
    *,
    model: bytes,
    block_tokens: int,
) -> DeclaredSegment:
    """The digest of declared text, under the owner's current epoch."""
    blocks = covered_blocks(len(tokens), block_tokens)
    if blocks == 0:
        needed = block_tokens + MARGIN_TOKENS
        raise ConfigError(
            f"segment of `{len(tokens)}` tokens is too short; a whole block needs at least {needed}",
            tokens=len(tokens),
        )
    epoch = keyring.current(owner)
    if epoch is None:
        raise KeyringError(f"{owner}: has no key epoch to declare a segment under", owner=owner)
    prompt = np.asarray(tokens[: blocks * block_tokens], dtype="<i4").tobytes()
    state = _primed(keyring, owner, epoch, model, block_tokens)
    state.update(prompt[: block_tokens * _TOKEN_BYTES])
    first = state.digest()[:_FIRST_BYTES]
    state.update(prompt[block_tokens * _TOKEN_BYTES :])
    digest = first + state.digest()[:_REST_BYTES]
    return DeclaredSegment(digest.hex(), len(tokens), blocks, epoch)


def covered_blocks(tokens: int, block_tokens: int) -> int:
    """Return the number of whole blocks that a declared text of `tokens` covers."""
    return max(0, tokens - MARGIN_TOKENS) // block_tokens


def _by_first_block(candidates: Iterable[Candidate], block_tokens: int) -> dict[bytes, list[_Shape]]:
    by_first: dict[bytes, list[_Shape]] = {}
    for candidate in candidates:
        if _DIGEST.fullmatch(candidate.digest) is None:
            raise ConfigError(f"segment `{candidate.id}`: the digest is not 64 hex digits", id=candidate.id)
        blocks = covered_blocks(candidate.tokens, block_tokens)
        if blocks > 0:  # declared for a smaller block size otherwise, and a miss here
            digest = bytes.fromhex(candidate.digest)
            shape = _Shape(blocks, candidate.id, digest[_FIRST_BYTES:])
            by_first.setdefault(digest[:_FIRST_BYTES], []).append(shape)
    for shapes in by_first.values():
        shapes.sort()
    return by_first


def _primed(keyring: Keyring, owner: KeyOwner, epoch: int, model: bytes, block_tokens: int) -> hashlib.blake2b:
    """A hash state keyed for one owner, epoch, model and block size, with nothing hashed yet."""
    info = tlv.encode("kvcustody/segment-key", 1, {1: model, 2: block_tokens})
    with KeyBuffer() as key:
        keyring.derive(owner, epoch, info, key)
        return hashlib.blake2b(key=key.view(), digest_size=32)
