"""Runs: many (block, generation) pairs as one array and one number, and their canonical JSON form.

1. In a run, `blocks[i]` carries generation `generation + i`: a pool's generations come from one counter, so the
   blocks of one allocation are one run however scattered their indices are.
2. What `run_texts` writes of a run, `decode` reads exactly; the encoded form holds integers only (decimal strings
   from 2^53 on).
3. A pool's counter starts at 1. A run at generation 0 is memory that was never in custody (a boot scrub): all of its
   blocks have generation 0.
4. Within one incarnation and one pool a generation names one block, so a set of generations is a set of custodies.

Encoded form: `[generation, deltas, counts]`, with the pool appended when it is not 0. `deltas` are the
differences of successive indices (the first from 0), run-length coded by `counts`; empty `counts` means
that every count is 1, which is how scattered blocks avoid paying for counts they do not use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kvcustody.errors import LedgerError

EXACT = 1 << 53  # the first integer that JSON readers may round

Int64s = NDArray[np.int64]


class Run(NamedTuple):
    """Blocks that hold consecutive generations; the array must not be changed after it was handed over."""

    blocks: NDArray[Any]
    generation: int
    pool: int = 0


Runs = Sequence[Run]


class Pairs(NamedTuple):
    """Runs laid flat: one row per (pool, block, generation)."""

    pools: Int64s
    blocks: Int64s
    generations: Int64s


def decode(item: Sequence[Any]) -> Run:
    """The run behind its canonical form; raises `LedgerError` where the form is malformed."""
    try:
        generation, deltas, counts = int(item[0]), np.array(item[1], np.int64), item[2]
        pool = int(item[3]) if len(item) > 3 else 0
        if counts:
            if len(counts) != len(deltas) or min(counts) < 1:
                raise ValueError("counts do not match deltas")
            deltas = np.repeat(deltas, counts)
        blocks = np.cumsum(deltas)
        if generation < 0 or pool < 0 or len(item) > 4 or (len(blocks) and int(blocks.min()) < 0):
            raise ValueError("negative index, generation or pool")
    except (ValueError, TypeError, IndexError, OverflowError) as problem:
        raise LedgerError(f"a run in a leaf is malformed: {problem}") from problem
    return Run(blocks, generation, pool)


def decode_flat(items: Sequence[Sequence[Any]]) -> tuple[Pairs, Int64s]:
    """Many encoded runs laid flat at once, with the length of each; the bulk form of `decode`."""
    if not items:
        nothing = np.empty(0, np.int64)
        return Pairs(nothing, nothing, nothing), nothing
    try:
        deltas, counts = list(map(itemgetter(1), items)), list(map(itemgetter(2), items))
        firsts = np.array(list(map(itemgetter(0), items)), np.int64)  # decimal strings, too
        pools = np.array([item[3] if len(item) > 3 else 0 for item in items], np.int64)
        tokens = np.array(list(map(len, deltas)), np.int64)
        counted = np.array(list(map(len, counts)), np.int64)
        if not tokens.all() or not np.all((counted == 0) | (counted == tokens)):
            raise ValueError("counts do not match deltas")
        repeated = np.ones(int(tokens.sum()), np.int64)
        repeated[np.repeat(counted > 0, tokens)] = list(chain.from_iterable(counts))
        if int(repeated.min()) < 1:
            raise ValueError("a count is below 1")
        summed = np.cumsum(np.repeat(np.array(list(chain.from_iterable(deltas)), np.int64), repeated))
    except (ValueError, TypeError, LookupError, OverflowError) as problem:
        raise LedgerError(f"a run in a leaf is malformed: {problem}") from problem
    lengths = np.add.reduceat(repeated, np.cumsum(tokens) - tokens)
    heads = np.cumsum(lengths) - lengths
    before = np.repeat(np.where(heads > 0, summed[heads - 1], 0), lengths)
    # One at generation 0 stays there throughout (rule 3); the others count on from where they begin.
    generations = np.arange(len(summed)) + np.repeat(firsts - heads, lengths)
    if not firsts.all():
        generations[np.repeat(firsts == 0, lengths)] = 0
    blocks = summed - before
    return Pairs(np.repeat(pools, lengths), blocks, generations), lengths


def split(run: Run, tokens: int) -> list[Run]:
    """Consecutive pieces of at most `tokens` run-length tokens each; together they are exactly the run."""
    blocks = np.asarray(run.blocks, np.int64)
    if len(blocks) <= tokens:
        return [run]
    steps = np.diff(blocks, prepend=0)
    # A piece restarts from an absolute index, so its first token may split a repeated step: count both.
    starts = np.concatenate(([0], np.flatnonzero(steps[1:] != steps[:-1]) + 1))
    cuts = [*starts[:: max(1, tokens - 2)].tolist(), len(blocks)]
    return [
        Run(blocks[low:high], run.generation + low if run.generation else 0, run.pool)
        for low, high in itertools.pairwise(cuts)
    ]


def flatten(runs: Sequence[Run]) -> Pairs:
    """Every (pool, block, generation) of the runs, in their order."""
    if not runs:
        empty = np.empty(0, np.int64)
        return Pairs(empty, empty, empty)
    lengths = np.array([len(run.blocks) for run in runs], np.int64)
    blocks = np.concatenate([np.asarray(run.blocks, np.int64) for run in runs])
    pools = np.repeat(np.array([run.pool for run in runs], np.int64), lengths)
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    first = np.repeat(np.array([run.generation for run in runs], np.int64), lengths)
    steps = np.arange(len(blocks), dtype=np.int64) - before
    return Pairs(pools, blocks, np.where(first == 0, 0, first + steps))


def gather(blocks: NDArray[Any], generations: NDArray[Any], pool: int = 0) -> tuple[Run, ...]:
    """The fewest runs that hold exactly these pairs, ordered by generation."""
    if len(blocks) == 0:
        return ()
    order = np.argsort(generations, kind="stable")
    ordered, indices = np.asarray(generations, np.int64)[order], np.asarray(blocks)[order]
    breaks = np.diff(ordered) != np.where(ordered[1:] == 0, 0, 1)
    breaks |= (ordered[:-1] == 0) & (ordered[1:] != 0)
    cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(ordered)]
    return tuple(Run(indices[low:high], int(ordered[low]), pool) for low, high in itertools.pairwise(cuts))


class FlatRuns(Sequence[Run]):
    """Blocks and generations as two arrays, which must not change any more: one object on the engine's thread.

    They become runs only when somebody reads them, which is the writer's thread.
    """

    __slots__ = ("_blocks", "_generations", "_pool", "_runs")

    def __init__(self, blocks: NDArray[np.int64], generations: NDArray[np.int64], pool: int = 0) -> None:
        self._blocks = blocks
        self._generations = generations
        self._pool = pool
        self._runs: tuple[Run, ...] | None = None

    def _gathered(self) -> tuple[Run, ...]:
        if self._runs is None:
            self._runs = gather(self._blocks, self._generations, self._pool)
        return self._runs

    def __len__(self) -> int:
        return len(self._gathered())

    def __iter__(self) -> Iterator[Run]:
        return iter(self._gathered())

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Run, ...]: ...
    def __getitem__(self, index: int | slice) -> Run | tuple[Run, ...]:
        return self._gathered()[index]

    def __bool__(self) -> bool:
        return len(self._blocks) > 0

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self._blocks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        raise TypeError("runs are not hashable")


def block_count(runs: Runs) -> int:
    """How many blocks runs hold, without making any."""
    return runs.blocks if isinstance(runs, FlatRuns) else sum(len(run.blocks) for run in runs)
