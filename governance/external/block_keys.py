"""Block keys for an engine with an index of its own: one key a whole block, in the domains the reader may read.

`EnginePort.look_up` makes a request's keys with `look_up`; `KeyChain.extend` makes those of blocks that decoding fills.

- Keys come from the plan's primed states (docs/concepts/keys.md, "The hierarchy"); the running state goes on at decode,
  so nothing hashes twice.
- A prefix found through a grant keeps the owner's keys only as far as it can be attached. From there on the request's
  own chain continues, seeded with the last key. So nothing is ever published into the owner's domain.
- Engines with several layer groups get the own domain alone: a wider one needs one boundary for every group.
- An engine that looks keys up one by one may have them made so: what the look-up does not reach is made when the blocks
  are published.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import Domain, OwnerData
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.prefix.key_chain import Extras, HashState
from kvcustody.allocator.prefix.longest_prefix import Chain, Prompt, ReadPlan
from kvcustody.governance.request import pack_tokens
from kvcustody.policies.document.token_priorities import KindRange

_TOKEN = struct.Struct("<i")
_TOKEN_LIMIT = 1 << 31

Find = Callable[[bytes], int]
"""The block that the engine's index has under a key, or -1."""


class LookingUp(Protocol):
    """What a look-up tells of whoever attaches: an `ExternalResidency`."""

    expected: NDArray[np.int32] | int
    segment_blocks: int
    segment_domain: Domain | None
    granted_blocks: int


class Attaches(Protocol):
    """What says whether a block may be attached: an `ExternalPool`, or a forecast of one."""

    def attachable(self, blocks: Blocks, expected: NDArray[np.int32] | int, now_us: int) -> int:
        """How many leading blocks may be."""


_AHEAD_BLOCKS = 4  # made first by an iteration; then as many again as it has: what follows a hit often is one


class LazyKeys(list[bytes]):
    """Keys of a prompt's whole blocks in order, made as an iteration reaches them.

    Everything but iteration sees only those that were made; `complete` gives all.
    """

    __slots__ = ("_prompt", "_state")

    def __init__(self, state: HashState, prompt: Prompt) -> None:
        super().__init__()
        self._state = state
        self._prompt = prompt

    def __iter__(self) -> Iterator[bytes]:
        place, whole = 0, self._prompt.whole
        while place < whole:
            if place == len(self):
                self._make(min(max(2 * place, _AHEAD_BLOCKS), whole))
            yield self[place]
            place += 1

    def complete(self) -> list[bytes]:
        """All keys, in a list that is the caller's."""
        self._make(self._prompt.whole)
        return self[:]

    def _make(self, last: int) -> None:
        self.extend(_keys(self._state, self._prompt, len(self), last))


class RequestKeys(NamedTuple):
    """What a request may use of the engine's index.

    keys: 32 bytes for each whole block of the prompt, in order. readable: how many leading blocks may be read now.
    publishable: whether the blocks it fills may enter the index. whole: how many keys there are, made or not.
    """

    keys: list[bytes]
    readable: int
    publishable: bool
    whole: int = 0


NO_KEYS = RequestKeys([], 0, False)


