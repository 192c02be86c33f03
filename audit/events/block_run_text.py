"""Run lists of many events as canonical text, all at once.

1. `texts[i]` is the JSON of the encoded form of the runs in `lists[i]` that have blocks (`block_runs`).
2. Generations and pools are whole numbers from 0 on, block indices integers; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from kvcustody.audit.events.block_runs import EXACT, Runs
from kvcustody.audit.events.leaf_schema import ints
from kvcustody.errors import LedgerError

_BLOCKS_AT_ONCE = 1 << 18  # 2 MiB of indices
_NEIGHBOURS = b"[%d,[%d,1],[1,%d]]"


class Extents(NamedTuple):
    """Per run list: its blocks, lowest and highest generation (0, 0, -1 where it has none)."""

    blocks: list[int]
    low: list[int]
    high: list[int]


def run_texts(lists: Sequence[Runs]) -> tuple[list[bytes], Extents]:
    """The JSON text of every run list, and its extent; raises `LedgerError` (rule 2)."""
    runs = list(chain.from_iterable(lists))
    if not runs:
        return [b"[]"] * len(lists), Extents([0] * len(lists), [0] * len(lists), [-1] * len(lists))
    blocks, firsts, pools = zip(*runs, strict=True)
    lengths = list(map(len, blocks))
    if 0 in lengths:
        return run_texts([[run for run in some if len(run.blocks)] for some in lists])
    if len(lists) > 1 and sum(lengths) > _BLOCKS_AT_ONCE:
        half = len(lists) // 2
        (texts, extents), (more, others) = run_texts(lists[:half]), run_texts(lists[half:])
        return texts + more, Extents(*map(list.__add__, extents, others))
    firsts, pools = ints(firsts), ints(pools)
    if min(firsts) < 0 or min(pools) < 0 or max(pools) >= EXACT:
        raise LedgerError("a run has a negative generation or pool, or a pool from 2^53 on")
    items = _items(blocks, firsts, pools, lengths)
    if len(runs) == len(lists) and all(lists):  # the rule: one run a list
        highs = [low + length - 1 if low else 0 for low, length in zip(firsts, lengths, strict=True)]
        return [b"[%b]" % item for item in items], Extents(lengths, list(firsts), highs)
    return [b"[%b]" % b",".join(islice(items, len(some))) for some in lists], _extents(lists)


def _items(
    blocks: Sequence[NDArray[np.int64]],
    firsts: Sequence[int],
    pools: Sequence[int],
    lengths: Sequence[int],
) -> Iterator[bytes]:
    """The text of every run: run-length tokens of the differences, each run's first from 0."""
    try:
        flat: NDArray[np.int64] = np.concatenate(blocks, dtype=np.int64, casting="same_kind")
    except (TypeError, ValueError) as problem:
        raise LedgerError(f"a run's blocks are not integers: {problem}") from problem
    ends = np.cumsum(lengths)
    starts = ends - lengths
    steps = np.empty_like(flat)
    np.subtract(flat[1:], flat[:-1], out=steps[1:])
    steps[starts] = flat[starts]
    begins = np.empty(len(flat), np.bool_)
    np.not_equal(steps[1:], steps[:-1], out=begins[1:])
    begins[starts] = True
    places = begins.nonzero()[0]
    deltas = steps[places].tolist()
    counts = np.diff(places, append=len(flat)).tolist()
    lows = np.searchsorted(places, starts).tolist()
    highs = [*lows[1:], len(places)]
    exact = max(firsts) < EXACT
    heads = firsts if exact else [first if first < EXACT else str(first) for first in firsts]
    for first, pool, length, low, high in zip(heads, pools, lengths, lows, highs, strict=True):
        if high - low == 2 and length > 2 and not pool and deltas[low + 1] == counts[low] == 1 and exact:
            yield _NEIGHBOURS % (first, deltas[low], length - 1)  # in order, what a pool gives first
            continue
        item: list[Any] = [first, deltas[low:high], counts[low:high] if high - low != length else []]
        if pool:
            item.append(pool)
        yield orjson.dumps(item)


def _extents(lists: Sequence[Runs]) -> Extents:
    made = Extents([], [], [])
    for runs in lists:
        made.blocks.append(sum(len(run.blocks) for run in runs))
        made.low.append(int(min((run.generation for run in runs), default=0)))
        made.high.append(
            int(
                max(
                    (run.generation + len(run.blocks) - 1 if run.generation else 0 for run in runs),
                    default=-1,
                )
            )
        )
    return made
