"""Run lists of many events as canonical text, in bulk.

1. `texts[i]` is the JSON of the encoded form of the runs in `lists[i]` that have blocks (`block_runs`).
2. Generations and pools are whole numbers from 0 on, block indices integers; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from kvcustody.audit.kinds.block_runs import EXACT, FlatRuns, Pairs, Runs
from kvcustody.audit.leaf.leaf_schema import ints
from kvcustody.errors import LedgerError

_BLOCKS_AT_ONCE = 1 << 18  # 2 MiB of indices
_NEIGHBOURS = b"[%d,[%d,1],[1,%d]]"


class Extents(NamedTuple):
    """For each run list: its blocks, lowest and highest generation (0, 0, -1 if empty)."""

    blocks: list[int]
    low: list[int]
    high: list[int]


def run_texts(lists: Sequence[Runs]) -> tuple[list[bytes], Extents]:
    """Return the JSON text of every run list, and its extent; raises `LedgerError` (rule 2)."""
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


def short_texts(lists: Sequence[Runs], *, placed: bool) -> tuple[list[bytes], Extents]:
    """Return the text in a shorter form (`block_runs`), named or `placed`; lists without such a form stay unchanged."""
    owner, (pools, blocks, generations) = _laid_flat(lists)
    if not len(owner):
        return run_texts([()] * len(lists))
    begins, steps = _steps(owner, pools, generations)
    if pools.any() or steps.min(where=~begins, initial=1) < 0:
        order = np.lexsort((generations, pools, owner))
        owner, pools, blocks, generations = (column[order] for column in (owner, pools, blocks, generations))
        begins, steps = _steps(owner, pools, generations)
    runs = np.flatnonzero(begins | (steps != 1))
    counts = _lengths(runs, len(owner))
    gaps = generations[runs]
    gaps[1:] -= np.where(begins[runs[1:]], 0, gaps[:-1] + counts[:-1])
    numbers = np.stack((gaps, counts), axis=1).ravel().tolist()
    groups = np.flatnonzero(begins)
    of_run = [*(2 * np.searchsorted(runs, groups)).tolist(), len(numbers)]
    coded = _coded(blocks, begins, groups) if placed else None
    made: list[list[Any]] = [[] for _ in lists]
    for number, (whose, pool) in enumerate(zip(owner[groups].tolist(), pools[groups].tolist(), strict=True)):
        named = [pool, *numbers[of_run[number] : of_run[number + 1]]]
        made[whose].append([named, *next(coded)] if coded is not None else named)
    texts = [orjson.dumps(each, option=orjson.OPT_SERIALIZE_NUMPY) for each in made]
    extents = _flat_extents(len(lists), owner, generations)
    has_none = (generations < 1) | (generations >= EXACT) | (pools < 0) | (blocks < 0) | (~begins & (steps < 1))
    for each in np.unique(owner[has_none]).tolist() if has_none.any() else ():
        (texts[each],), found = run_texts([lists[each]])
        for column, (value,) in zip(extents, found, strict=True):
            column[each] = value
    return texts, extents


def _steps(
    owner: NDArray[np.int64], pools: NDArray[np.int64], generations: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Where groups begin (one pool of one list each), and each generation less the one before."""
    begins = np.ones(len(owner), np.bool_)
    np.not_equal(owner[1:], owner[:-1], out=begins[1:])
    begins[1:] |= pools[1:] != pools[:-1]
    steps = generations.copy()
    steps[1:] -= generations[:-1]
    return begins, steps


