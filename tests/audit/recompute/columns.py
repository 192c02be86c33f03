"""Columns: facts of one kind laid side by side, a number each, so that a million leaves are not a million objects.

1. Texts are numbers, too: each has one in `TextNumbers`, the same in every column.
2. A run list is kept as it is written, `[generation, deltas, counts, pool]`, and laid out at the end: its i-th block
   has the generation `generation + i`. A run at generation 0 is memory that never was in custody and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.errors import LedgerError

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class TextNumbers(dict[Any, int]):
    """A number for every text (rule 1), given on first mention; None has one, too."""

    def __missing__(self, text: Any) -> int:
        self[text] = number = len(self)
        return number

    def texts(self) -> list[Any]:
        """The texts by their numbers."""
        return list(self)


def numbers(column: Iterable[Any]) -> Numbers:
    """A column of numbers; decimal strings are numbers from 2^53 on."""
    return np.array(column, np.int64)


def concatenate_parts(parts: list[Numbers]) -> Numbers:
    """Parts of a column as one, which then stands in their place."""
    if len(parts) != 1:
        parts[:] = [np.concatenate([np.empty(0, np.int64), *parts])]
    return parts[0]


def distinct(values: Numbers) -> Numbers:
    """The values in order, each once: by sorting, which beats the table of `np.unique` where most are different."""
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


class Columns:
    """Rows of numbers, one array a column."""

    def __init__(self, *names: str) -> None:
        self._parts: dict[str, list[Numbers]] = {name: [] for name in names}
        self.rows = 0

    def add(self, rows: int, **columns: Any) -> None:
        """Add rows: of each column an array of them, or a number that all have."""
        for name, part in columns.items():
            every = np.array(part, np.int64)
            self._parts[name].append(every if every.ndim else np.full(rows, every))
        self.rows += rows

    def __getitem__(self, name: str) -> Numbers:
        return concatenate_parts(self._parts[name])


_RUN = ("row", "first", "pool", "tokens", "counted", "deltas", "counts")


class Entries(NamedTuple):
    """What run lists name, one entry a block: the row of its leaf, the pool, the generation and the block."""

    row: Numbers
    pool: Numbers
    generation: Numbers
    block: Numbers


class Statements(Columns):
    """Rows of facts with the blocks that each is about."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self._runs: dict[str, list[Numbers]] = {name: [] for name in _RUN}

    def say(self, lists: Sequence[Sequence[Any]], **columns: Any) -> None:
        """Add a row for each run list."""
        begin = self.rows
        self.add(len(lists), **columns)
        items = list(chain.from_iterable(lists))
        if not items:
            return
        try:
            deltas, counts = list(map(itemgetter(1), items)), list(map(itemgetter(2), items))
            parts = (
                np.repeat(np.arange(begin, self.rows), list(map(len, lists))),
                numbers(list(map(itemgetter(0), items))),
                numbers([item[3] if len(item) > 3 else 0 for item in items]),
                numbers(list(map(len, deltas))),
                numbers(list(map(len, counts))),
                numbers(list(chain.from_iterable(deltas))),
                numbers(list(chain.from_iterable(counts))),
            )
        except (ValueError, TypeError, LookupError, OverflowError) as problem:
            raise LedgerError(f"a run in a leaf is malformed: {problem}") from None
        for held, part in zip(self._runs.values(), parts, strict=True):
            held.append(part)

    def listed(self) -> Numbers:
        """How many blocks each row lists, those at generation 0 with them."""
        row, _, _, tokens, counted, _, counts = map(concatenate_parts, self._runs.values())
        blocks = tokens.copy()
        of_count = np.repeat(np.arange(len(row)), counted)
        np.add.at(blocks, of_count, counts - 1)
        return Groups(row, self.rows).total(blocks)

    def entries(self) -> Entries:
        """All run lists laid out; raises `LedgerError` where one is malformed."""
        try:
            return _laid_out(*map(concatenate_parts, self._runs.values()))
        except (ValueError, MemoryError) as problem:
            raise LedgerError(f"a run in a leaf is malformed: {problem}") from None


def _laid_out(
    row: Numbers,
    first: Numbers,
    pool: Numbers,
    tokens: Numbers,
    counted: Numbers,
    deltas: Numbers,
    counts: Numbers,
) -> Entries:
    if not len(row):
        return Entries(row, pool, first, deltas)
    if tokens.min() < 1 or not np.all((counted == 0) | (counted == tokens)):
        raise ValueError("counts do not match deltas")
    if len(counts) and counts.min() < 1:
        raise ValueError("a count is below 1")
    repeats = np.ones(len(deltas), np.int64)
    repeats[np.repeat(counted > 0, tokens)] = counts
    lengths = np.add.reduceat(repeats, np.cumsum(tokens) - tokens)
    starts = np.cumsum(lengths) - lengths
    reached = np.cumsum(np.repeat(deltas, repeats))
    before = np.where(starts > 0, reached[starts - 1], 0)  # each run's deltas begin at 0 again
    block = reached - np.repeat(before, lengths)
    generation = np.arange(len(block)) + np.repeat(first - starts, lengths)
    if first.min() < 0 or pool.min() < 0 or block.min() < 0:
        raise ValueError("a negative number")
    made = Entries(np.repeat(row, lengths), np.repeat(pool, lengths), generation, block)
    if first.min() > 0:
        return made
    kept = np.repeat(first > 0, lengths)
    return Entries(*(column[kept] for column in made))


class Groups:
    """Entries by the row, from 0 up to and without `rows`, that each belongs to."""

    def __init__(self, row: Numbers, rows: int) -> None:
        self._rows = rows
        self._order = np.argsort(row, kind="stable")
        ordered = row[self._order]
        self._starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        self.named = ordered[self._starts]  # the rows that have entries

    def most(self, values: Numbers, nothing: int = 0) -> Numbers:
        """For each row the highest of its entries, and never less than `nothing`."""
        return self._each(np.maximum, values, nothing)

    def least(self, values: Numbers, nothing: int) -> Numbers:
        """For each row the lowest of its entries, and never more than `nothing`."""
        return self._each(np.minimum, values, nothing)

    def total(self, values: Numbers) -> Numbers:
        """For each row the sum of its entries."""
        return self._each(np.add, values, 0)

    def _each(self, fold: np.ufunc, values: Numbers, nothing: int) -> Numbers:
        made = np.full(self._rows, nothing, np.int64)
        if len(self.named):
            made[self.named] = fold(made[self.named], fold.reduceat(values[self._order], self._starts))
        return made


class Directory:
    """Where a number stands in a column: the last place, where it stands in several."""

    def __init__(self, column: Numbers) -> None:
        self._order = np.argsort(column, kind="stable")
        self._sorted = column[self._order]

    def find(self, wanted: Numbers) -> Numbers:
        """The row of each wanted number; -1 where it is in none."""
        if not len(self._sorted):
            return np.full(len(wanted), -1)
        place = np.searchsorted(self._sorted, wanted, side="right") - 1
        is_there = (place >= 0) & (self._sorted[place] == wanted)
        return np.where(is_there, self._order[place], -1)
