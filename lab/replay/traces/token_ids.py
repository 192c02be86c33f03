"""Expands trace block ids into token ids: a pure function of the id, by counter, one numpy pass a request.

1. Different ids give different blocks (the first two tokens spell the id), equal ids equal blocks, on every machine.
2. Every token is below `VOCABULARY`, as an engine's would be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcustody.lab.replay.traces.model import BlockIds

VOCABULARY_BITS = 17
VOCABULARY = 1 << VOCABULARY_BITS
_MASK = np.uint32(VOCABULARY - 1)
MAX_ID = 1 << (2 * VOCABULARY_BITS)

Tokens = NDArray[np.int32]


def expand(blocks: BlockIds, block_tokens: int, *, tail_tokens: int = 0, tail_key: int = 0) -> Tokens:
    """Return token ids of `blocks`, `block_tokens` each, then `tail_tokens` drawn from `tail_key` (a partial last
    block).
    """
    assert block_tokens >= 2, "two tokens spell the id"
    count = len(blocks)
    tokens = np.empty(count * block_tokens + tail_tokens, dtype=np.int32)
    if count:
        if int(blocks.max()) >= MAX_ID or int(blocks.min()) < 0:
            raise ValueError(f"block ids must be from 0 to {MAX_ID - 1}, got `{int(blocks.max())}`")
        body = tokens[: count * block_tokens].reshape(count, block_tokens)
        seeds = (blocks ^ (blocks >> 32)).astype(np.uint32)
        counters = seeds[:, None] * np.uint32(block_tokens) + np.arange(block_tokens, dtype=np.uint32)[None, :]
        body[:] = _mix(counters.astype(np.uint32, copy=False))
        body[:, 0] = blocks & (VOCABULARY - 1)
        body[:, 1] = blocks >> VOCABULARY_BITS
    if tail_tokens:
        counter = np.arange(tail_tokens, dtype=np.uint32) + np.uint32((tail_key * 0x9E3779B1) & 0xFFFFFFFF)
        tokens[count * block_tokens :] = _mix(counter)
    return tokens


def _mix(value: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return a cheap 32-bit finaliser, cut to the vocabulary; quality beyond "looks unlike text" is not needed."""
    value = value * np.uint32(0x9E3779B1)
    value ^= value >> np.uint32(15)
    return value & _MASK