def _lengths(places: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Return the distance from each place to the next, and from the last one to the end."""
    bounds: NDArray[np.int64] = np.append(places, end)
    return bounds[1:] - bounds[:-1]


def _laid_flat(lists: Sequence[Runs]) -> tuple[NDArray[np.int64], Pairs]:
    """Whose list each block is of, and all of them, in their order."""
    owners, pools, firsts, parts = list[int](), list[int](), list[int](), list[NDArray[Any]]()
    generation_arrays: list[tuple[int, NDArray[Any]]] = []  # generations that are there as an array, by the part
    for number, runs in enumerate(lists):
        if isinstance(runs, FlatRuns):
            blocks, generations, pool = runs.arrays()
            generation_arrays.append((len(parts), generations))
            parts.append(blocks)
            owners.append(number)
            pools.append(pool)
            firsts.append(0)
            continue
        for run in runs:
            parts.append(run.blocks)
            owners.append(number)
            pools.append(run.pool)
            firsts.append(run.generation)
    lengths = np.array(list(map(len, parts)), np.int64)
    if len(generation_arrays) == len(parts) and parts:
        generations = np.concatenate([known for _, known in generation_arrays], dtype=np.int64, casting="same_kind")
    else:
        ends = np.cumsum(lengths)
        first = np.array(ints(firsts), np.int64)
        generations = np.arange(int(lengths.sum())) + np.repeat(first - (ends - lengths), lengths)
        generations[np.repeat(first == 0, lengths)] = 0
        for part, known in generation_arrays:
            generations[ends[part] - len(known) : ends[part]] = known
    try:
        blocks = np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64, casting="same_kind")
    except (TypeError, ValueError) as problem:
        raise LedgerError(f"a run's blocks are not integers: {problem}") from problem
    owner, pool_of = np.repeat(np.array((owners, ints(pools)), np.int64), lengths, axis=1)
    return owner, Pairs(pool_of, blocks, generations)


def _coded(
    blocks: NDArray[np.int64], begins: NDArray[np.bool_], groups: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64] | list[int]]]:
    """Yield the blocks of each group as differences, run-length coded if that is shorter."""
    steps = blocks.copy()
    steps[1:] -= np.where(begins[1:], 0, blocks[:-1])
    is_new = begins.copy()
    is_new[1:] |= steps[1:] != steps[:-1]
    places = np.flatnonzero(is_new)
    counts = _lengths(places, len(steps))
    tokens = steps[places]
    cuts = [*np.searchsorted(places, groups).tolist(), len(places)]
    ends = [*groups.tolist(), len(steps)]
    for (low, high), (first, end) in zip(pairwise(cuts), pairwise(ends), strict=True):
        if 2 * (high - low) > end - first:
            yield steps[first:end], []
        else:
            yield tokens[low:high], counts[low:high]


def _flat_extents(size: int, owner: NDArray[np.int64], generations: NDArray[np.int64]) -> Extents:
    """Of blocks that are in the order of their lists."""
    starts = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1])))
    low, high = np.zeros(size, np.int64), np.full(size, -1)
    low[owner[starts]] = np.minimum.reduceat(generations, starts)
    high[owner[starts]] = np.maximum.reduceat(generations, starts)
    return Extents(np.bincount(owner, minlength=size).tolist(), low.tolist(), high.tolist())


def _items(
    blocks: Sequence[NDArray[np.int64]],
    firsts: Sequence[int],
    pools: Sequence[int],
    lengths: Sequence[int],
) -> Iterator[bytes]:
    """Yield the text of every run: run-length tokens of the differences, each run's first from 0."""
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
        if 2 * (high - low) > length:  # as long without counts, or longer with them
            spelt = [delta for place in range(low, high) for delta in [deltas[place]] * counts[place]]
            item: list[Any] = [first, spelt, []]
        else:
            item = [first, deltas[low:high], counts[low:high]]
        if pool:
            item.append(pool)
        yield orjson.dumps(item)


def _extents(lists: Sequence[Runs]) -> Extents:
    extents = Extents([], [], [])
    for runs in lists:
        extents.blocks.append(sum(len(run.blocks) for run in runs))
        extents.low.append(int(min((run.generation for run in runs), default=0)))
        extents.high.append(
            int(
                max(
                    (run.generation + len(run.blocks) - 1 if run.generation else 0 for run in runs),
                    default=-1,
                )
            )
        )
    return extents
