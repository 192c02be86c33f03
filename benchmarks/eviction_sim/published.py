"""Eviction policies from the literature that the product does not have, over the leaves of a prefix forest.

Objects are runs of blocks and weigh as many blocks as they have. Where a policy would take a run that has cached
continuations, the run is passed over: the leaf rule is the cache's, not the policy's. Nothing here is tuned; every
parameter is its paper's.

    PUBLISHED["sieve"](stream)      # a policy for `simulator.simulate`
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Container

from simulator import LeafHeap, Rank, SimulatedPolicy, Uses
from streams import Stream

ATTENTION_TOKENS = 30_600
"""The position at which a token's attention costs as much as the rest of the model: Llama-3.1-8B, from its shapes."""


def gdsf(uses: Uses, run: int) -> Rank:
    """GreedyDual-Size-Frequency: clock + uses × cost / size. Cherkasova, HP Labs HPL-98-69R1, 1998."""
    position = (uses.stream.depth[run] + uses.stream.length[run] / 2) * uses.stream.block_tokens
    cost_per_block = 1 + position / ATTENTION_TOKENS
    return (uses.clock + (1 + uses.count[run]) * cost_per_block, uses.last[run])


class _Queued:
    """What the queue-based policies share: the forest, and which runs are leaves."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def start(self, cached: list[int], children: list[int]) -> None:
        """A new, empty cache."""
        self._cached, self._children = cached, children
        self._setup()

    def _setup(self) -> None:
        """Empty queues."""

    def _evictable(self, run: int, pinned: Container[int]) -> bool:
        return not self._children[run] and bool(self._cached[run]) and run not in pinned


class Sieve(_Queued):
    """SIEVE: one queue in order of entry, a hand that clears marks. Zhang et al., NSDI 2024."""

    def _setup(self) -> None:
        self._queue: OrderedDict[int, bool] = OrderedDict()  # oldest first; whether it was visited
        self._hand: list[int] = []  # what the hand has yet to pass, next last

    def victim(self, now_us: int, pinned: Container[int]) -> int:
        """Move the hand until it meets an unvisited leaf."""
        queue = self._queue
        while True:
            if not self._hand:
                self._hand = list(reversed(queue))
            run = self._hand[-1]
            if run in queue and self._evictable(run, pinned) and not queue[run]:
                return run
            if run in queue and run not in pinned and not self._children[run]:
                queue[run] = False
            self._hand.pop()

    def gone(self, run: int, now_us: int) -> None:
        """It leaves the queue."""
        del self._queue[run]

    def served(self, number: int, found: int, now_us: int) -> None:
        """Mark what was there, enter what was not, leaf first."""
        for run in reversed(self._stream.paths[number]):
            self._queue[run] = run in self._queue


class S3Fifo(_Queued):
    """S3-FIFO: a small queue of 10 %, a main queue with two-bit counts, a ghost queue. Yang et al., SOSP 2023."""

    def _setup(self) -> None:
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._blocks = [0, 0]  # in small, in main

    def victim(self, now_us: int, pinned: Container[int]) -> int:
        """From the small queue while it has more than its tenth, else from the main one; only leaves are seen."""
        while True:
            small_first = self._blocks[0] * 10 > sum(self._blocks)
            queue, run = self._small, self._first(self._small, pinned) if small_first else -1
            if run < 0:
                queue, run = self._main, self._first(self._main, pinned)
            if run < 0:
                return self._first(self._small, pinned)
            if queue is self._small and queue[run] > 1:
                self._move(run)
            elif queue is self._main and queue[run]:
                queue[run] -= 1
                queue.move_to_end(run)
            else:
                return run

    def _first(self, queue: OrderedDict[int, int], pinned: Container[int]) -> int:
        cached, children = self._cached, self._children
        for run in queue:
            if not children[run] and cached[run] and run not in pinned:
                return run
        return -1

    def _move(self, run: int) -> None:
        del self._small[run]
        self._main[run] = 0
        self._blocks[0] -= self._stream.length[run]
        self._blocks[1] += self._stream.length[run]

    def gone(self, run: int, now_us: int) -> None:
        """What leaves the small queue is remembered as a ghost, as many as the main queue has."""
        at = 0 if run in self._small else 1
        (self._small, self._main)[at].pop(run)
        self._blocks[at] -= self._stream.length[run]
        if at == 0:
            self._ghost[run] = None
            while len(self._ghost) > len(self._main) + 1:
                self._ghost.popitem(last=False)

    def served(self, number: int, found: int, now_us: int) -> None:
        """Count a use, or enter, leaf first: into the main queue where a ghost is remembered."""
        for run in reversed(self._stream.paths[number]):
            if run in self._small:
                self._small[run] = min(3, self._small[run] + 1)
            elif run in self._main:
                self._main[run] = min(3, self._main[run] + 1)
            elif run in self._ghost:
                del self._ghost[run]
                self._main[run] = 0
                self._blocks[1] += self._stream.length[run]
            else:
                self._small[run] = 0
                self._blocks[0] += self._stream.length[run]


class Arc(_Queued):
    """ARC: recency against frequency, balanced by ghosts of both. Megiddo and Modha, FAST 2003."""

    def _setup(self) -> None:
        self._lists: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._ghosts: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._blocks = [0, 0]
        self._target = 0.0  # blocks that the recency list may have

    def victim(self, now_us: int, pinned: Container[int]) -> int:
        """The oldest leaf of the list that is over its share, else of the other."""
        first = 0 if self._blocks[0] > self._target else 1
        for at in (first, 1 - first):
            for run in self._lists[at]:
                if self._evictable(run, pinned):
                    return run
        raise AssertionError("nothing can be evicted")

    def gone(self, run: int, now_us: int) -> None:
        """It becomes a ghost of the list it was in."""
        at = 0 if run in self._lists[0] else 1
        del self._lists[at][run]
        self._blocks[at] -= self._stream.length[run]
        ghosts = self._ghosts[at]
        ghosts[run] = None
        while len(ghosts) > len(self._lists[0]) + len(self._lists[1]):
            ghosts.popitem(last=False)

    def served(self, number: int, found: int, now_us: int) -> None:
        """A use moves a run to the frequency list; a ghost moves the target too. Leaf first, so it is the older."""
        for run in reversed(self._stream.paths[number]):
            size = self._stream.length[run]
            at = 0 if run in self._lists[0] else 1 if run in self._lists[1] else -1
            if at >= 0:
                del self._lists[at][run]
                self._blocks[at] -= size
            to = int(at >= 0)
            for ghost in (0, 1):
                if at < 0 and run in self._ghosts[ghost]:
                    del self._ghosts[ghost][run]
                    self._adapt(ghost, size)
                    to = 1
            self._lists[to][run] = None
            self._blocks[to] += size

    def _adapt(self, ghost: int, size: int) -> None:
        ours, others = len(self._ghosts[ghost]) + 1, len(self._ghosts[1 - ghost]) + 1
        step = size * max(1.0, others / ours)
        self._target = max(0.0, self._target + (step if ghost == 0 else -step))
        self._target = min(self._target, float(sum(self._blocks)))


class Lhd(_Queued):
    """LHD: hits per block and time, learned by age for classes of reuse. Beckmann, Chen and Cidon, NSDI 2018.

    Classes are the runs' counts of uses, ages powers of the square root of two; the densities are made anew every 512
    requests, as the paper's are from time to time. Every leaf is ranked, where the paper samples.
    """

    _CLASSES, _AGES, _EVERY = 6, 64, 512

    def _setup(self) -> None:
        count = len(self._stream.length)
        self._uses, self._last = [0] * count, [0] * count
        self._entered = [False] * count
        self._leaves: dict[int, None] = {}
        self._hits = [[0.0] * self._AGES for _ in range(self._CLASSES)]
        self._ends = [[0.0] * self._AGES for _ in range(self._CLASSES)]
        self._edges = [1000.0 * 2 ** (at / 2) for at in range(self._AGES)]
        self._density = [[1 / edge for edge in self._edges] for _ in range(self._CLASSES)]
        self._order: list[tuple[float, int, int, int]] = []
        self._at = -1

    def _age(self, run: int, now_us: int) -> int:
        return min(bisect.bisect(self._edges, now_us - self._last[run]), self._AGES - 1)

    def victim(self, now_us: int, pinned: Container[int]) -> int:
        """The leaf of the least hit density; the ranks of one moment serve all its victims."""
        if self._at != now_us or not self._order:
            self._at = now_us
            ranked = [(*self._rank(run, now_us), run) for run in self._leaves if run not in pinned]
            self._order = sorted(ranked, reverse=True)
        return self._order[-1][3]

    def _rank(self, run: int, now_us: int) -> tuple[float, int, int]:
        density = self._density[min(self._uses[run], self._CLASSES - 1)][self._age(run, now_us)]
        return density, self._last[run], -self._stream.depth[run]

    def gone(self, run: int, now_us: int) -> None:
        """An eviction at its age; its parent may be a leaf now."""
        self._ends[min(self._uses[run], self._CLASSES - 1)][self._age(run, now_us)] += 1
        self._uses[run], self._entered[run] = 0, False
        del self._leaves[run]
        self._order.pop()
        parent = self._stream.parent[run]
        if parent >= 0 and not self._children[parent] and self._cached[parent]:
            self._leaves[parent] = None
            if parent not in self._stream_path:
                bisect.insort(
                    self._order,
                    (*self._rank(parent, now_us), parent),
                    key=lambda entry: (-entry[0], -entry[1], -entry[2]),
                )

    def served(self, number: int, found: int, now_us: int) -> None:
        """Hits at their ages; the end of the path may be a leaf."""
        path = self._stream.paths[number]
        for run in path:
            if self._entered[run]:
                self._hits[min(self._uses[run], self._CLASSES - 1)][self._age(run, now_us)] += 1
                self._uses[run] += 1
            self._entered[run] = True
            self._last[run] = now_us
            self._leaves.pop(run, None)
        if not self._children[path[-1]]:
            self._leaves[path[-1]] = None
        self._order, self._at = [], -1
        following = self._stream.paths[number + 1] if number + 1 < len(self._stream.paths) else []
        self._stream_path = set(following)
        if number % self._EVERY == self._EVERY - 1:
            self._learn()

    def _learn(self) -> None:
        for kind in range(self._CLASSES):
            hits = events = time = 0.0
            for age in range(self._AGES - 1, -1, -1):
                here = self._hits[kind][age] + self._ends[kind][age]
                hits += self._hits[kind][age]
                width = self._edges[age] - (self._edges[age - 1] if age else 0.0)
                events += here
                time += events * width
                self._density[kind][age] = hits / time if events else 0.0
                self._hits[kind][age] *= 0.9
                self._ends[kind][age] *= 0.9


PUBLISHED: dict[str, Callable[[Stream], SimulatedPolicy]] = {
    "sieve": Sieve,
    "s3-fifo": S3Fifo,
    "arc": Arc,
    "gdsf": lambda stream: LeafHeap(stream, gdsf),
    "lhd": Lhd,
}
