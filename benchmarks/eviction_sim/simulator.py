"""A cache of prefix runs under one policy, and what it serves: the rules of the product's tree without its records.

    hits = simulate(stream, capacity_blocks, LeafHeap(stream, lru))   # blocks found, a request each

A request finds the longest cached prefix of its path. What it lacks is taken from the policy's victims, last block
first, and never from the path itself. Requests are served one at a time, in the stream's order.

- Only a run without cached continuations gives blocks up, so that what is cached can be reached (as the product's L7).
- Every request enters whole; a policy that would rather not keep it gives it up at the next request.
- Under LRU this is the product's tree block for block; `benchmarks/eviction.py` and a test compare them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container
from typing import Protocol

import numpy as np
from streams import NEVER, Stream, next_uses

Rank = tuple[float, ...]


class SimulatedPolicy(Protocol):
    """Chooses victims. `cached` and `children` are the simulator's own lists, read only."""

    def start(self, cached: list[int], children: list[int]) -> None:
        """A new, empty cache."""

    def victim(self, now_us: int, pinned: Container[int]) -> int:
        """A cached run without cached continuations, outside `pinned`."""

    def gone(self, run: int, now_us: int) -> None:
        """The last block of `run` has been given up."""

    def served(self, number: int, found: int, now_us: int) -> None:
        """Request `number` has been served; the first `found` runs of its path were cached whole."""


def simulate(stream: Stream, capacity: int, policy: SimulatedPolicy) -> list[int]:
    """The blocks that each request finds in a pool of `capacity` blocks."""
    length, parent = stream.length, stream.parent
    cached, children = [0] * len(length), [0] * len(length)
    policy.start(cached, children)
    free, hits = capacity, []
    for number, path in enumerate(stream.paths):
        now_us = stream.at_us[number]
        hit, whole = 0, 0
        for run in path:
            hit += cached[run]
            if cached[run] < length[run]:
                break
            whole += 1
        lacking = len(stream.chains[number]) - hit
        pinned = set(path)
        while free < lacking:
            victim = policy.victim(now_us, pinned)
            taken = min(cached[victim], lacking - free)
            cached[victim] -= taken
            free += taken
            if not cached[victim]:
                if parent[victim] >= 0:
                    children[parent[victim]] -= 1
                policy.gone(victim, now_us)
        free -= lacking
        before = -1
        for run in path:
            if not cached[run] and before >= 0:
                children[before] += 1
            cached[run] = length[run]
            before = run
        policy.served(number, whole, now_us)
        hits.append(hit)
    return hits


class LeafHeap:
    """Victims by a rank that is set when a run is used; the lowest goes first, of equals the deepest.

    `rank(state, run)` may read anything in `state`, a `Uses`. `age` tells it of what goes, for policies with a clock.
    """

    def __init__(self, stream: Stream, rank: Callable[[Uses, int], Rank]) -> None:
        self._stream, self._rank = stream, rank
        self._depth, self._parent = stream.depth, stream.parent

    def start(self, cached: list[int], children: list[int]) -> None:
        """A new, empty cache."""
        self._cached, self._children = cached, children
        self.uses = Uses(self._stream)
        self._ranks: list[Rank] = [()] * len(cached)
        self._heap: list[tuple[Rank, int, int]] = []

    def victim(self, now_us: int, pinned: Container[int]) -> int:
        """The lowest rank among the leaves; entries that are out of date are dropped on the way."""
        heap, ranks = self._heap, self._ranks
        put_back = []
        while True:
            entry = heap[0]
            rank, _, run = entry
            if self._children[run] or not self._cached[run] or ranks[run] != rank:
                heapq.heappop(heap)
            elif run in pinned:
                put_back.append(heapq.heappop(heap))
            else:
                break
        for kept in put_back:
            heapq.heappush(heap, kept)
        return run

    def gone(self, run: int, now_us: int) -> None:
        """Its parent may be a leaf now."""
        self.uses.gone(run, self._ranks[run])
        parent = self._parent[run]
        if parent >= 0 and not self._children[parent] and self._cached[parent]:
            self._enter(parent)

    def served(self, number: int, found: int, now_us: int) -> None:
        """Every run of the path has a new rank; its end is a leaf where nothing goes on from it."""
        path = self._stream.paths[number]
        self.uses.served(number, path, now_us)
        for run in path:
            self._ranks[run] = self._rank(self.uses, run)
        if not self._children[path[-1]]:
            self._enter(path[-1])

    def _enter(self, run: int) -> None:
        heapq.heappush(self._heap, (self._ranks[run], -self._depth[run], run))


class Uses:
    """What the heap's ranks may know: per run its uses since it entered, when it entered and was last used."""

    def __init__(self, stream: Stream) -> None:
        count = len(stream.length)
        self.stream = stream
        self.count = [0] * count  # later requests that attached it
        self.entered = [-1] * count
        self.last = [-1] * count
        self.clock = 0.0  # the highest rank given up, for policies that age
        self.next: list[int] = []  # the next request that uses it; offline policies fill and read it

    def served(self, number: int, path: list[int], now_us: int) -> None:
        """Count a use of every run of the path."""
        for run in path:
            if self.entered[run] < 0:
                self.entered[run] = number
                self.count[run] = 0
            else:
                self.count[run] += 1
            self.last[run] = number

    def gone(self, run: int, rank: Rank) -> None:
        """Forget the run; what stays is worth at least as much."""
        self.entered[run] = -1
        self.clock = max(self.clock, rank[0])


def lru(uses: Uses, run: int) -> Rank:
    """Least recently used."""
    return (uses.last[run],)


def offline_optimum(stream: Stream) -> LeafHeap:
    """Belady: the run whose next use is farthest, the deepest of equals. For equal costs no policy finds more.

    A run is used whenever one below it is, so its next use is never later than theirs: the leaf always goes first, and
    the rule that binds the cache costs the optimum nothing (docs/concepts/policy/eviction.md).
    """
    return _Foresight(stream, lambda uses, run: (-uses.next[run],))


def knows_dead(stream: Stream) -> LeafHeap:
    """LRU that is told, at each use, only whether there will ever be another."""
    return _Foresight(stream, lambda uses, run: (float(uses.next[run] < NEVER), uses.last[run]))


def guesses_next_use(stream: Stream, factor: float) -> LeafHeap:
    """Belady that is told each next use only roughly: its distance in time is off by about `factor`, either way."""
    return _Guess(stream, factor)


class _Foresight(LeafHeap):
    """Ranks that read the future."""

    def start(self, cached: list[int], children: list[int]) -> None:
        """A new cache, and the whole stream's next uses."""
        super().start(cached, children)
        self.uses.next = [NEVER] * len(cached)
        self._coming = next_uses(self._stream)

    def served(self, number: int, found: int, now_us: int) -> None:
        """Look ahead for every run of the path."""
        for run, coming in zip(self._stream.paths[number], self._coming[number], strict=True):
            self.uses.next[run] = coming
        super().served(number, found, now_us)


class _Guess(_Foresight):
    """One guess a request, so that all runs of a path are off alike."""

    def __init__(self, stream: Stream, factor: float) -> None:
        super().__init__(stream, self._guessed)
        self._errors = np.random.default_rng(1).lognormal(0, math.log(factor), len(stream.paths)).tolist()

    def _guessed(self, uses: Uses, run: int) -> Rank:
        coming, number = uses.next[run], uses.last[run]
        if coming >= NEVER:
            return (-math.inf,)
        now_us = self._stream.at_us[number]
        return (-(now_us + (self._stream.at_us[coming] - now_us) * self._errors[number]),)
