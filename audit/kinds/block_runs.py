"""Runs: many (block, generation) pairs as one array and one number, and their canonical JSON form.

1. In a run, `blocks[i]` carries generation `generation + i`: a pool's generations come from one counter, so the blocks
   of one allocation are one run however scattered their indices are.
2. What `run_texts` writes of a run, `decode` reads exactly; the encoded form holds integers only (decimal strings from
   2^53 on).
3. A pool's counter starts at 1. A run at generation 0 is memory that was never in custody (a boot scrub): all of its
   blocks have generation 0.
4. Within one incarnation and one pool a generation identifies one block, so a set of generations is a set of custodies.

Encoded form: `[generation, deltas, counts]`, with the pool appended when it is not 0. `deltas` are the differences of
successive indices (the first from 0), run-length coded by `counts`. Empty `counts` means that every count is 1, so
scattered blocks take no space for counts.

Two shorter forms are for all blocks of one pool together. Their generations are `[pool, first, count, gap, count, …]`,
ascending; each gap counts from the end of the previous run. *Named* is that list and nothing more, for blocks that an
earlier leaf lists (rule 4). When read, their indices are `UNNAMED`, until `name_blocks` finds them. *Placed* is
`[generations, deltas, counts]`, for blocks that no leaf lists yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kvcustody.errors import LedgerError

EXACT = 1 << 53  # the first integer that JSON readers may round
UNNAMED = -1  # the index of a block that a leaf names by its generation

Int64s = NDArray[np.int64]


class Run(NamedTuple):
    """Blocks with consecutive generations; the array must not change after it was passed on."""

    blocks: NDArray[Any]
    generation: int
    pool: int = 0


Runs = Sequence[Run]


class Pairs(NamedTuple):
    """Runs laid flat: one row for each (pool, block, generation)."""

    pools: Int64s
    blocks: Int64s
    generations: Int64s


def plain_forms(item: Sequence[Any]) -> list[Sequence[Any]]:
    """Return an encoded run as runs of the first form: itself, or those of a shorter form; raises `LedgerError`."""
    try:
        if isinstance(item[0], list):
            named, deltas, counts = item
        elif isinstance(item[1], list):
            return [item]
        else:
            named, deltas, counts = item, None, None
        if len(named) < 3 or not len(named) % 2 or min(named[2::2]) < 1 or named[0] < 0:
            raise ValueError("its generations are malformed")
        firsts, before = [], 0
        for gap, count in zip(named[1::2], named[2::2], strict=True):
            firsts.append(before + gap)
            before = firsts[-1] + count
        if min(firsts) < 1 or before > EXACT or min(named[3::2], default=0) < 0:
            raise ValueError("its generations are malformed")
        pool = [named[0]] if named[0] else []
        if deltas is None:
            return [
                [first, [UNNAMED, 0] if count > 1 else [UNNAMED], [1, count - 1] if count > 1 else [], *pool]
                for first, count in zip(firsts, named[2::2], strict=True)
            ]
        blocks = np.cumsum(np.repeat(np.array(deltas, np.int64), counts or 1)).tolist()
        if counts and (len(counts) != len(deltas) or min(counts) < 1):
            raise ValueError("counts do not match deltas")
        if len(blocks) != sum(named[2::2]) or min(blocks) < 0:
            raise ValueError("it has other blocks than generations")
        made, at = list[Sequence[Any]](), 0
        for first, count in zip(firsts, named[2::2], strict=True):
            mine = [0, *blocks[at : at + count]]
            made.append([first, [after - low for low, after in itertools.pairwise(mine)], [], *pool])
            at += count
        return made
    except (ValueError, TypeError, IndexError, OverflowError) as problem:
        raise LedgerError(f"a run in a leaf is malformed: {problem}") from problem


def encoded_blocks(item: Sequence[Any]) -> int:
    """Return how many blocks an encoded run of any form has."""
    if item[0].__class__ is list:
        return sum(item[0][2::2])
    if len(item) > 1 and item[1].__class__ is list:
        return sum(item[2]) if item[2] else len(item[1])
    return sum(item[2::2])


def is_plain(items: Sequence[Sequence[Any]]) -> bool:
    """Return whether every run has the first form."""
    return all(len(item) > 1 and item[1].__class__ is list and item[0].__class__ is not list for item in items)


def decode(item: Sequence[Any]) -> Run:
    """Return the run from its canonical form, the first one; raises `LedgerError` if it is malformed."""
    try:
        generation, deltas, counts = int(item[0]), np.array(item[1], np.int64), item[2]
        pool = int(item[3]) if len(item) > 3 else 0
        if counts:
            if len(counts) != len(deltas) or min(counts) < 1:
                raise ValueError("counts do not match deltas")
            deltas = np.repeat(deltas, counts)
        blocks = np.cumsum(deltas)
        if generation < 0 or pool < 0 or len(item) > 4 or (len(blocks) and int(blocks.min()) < UNNAMED):
            raise ValueError("negative index, generation or pool")
    except (ValueError, TypeError, IndexError, OverflowError) as problem:
        raise LedgerError(f"a run in a leaf is malformed: {problem}") from problem
    return Run(blocks, generation, pool)


def decode_flat(items: Sequence[Sequence[Any]]) -> tuple[Pairs, Int64s]:
    """Return many encoded runs of any form laid flat, with the length of each: the bulk form of `decode`."""
    try:
        decode_all = _of_one_form(items)
        if decode_all is not None:
            return decode_all(items)
        form = np.fromiter(map(_form, items), np.int64, len(items))
        decoded_parts: list[tuple[Int64s, Pairs, Int64s]] = []
        for number, decoded in enumerate((_decode_flat, _decode_named, _decode_placed)):
            mine = np.flatnonzero(form == number)
            if len(mine):
                decoded_parts.append((mine, *decoded([items[at] for at in mine.tolist()])))
    except (ValueError, TypeError, LookupError, OverflowError) as problem:
        raise LedgerError(f"a run in a leaf is malformed: {problem}") from problem
    lengths = np.empty(len(items), np.int64)
    for mine, _, own in decoded_parts:
        lengths[mine] = own
    starts = np.cumsum(lengths) - lengths
    columns = [np.empty(int(lengths.sum()), np.int64) for _ in Pairs._fields]
    for mine, pairs, own in decoded_parts:
        before = np.cumsum(own) - own
        at = np.repeat(starts[mine] - before, own) + np.arange(int(own.sum()))
        for column, values in zip(columns, pairs, strict=True):
            column[at] = values
    return Pairs(*columns), lengths


def _of_one_form(
    items: Sequence[Sequence[Any]],
) -> Callable[[Sequence[Sequence[Any]]], tuple[Pairs, Int64s]] | None:
    """What decodes runs that are all of one form, as they are as a rule; None where they are of several."""
    firsts = set(map(type, map(itemgetter(0), items)))
    if firsts == {list}:
        return _decode_placed
    if list in firsts:
        return None
    seconds = set(map(type, map(itemgetter(1), items)))
    if list not in seconds and seconds:
        return _decode_named
    return _decode_flat if seconds <= {list} else None


def _form(item: Sequence[Any]) -> int:
    """0: the first form, 1: named, 2: placed."""
    if item[0].__class__ is list:
        return 2
    return 0 if item[1].__class__ is list else 1


def _decode_named(items: Sequence[Sequence[int]]) -> tuple[Pairs, Int64s]:
    widths = np.fromiter(map(len, items), np.int64, len(items))
    numbers = np.array(list(chain.from_iterable(items)), np.int64)
    if int(widths.min()) < 3 or not (widths % 2).all():
        raise ValueError("a list of generations is of another form")
    starts = np.cumsum(widths) - widths
    is_pool = np.zeros(len(numbers), np.bool_)
    is_pool[starts] = True
    gaps, counts = numbers[~is_pool][::2], numbers[~is_pool][1::2]
    spans = (widths - 1) // 2
    begins = np.cumsum(spans) - spans
    reached = np.cumsum(gaps + counts)
    base = np.where(begins > 0, reached[begins - 1], 0)
    firsts = reached - counts - np.repeat(base, spans)
    is_first = np.zeros(len(gaps), np.bool_)
    is_first[begins] = True
    ends = reached[begins + spans - 1] - base
    if int(counts.min()) < 1 or int(gaps.min()) < 0 or (gaps[is_first] < 1).any() or int(ends.max()) > EXACT:
        raise ValueError("a list of generations is of another form")
    if int(numbers[is_pool].min()) < 0:
        raise ValueError("a pool is negative")
    lengths = np.add.reduceat(counts, begins)
    before = np.cumsum(counts) - counts
    generations = np.arange(int(counts.sum())) + np.repeat(firsts - before, counts)
    pools = np.repeat(numbers[is_pool], lengths)
    return Pairs(pools, np.full(len(generations), UNNAMED, np.int64), generations), lengths


def _decode_placed(items: Sequence[Sequence[Any]]) -> tuple[Pairs, Int64s]:
    named, lengths = _decode_named([item[0] for item in items])
    listed, own = _decode_flat([[1, *item[1:]] for item in items])  # its blocks, as those of any run
    if any(len(item) != 3 for item in items) or (own != lengths).any() or int(listed.blocks.min()) < 0:
        raise ValueError("a list has other blocks than generations")
    return named._replace(blocks=listed.blocks), lengths


def _decode_flat(items: Sequence[Sequence[Any]]) -> tuple[Pairs, Int64s]:
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
    """Return consecutive pieces of at most `tokens` run-length tokens each, which together are exactly the run."""
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
    """Return every (pool, block, generation) of the runs, in their order."""
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
    """Return the fewest runs that hold exactly these pairs, ordered by generation."""
    if len(blocks) == 0:
        return ()
    order = np.argsort(generations, kind="stable")
    ordered, indices = np.asarray(generations, np.int64)[order], np.asarray(blocks)[order]
    breaks = np.diff(ordered) != np.where(ordered[1:] == 0, 0, 1)
    breaks |= (ordered[:-1] == 0) & (ordered[1:] != 0)
    cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(ordered)]
    return tuple(Run(indices[low:high], int(ordered[low]), pool) for low, high in itertools.pairwise(cuts))


class FlatRuns(Sequence[Run]):
    """Blocks and generations as two arrays that must not change any more: a single object on the engine's thread.

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
        """The number of blocks."""
        return len(self._blocks)

    def arrays(self) -> tuple[Int64s, Int64s, int]:
        """Return blocks, generations and the pool, without building runs."""
        return self._blocks, self._generations, self._pool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        raise TypeError("runs are not hashable")


