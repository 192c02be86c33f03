"""The work that every peer is given: points, prompts, and the contract a peer fulfils.

1. Every peer of a run receives the very same prompt objects, in the same order.
2. A prompt is a Python list of ints, as an engine core holds it after decoding a request.
3. At a hit of X %, the first X % of a prompt's whole blocks are those of one warmed prompt; every other token
   is drawn anew, so a longer match has no chance worth naming.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np

BLOCK_TOKENS = 16
VOCABULARY = 128_000
PoolState = Literal["fresh", "evicting"]


class Peer(Protocol):
    """A block manager under test; one object is one pool and its prefix index."""

    def run_request(self, tokens: list[int]) -> int:
        """One request's whole path, from token list to release; returns the tokens that hit."""

    def warm(self, tokens: list[int]) -> None:
        """Leave `tokens` cached and unreferenced."""

    def cached_blocks(self) -> int:
        """Blocks that a look-up could return now."""

    def drain(self, *, whole: bool = False) -> int:
        """Make leaves of the events that the timed path queued, if another thread would now, or of the `whole` queue.

        Returns how many leaves it made.
        """

    def decode_setup(self, prompts: list[list[int]]) -> None:
        """Start one running sequence per prompt, its prompt computed."""

    def decode_step(self, tokens: list[int]) -> None:
        """Extend every running sequence by one token: slots, then the token's bookkeeping."""


class Point(NamedTuple):
    """One line of the table."""

    tokens: int
    hit_percent: int
    pool: PoolState

    @property
    def name(self) -> str:
        """`tokens/hit/pool`."""
        return f"{self.tokens}/{self.hit_percent}/{self.pool}"

    @property
    def blocks(self) -> int:
        """Whole blocks of a prompt."""
        return self.tokens // BLOCK_TOKENS

    @property
    def hit_blocks(self) -> int:
        """Whole blocks shared with the warmed prompt."""
        return self.blocks * self.hit_percent // 100

    @property
    def new_blocks(self) -> int:
        """Blocks that a request must allocate and will publish."""
        return self.blocks - self.hit_blocks


POINTS = tuple(
    Point(tokens, hit, pool) for pool in ("fresh", "evicting") for tokens in (1024, 8192, 32768) for hit in (0, 50, 90)
)


class Prompts:
    """A seeded source of prompts."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def unique(self, tokens: int) -> list[int]:
        """A prompt that shares nothing with any other."""
        prompt: list[int] = self._random.integers(0, VOCABULARY, tokens).tolist()
        return prompt

    def sharing(self, warmed: list[int], point: Point) -> list[int]:
        """A prompt of the point's length that shares the point's hit blocks with `warmed`."""
        shared = point.hit_blocks * BLOCK_TOKENS
        return warmed[:shared] + self.unique(point.tokens - shared)

    def staggered(self, count: int, tokens: int) -> list[list[int]]:
        """Prompts whose lengths spread over a block, so that each decode step crosses as many block ends."""
        return [self.unique(tokens + i % BLOCK_TOKENS) for i in range(count)]