class KeyChain(OwnerData):
    """One request's prompt, its keys, and the running state behind its last whole block."""

    __slots__ = (
        "epoch",
        "keys",
        "kinds",
        "prompt",
        "single_group",
        "source",
        "state",
        "tail",
        "until_utc_us",
    )

    def __init__(self, prompt: Prompt, *, single_group: bool, epoch: int, kinds: tuple[KindRange, ...] = ()) -> None:
        self.prompt = prompt
        self.kinds = kinds  # of content, as the caller says
        self.single_group = single_group
        self.epoch = epoch
        self.until_utc_us = 0  # when a grant or segment begins or ends next, as of the look-up
        self.keys: list[bytes] = []
        self.state: HashState | None = None
        self.source: Domain | None = None  # whose chain alone made `keys`; None where several did, or none yet
        self.tail = bytearray(prompt.data[prompt.whole * prompt.block_bytes :])

    def forget(self) -> None:
        """Drop the keys and the state they came from."""
        self.keys, self.state, self.source = [], None, None

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of blocks that further accepted tokens complete; `ConfigError` as `request.pack_tokens`."""
        if type(tokens) is list and len(tokens) == 1 and type(token := tokens[0]) is int and 0 <= token < _TOKEN_LIMIT:
            packed = _TOKEN.pack(token)
        else:
            packed = pack_tokens(tokens)
        if isinstance(self.keys, LazyKeys):
            self.keys = self.keys.complete()
        tail, size = self.tail, self.prompt.block_bytes
        if not tail and len(packed) == size and self.state is not None:  # one whole block
            self.state.update(packed)
            key = self.state.digest()
            self.keys.append(key)
            return [key]
        tail += packed
        if len(tail) < size:
            return []
        digests: list[bytes] = []
        state = self.state
        at = 0
        while len(tail) - at >= size:
            if state is not None:
                state.update(bytes(tail[at : at + size]))
                digests.append(state.digest())
            at += size
        del tail[:at]
        self.keys += digests
        return digests


def look_up(
    residency: LookingUp,
    chain: KeyChain,
    read: ReadPlan,
    pool: Attaches,
    find: Find,
    now_us: int,
    *,
    lazily: bool,
) -> RequestKeys:
    """The request's keys under `read`, and what its residency needs to know to attach and to be handed blocks.

    lazily: those of the own domain alone may be `LazyKeys`.
    """
    residency.segment_blocks, residency.segment_domain, residency.granted_blocks = 0, None, 0
    own = read.own
    if own.state is None:
        chain.forget()
        residency.expected = own.domain.tag
        return NO_KEYS
    several = chain.single_group and (read.segment is not None or bool(read.grants))
    if not several:
        if chain.source is not own.domain:
            chain.state = own.state.copy()
            chain.keys = LazyKeys(chain.state, chain.prompt)
            chain.source = own.domain
        if not lazily and isinstance(chain.keys, LazyKeys):
            chain.keys = chain.keys.complete()
        residency.expected = own.domain.tag
    else:
        _several(residency, chain, read, pool, find, now_us)
    whole = chain.prompt.whole
    return RequestKeys(chain.keys, min(chain.prompt.limit, whole), True, whole)


def _several(residency: LookingUp, chain: KeyChain, read: ReadPlan, pool: Attaches, find: Find, now_us: int) -> None:
    """Segment, own, grants by id: the longest match wins, ties go to the own domain."""
    prompt, own = chain.prompt, read.own
    assert own.state is not None
    first, keys, tags = 0, [], []
    state = own.state.copy()
    if read.segment is not None and read.segment.state is not None and read.segment_blocks:
        first = min(read.segment_blocks, prompt.whole)
        keys = _keys(read.segment.state.copy(), prompt, 0, first)
        tags = [read.segment.domain.tag] * first
        state.update(keys[-1])
        residency.segment_blocks, residency.segment_domain = first, read.segment.domain
    seed = keys[-1] if keys else b""
    fresh = state.copy()
    mine = _keys(state, prompt, first, prompt.whole)
    best, through = _matched(mine, own.domain, prompt.limit - first, pool, find, now_us), None
    for grant in read.grants:
        owner = grant.domain.owner
        if owner.used_blocks >= owner.limit_blocks:
            continue  # the owner is at its cap: granted attaches miss
        matched = _through(grant, seed, prompt, first, pool, find, now_us)
        if len(matched) > best:
            best, through = len(matched), (grant.domain, matched)
    if through is not None:
        domain, matched = through
        keys = keys + matched
        tags += [domain.tag] * best
        state = fresh
        assert own.state is not None
        state = own.state.copy()
        state.update(matched[-1])
        first += best
        residency.granted_blocks = first
        mine = _keys(state, prompt, first, prompt.whole)
    chain.keys, chain.state, chain.source = keys + mine, state, None
    residency.expected = np.array(tags + [own.domain.tag] * len(mine), dtype=np.int32)


def _matched(keys: list[bytes], domain: Domain, limit: int, pool: Attaches, find: Find, now_us: int) -> int:
    """How many leading keys the index has, in blocks that may be attached."""
    blocks: list[int] = []
    for key in keys[: max(limit, 0)]:
        block = find(key)
        if block < 0:
            break
        blocks.append(block)
    if not blocks:
        return 0
    which: NDArray[np.int64] = np.array(blocks, dtype=np.int64)
    return pool.attachable(which, domain.tag, now_us)


def _through(
    grant: Chain, seed: bytes, prompt: Prompt, first: int, pool: Attaches, find: Find, now_us: int
) -> list[bytes]:
    """The owner's keys of what a grant lets the reader attach; hashing stops at the first miss."""
    assert grant.state is not None
    state = grant.state.copy()
    if seed:
        state.update(seed)
    keys: list[bytes] = []
    blocks: list[int] = []
    size = prompt.block_bytes
    for block in range(first, prompt.limit):
        state.update(prompt.data[block * size : (block + 1) * size])
        if block in prompt.extras:
            state.update(prompt.extras[block])
        key = state.digest()
        found = find(key)
        if found < 0:
            break
        keys.append(key)
        blocks.append(found)
    if not blocks:
        return []
    return keys[: pool.attachable(np.array(blocks, dtype=np.int64), grant.domain.tag, now_us)]


def _keys(state: HashState, prompt: Prompt, first: int, last: int) -> list[bytes]:
    """The keys of blocks [first, last); `state` stands at block `first` and is left at `last`."""
    if last <= first:
        return []
    size, data, extras = prompt.block_bytes, prompt.data, prompt.extras
    update, digest = state.update, state.digest
    if extras:
        return _keys_with_extras(state, prompt, first, last, extras)
    pieces = struct.unpack(f"{size}s" * (last - first), data[first * size : last * size])
    return [digest() for piece in pieces if update(piece) is None]


def _keys_with_extras(state: HashState, prompt: Prompt, first: int, last: int, extras: Extras) -> list[bytes]:
    size, keys = prompt.block_bytes, []
    for block in range(first, last):
        state.update(prompt.data[block * size : (block + 1) * size])
        if block in extras:
            state.update(extras[block])
        keys.append(state.digest())
    return keys
