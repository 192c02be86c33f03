"""Running keyed digests over a prompt: the block keys of one chain, and the longest match of a chain in the index.

The allocator never sees a key being made: it is given a primed hash state (BLAKE2b-256 keyed with the domain key,
RFC 7693; docs/concepts/keys.md) and only updates, copies and reads it.

    match = search(index, domain, state.copy(), prompt, 0, blocks, block_bytes)   # the longest run of known keys
    keys = keys_of(state, prompt, 0, blocks, block_bytes)                         # the keys to publish under

- The key of a block is the digest of the state at the block's end, over everything before it in its chain.
- A hit is searched in steps of 16 blocks, then block by block to its exact end; single keys are made only from there.
- Extra content of a block (an image's digest, a positional override) is framed into the state at the block's end.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Protocol

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.prefix.hash_index import COARSE_BLOCKS, PrefixIndex
from kvcustody.allocator.prefix.node import KEY_BYTES, Node


class HashState(Protocol):
    """The interface of `hashlib` objects."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Absorb bytes."""

    def digest(self) -> bytes:
        """Return the digest so far; more bytes may follow."""

    def copy(self) -> HashState:
        """Return an independent state."""


Extras = Mapping[int, bytes]
"""Framed extra content by block position in the prompt."""

_NO_EXTRAS: Extras = {}
_STRIDES = (8, 4, 2, 1)  # within one coarse step: at most 15 blocks are left, found in four digests


class Match:
    """The longest match of one chain: `blocks` matched, ending at block `position` of `node` (None: no match).

    `state` stands after the first block that did not match, whose key is `next_key` (None: the chain was matched to its
    end, and `state` stands there).
    """

    __slots__ = ("blocks", "domain", "next_key", "node", "position", "stale", "state")

    def __init__(
        self,
        domain: Domain,
        node: Node | None,
        position: int,
        blocks: int,
        state: HashState,
        next_key: bytes | None,
    ) -> None:
        self.domain = domain
        self.node = node
        self.position = position
        self.blocks = blocks
        self.stale = 0  # blocks that were found as well, past their time
        self.state = state
        self.next_key = next_key


def search(
    index: PrefixIndex,
    domain: Domain,
    state: HashState,
    data: bytes,
    first: int,
    last: int,
    block_bytes: int,
    extras: Extras = _NO_EXTRAS,
) -> Match:
    """Match blocks [first, last) of `data` (int32-LE token ids) as a chain that starts at block `first`.

    `state` is consumed. Cost: one digest per 16 matched blocks, then at most 16 more.
    """
    at, end = first * block_bytes, last * block_bytes
    if at >= end:
        return Match(domain, None, 0, 0, state, None)
    stripes, mask = index.stripes, index.mask
    update, digest = state.update, state.digest
    update(data[at : at + block_bytes])
    if extras and first in extras:
        update(extras[first])
    key = digest()
    node = stripes[hash(key) & mask].get(key)
    if node is None:
        return Match(domain, None, 0, 0, state, key)
    start = at
    at += block_bytes
    if not extras:
        step = COARSE_BLOCKS * block_bytes
        for edge in range(start + step, end + 1, step):
            mark = state.copy()
            state.update(data[at:edge])
            key = state.digest()
            found = stripes[hash(key) & mask].get(key)
            if found is None:
                state = mark
                break
            node, at = found, edge
    return _search_fine(
        index,
        Match(domain, node, 0, (at - start) // block_bytes, state, None),
        data,
        first,
        last,
        block_bytes,
        extras,
    )


def _search_fine(
    index: PrefixIndex, match: Match, data: bytes, first: int, last: int, block_bytes: int, extras: Extras
) -> Match:
    """Go on from a coarse match block by block to its exact end."""
    node, matched = match.node, match.blocks
    assert node is not None
    position = matched - node.start
    state = match.state
    at = (first + matched) * block_bytes
    if not extras:
        for stride in _STRIDES:
            if position + stride <= node.length and first + matched + stride <= last:
                mark = state.copy()
                state.update(data[at : at + stride * block_bytes])
                if node.keys.startswith(state.digest(), KEY_BYTES * (position + stride - 1)):
                    matched, position, at = matched + stride, position + stride, at + stride * block_bytes
                else:
                    state = mark
        match.state = state
    update, digest = state.update, state.digest
    for block in range(first + matched, last):
        update(data[at : at + block_bytes])
        if extras and block in extras:
            update(extras[block])
        key = digest()
        if position < node.length:
            if not node.keys.startswith(key, KEY_BYTES * position):
                match.next_key = key
                break
            position += 1
        else:
            found = index.get(key)
            if found is None:
                match.next_key = key
                break
            node, position = found, 1
        at += block_bytes
        matched += 1
    match.node, match.position, match.blocks = node, position, matched
    return match


def keys_of(
    state: HashState, data: bytes, first: int, last: int, block_bytes: int, extras: Extras = _NO_EXTRAS
) -> bytes:
    """Return the keys of blocks [first, last), 32 bytes each; `state` starts at block `first` and ends at `last`."""
    update, digest = state.update, state.digest
    count = last - first
    if count <= 0:
        return b""
    if extras:
        keys = bytearray()
        for block in range(first, last):
            update(data[block * block_bytes : (block + 1) * block_bytes])
            if block in extras:
                update(extras[block])
            keys += digest()
        return bytes(keys)
    pieces = struct.unpack(f"{block_bytes}s" * count, data[first * block_bytes : last * block_bytes])
    return b"".join([digest() for piece in pieces if update(piece) is None])
