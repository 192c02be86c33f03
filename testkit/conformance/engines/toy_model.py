"""A toy model whose K/V depends on the whole prefix, and whose output depends on every byte that it reads.

1. K/V of a position is a function of the writer's canary, of every token up to it and of the position, and is never
   0.
2. A token that it says is a function of the K/V of every earlier position, as read from the blocks: one wrong, stale,
   foreign or missing byte changes it.
3. Real models write the same K/V for everybody; the canary makes a foreign block visible where token counts would
   not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 4096
LANES = 4  # int32 values of one position in K and in V, on each shard
_WORD = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


def canary_of(name: str) -> int:
    """Return sixty-four bits that mark everything written by one tenant's requests."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def prefix_states(canary: int, tokens: Sequence[int], known: list[int] | None = None) -> list[int]:
    """Return one 64-bit state per position, of the canary and every token up to it. `known` is extended."""
    states = [] if known is None else known
    state = states[-1] if states else canary
    for token in tokens[len(states) :]:
        state = ((state ^ (token + 1)) * _ODD + 1) & _WORD
        state ^= state >> 29
        states.append(state)
    return states


def rows(states: Sequence[int], shard: int) -> NDArray[np.int32]:
    """Return the K/V of consecutive positions on one shard: [2, positions, LANES], int32, without zeros."""
    seeds = np.array(states, dtype=np.uint64)[None, :, None]
    lanes = np.arange(2 * LANES, dtype=np.uint64).reshape(2, 1, LANES) + np.uint64(2 * LANES * shard + 1)
    mixed = _mix(seeds + lanes * np.uint64(_ODD))
    return (mixed >> np.uint64(33)).astype(np.int32) | 1


def say(read: NDArray[np.int64]) -> int:
    """Return the next token from all K/V read: [shards, 2, positions, LANES], int64."""
    weights = np.arange(read.size, dtype=np.uint64).reshape(read.shape) * np.uint64(2) + np.uint64(1)
    total = (read.astype(np.uint64) * weights).sum(dtype=np.uint64)
    return int(_mix(np.array([total]))[0] % np.uint64(VOCABULARY))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
