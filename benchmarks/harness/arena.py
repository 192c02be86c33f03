"""Where peers meet: equal pools, stocked alike, renewed before a fresh one would evict.

1. A `fresh` pool evicts nothing between two stockings, counted at each renewal and at the end.
2. An `evicting` pool is full of cached blocks before its first timed request, so every block it hands out was
   evicted.
3. Between stockings no object made by set-up is in the collector's sight.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from workload import BLOCK_TOKENS, Peer, Point, Prompts

SETTLE = 4  # untimed requests after stocking
FILL_TOKENS = 8192
FULL = 0.95  # a governed pool keeps a clean reserve

Factory = Callable[[int, int], Peer]


class Arena:
    """One set of peers over equal pools, given equal work."""

    def __init__(self, factories: dict[str, Factory], point: Point, pool_blocks: int, prompts: Prompts) -> None:
        self._factories = factories
        self.point = point
        self._pool_blocks = pool_blocks
        self._prompts = prompts
        self._stock()

    def is_used_up(self) -> bool:
        """Whether the next prompt would make a fresh pool evict: `renew` the pools first."""
        return self.point.pool == "fresh" and self._used + self.point.new_blocks > self._pool_blocks * FULL

    def renew(self) -> None:
        """Verify the pools and stock new ones."""
        self.verify()
        self._stock()

    def prompt(self) -> list[int]:
        """The next prompt."""
        self._used += self.point.new_blocks
        return self._prompts.sharing(self._warmed, self.point)

    def verify(self) -> None:
        """Raise unless each pool did what its name says since it was stocked."""
        for name, peer in self.peers.items():
            cached = peer.cached_blocks()
            if self.point.pool == "fresh" and cached != self._used:
                raise RuntimeError(f"{name} evicted in a fresh pool: {cached} blocks cached, {self._used} published")
            if self.point.pool == "evicting" and cached < self._pool_blocks * FULL:
                raise RuntimeError(
                    f"{name} had room in an evicting pool: {cached} of {self._pool_blocks} blocks cached"
                )

    def _stock(self) -> None:
        self.peers = {name: build(self._pool_blocks, BLOCK_TOKENS) for name, build in self._factories.items()}
        self._used = 0
        self._warmed = self._prompts.unique(self.point.tokens)
        while self.point.pool == "evicting" and self._used < self._pool_blocks * 1.05:
            self._warm(self._prompts.unique(FILL_TOKENS))
        if self.point.hit_blocks:
            self._warm(self._warmed)
        if self.point.pool == "evicting":
            self.verify()
        for _ in range(SETTLE):
            prompt = self._prompts.sharing(self._warmed, self.point)
            self._used += self.point.new_blocks
            for peer in self.peers.values():
                peer.run_request(prompt)
                peer.drain(whole=True)
        freeze_heap()

    def _warm(self, prompt: list[int]) -> None:
        self._used += len(prompt) // BLOCK_TOKENS
        for peer in self.peers.values():
            peer.warm(prompt)
            peer.drain()


def freeze_heap() -> None:
    """Put all that set-up made out of the collector's sight, and free what earlier points left."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