def block_count(runs: Runs) -> int:
    """Return how many blocks the runs hold, without decoding them."""
    return runs.blocks if isinstance(runs, FlatRuns) else sum(len(run.blocks) for run in runs)


def names_block(
    items: Sequence[Sequence[Any]], block: int, generation: int, pool: int, *, by_index: bool = False
) -> bool:
    """Return whether encoded runs hold a block at a generation; `by_index`: and name its index, not only the
    generation.
    """
    return any(
        of_pool == pool and (named == block or (named == UNNAMED and not by_index))
        for of_pool, named in blocks_at(items, generation)
    )


def blocks_at(items: Sequence[Sequence[Any]], generation: int) -> Iterator[tuple[int, int]]:
    """Yield the pool and index (`UNNAMED` if not stated) of what encoded runs hold at a generation."""
    for run in map(decode, chain.from_iterable(map(plain_forms, items))):
        place = generation - run.generation
        if 0 <= place < len(run.blocks):
            yield run.pool, int(run.blocks[place])


def name_blocks(keys: Int64s, blocks: Int64s, known_keys: Int64s, known_blocks: Int64s) -> Int64s:
    """Return block indices by the keys of their custodies; `UNNAMED` ones come from what other leaves state.

    What nothing names stays `UNNAMED`.
    """
    missing = np.flatnonzero(blocks == UNNAMED)
    if not len(missing):
        return blocks
    listed = np.flatnonzero(known_blocks != UNNAMED)
    if not len(listed):
        return blocks
    ordered = listed[np.argsort(known_keys[listed], kind="stable")]
    place = np.minimum(np.searchsorted(known_keys[ordered], keys[missing]), len(ordered) - 1)
    is_known = known_keys[ordered][place] == keys[missing]
    made = blocks.copy()
    made[missing[is_known]] = known_blocks[ordered][place][is_known]
    return made
