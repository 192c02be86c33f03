"""A workload as a simulator wants it: requests in time order, each a path of runs in one static radix forest.

    stream = make_stream("agentic", requests, tokens_per_block=64, tenants=labels)

Block ids are prefix-chained (equal id, equal prefix), so the forest of the whole workload can be cut once at every
block where any request ends or two requests part. A cache's state is then how many blocks of each run it has.

- Cutting changes no policy's decisions that go by block: all blocks of a run are used together, always.
- `next_use` is known here, for the offline policies only; nothing else may read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcustody.lab.replay.traces.model import TraceRequest

Ints = NDArray[np.int64]
NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Stream:
    """`paths[i]` are the runs of request i from root to leaf; `length` and `depth` of runs are in blocks."""

    name: str
    block_tokens: int
    at_us: list[int]
    paths: list[list[int]]
    chains: list[Ints]
    tokens: list[int]
    tenants: list[int]
    length: list[int]
    depth: list[int]
    parent: list[int]
    sessions: list[object] = field(default_factory=list)
    system_blocks: list[int] = field(default_factory=list)  # of each request, where the generator says it
    failed_from: list[int | None] = field(default_factory=list)  # block at which what a failed call gave begins

    @property
    def unique_blocks(self) -> int:
        """Blocks that a pool without end would hold."""
        return sum(self.length)

    @property
    def longest(self) -> int:
        """The longest request, in blocks."""
        return max(map(len, self.chains))


def make_stream(name: str, requests: Sequence[TraceRequest], block_tokens: int, tenants: Sequence[int]) -> Stream:
    """The forest and the paths; ids are renumbered so that they fit a token."""
    kept = [(r, t) for r, t in zip(requests, tenants, strict=True) if len(r.blocks)]
    ids, flat = np.unique(np.concatenate([r.blocks for r, _ in kept]), return_inverse=True)
    cuts = np.cumsum([len(r.blocks) for r, _ in kept])[:-1]
    chains = [np.ascontiguousarray(chain) for chain in np.split(flat.astype(np.int64), cuts)]
    ends = _ends(chains, len(ids))
    run_of: dict[int, int] = {}  # by its last block
    length: list[int] = []
    depth: list[int] = []
    parent: list[int] = []
    paths: list[list[int]] = []
    for chain in chains:
        path: list[int] = []
        before = 0
        for end in np.flatnonzero(ends[chain]).tolist():
            last = int(chain[end])
            run = run_of.get(last)
            if run is None:
                run = run_of[last] = len(length)
                length.append(end + 1 - before)
                depth.append(before)
                parent.append(path[-1] if path else -1)
            path.append(run)
            before = end + 1
        paths.append(path)
    return Stream(
        name,
        block_tokens,
        [r.at_us for r, _ in kept],
        paths,
        chains,
        [r.input_tokens for r, _ in kept],
        [t for _, t in kept],
        length,
        depth,
        parent,
        [(r.session, r.stream) for r, _ in kept],
    )


def _ends(chains: Sequence[Ints], count: int) -> NDArray[np.bool_]:
    """Whether a run ends with the block: a request does, or two requests go on differently."""
    after = np.full(count, -1, dtype=np.int64)
    ends = np.zeros(count, dtype=np.bool_)
    for chain in chains:
        ends[chain[-1]] = True
        here, there = chain[:-1], chain[1:]
        known = after[here]
        ends[here[(known >= 0) & (known != there)]] = True
        after[here[known < 0]] = there[known < 0]
    return ends


def next_uses(stream: Stream) -> list[list[int]]:
    """For each request and run of its path: the number of the next request that uses the run."""
    coming = [NEVER] * len(stream.length)
    uses: list[list[int]] = [[]] * len(stream.paths)
    for number in range(len(stream.paths) - 1, -1, -1):
        path = stream.paths[number]
        uses[number] = [coming[run] for run in path]
        for run in path:
            coming[run] = number
    return uses
