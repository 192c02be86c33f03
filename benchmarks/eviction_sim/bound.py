"""What no policy can exceed where blocks cost differently: a Lagrangian bound on the prefill seconds saved.

Between two uses of a run, a pool either keeps some of its blocks or not. Keeping saves their cost at the second use
and takes their room at every request in between. Leave out the rule that a leaf goes first, price the room of each
request, and every run is judged by itself: the sum over runs, plus the price of the whole room, is at least what any
policy saves, whatever the prices are. A subgradient search finds good prices; a bad search gives a weaker bound,
never a wrong one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from prefill import block_seconds
from streams import Stream

Floats = NDArray[np.float64]


def seconds_bound(stream: Stream, capacity: int, reached: float, steps: int = 400) -> float:
    """At most this many prefill seconds are saved; `reached` is what some policy saves, for the step size."""
    first, last, blocks, worth = _intervals(stream)
    requests = len(stream.paths)
    room = np.array([capacity - len(chain) for chain in stream.chains], dtype=np.float64)
    price = np.zeros(requests)
    best = float(worth.sum())
    scale = 1.0
    for step in range(steps):
        total = np.concatenate(([0.0], np.cumsum(price)))
        gain = worth - blocks * (total[last] - total[first + 1])
        kept = gain > 0
        bound = float(gain[kept].sum() + price @ room)
        if bound < best:
            best = bound
        elif step % 20 == 19:
            scale *= 0.7
        used = np.zeros(requests + 1)
        np.add.at(used, first[kept] + 1, blocks[kept])
        np.add.at(used, last[kept], -blocks[kept])
        slope = room - np.cumsum(used)[:requests]
        size = float(slope @ slope)
        if size == 0 or best <= reached:
            break
        price = np.maximum(0.0, price - scale * max(bound - reached, 0.0) / size * slope)
    return best


def _intervals(stream: Stream) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats, Floats]:
    """Between two uses of a run: the two requests, its blocks, and the seconds they cost to compute."""
    cost = block_seconds(stream)
    first: list[int] = []
    last: list[int] = []
    runs: list[int] = []
    seen: dict[int, int] = {}
    for number, path in enumerate(stream.paths):
        for run in path:
            before = seen.get(run)
            if before is not None:
                first.append(before)
                last.append(number)
                runs.append(run)
            seen[run] = number
    start = np.array(stream.depth)[runs]
    blocks = np.array(stream.length, dtype=np.float64)[runs]
    worth = cost[start + blocks.astype(np.int64)] - cost[start]
    return np.array(first), np.array(last), blocks, worth
