"""Evidence read back: the rows of a projection with the runs in their leaves, laid flat for arithmetic.

1. Runs come from the leaves, never from a column; the rest of a row is a projection of the same leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from sqlalchemy import Boolean, ColumnElement, Connection, FromClause, Integer, Select, Table, literal, select

from kvcustody.audit.kinds.block_runs import Int64s, Pairs, decode_flat
from kvcustody.audit.kinds.registry import EARLIER
from kvcustody.audit.leaf.change_items import runs_of_items
from kvcustody.audit.project import ASSIGNMENT
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.gc_pause import gc_paused
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of, kinds_of
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events
from kvcustody.errors import LedgerError

_Cut = Callable[[Sequence[bytes]], Sequence[Any]]


class Evidence(NamedTuple):
    """Rows by column, and one flat entry for each (pool, block, generation) with the number of its row."""

    size: int  # rows
    columns: dict[str, Int64s | list[Any]]
    owner: Int64s
    pairs: Pairs

    def column(self, name: str) -> Int64s:
        """Return an integer column of the rows, as an array over rows."""
        found = self.columns[name]
        assert isinstance(found, np.ndarray), name
        return found

    def texts(self, name: str) -> list[Any]:
        """Return a column of any other type."""
        found = self.columns[name]
        assert isinstance(found, list), name
        return found

    def row(self, number: int) -> dict[str, Any]:
        """Return one row by column name."""
        return {
            name: int(column[number]) if isinstance(column, np.ndarray) else column[number]
            for name, column in self.columns.items()
        }

    def kept(self, which: NDArray[np.bool_]) -> Evidence:
        """Return the rows for which `which` is true, without their columns."""
        flat = which[self.owner]
        number = np.cumsum(which) - 1
        pairs = Pairs(*(column[flat] for column in self.pairs))
        return Evidence(int(which.sum()), {}, number[self.owner[flat]], pairs)

    def of_rows(self, rows: Int64s) -> Evidence:
        """Return these rows, by their places, without their lists."""
        columns = {
            name: column[rows] if isinstance(column, np.ndarray) else list(map(column.__getitem__, rows.tolist()))
            for name, column in self.columns.items()
        }
        return Evidence(len(rows), columns, *Evidence.no_lists())

    @staticmethod
    def no_lists() -> tuple[Int64s, Pairs]:
        """Return the owners and pairs of rows without lists."""
        nothing = np.empty(0, np.int64)
        return nothing, Pairs(nothing, nothing, nothing)

    def bare(self) -> Evidence:
        """Return the rows without their lists."""
        return Evidence(self.size, self.columns, *Evidence.no_lists())

    def codes(self, *names: str) -> tuple[Int64s, list[tuple[Any, ...]]]:
        """Return for each row a number for its combination of these text columns, and what each number stands for."""
        code, labels = np.zeros(self.size, np.int64), list[tuple[Any, ...]]([()])
        for name in names:  # column by column: a tuple for every row costs more than all else here
            column = self.texts(name)
            values = list(dict.fromkeys(column))
            numbers = {value: number for number, value in enumerate(values)}
            both = code * len(values) + np.fromiter(map(numbers.__getitem__, column), np.int64, self.size)
            is_there = np.zeros(len(labels) * len(values), np.bool_)
            is_there[both] = True
            code = (np.cumsum(is_there) - 1)[both]
            pairs = (divmod(each, len(values)) for each in np.flatnonzero(is_there).tolist())
            labels = [(*labels[before], values[number]) for before, number in pairs]
        return code, labels


class _Texts(dict[Any, Any]):
    """One object for every text: a million leaves say the same few, and what is compared is then close at hand."""

    def __missing__(self, text: Any) -> Any:
        self[text] = text
        return text


class EvidenceBuilder:
    """Builds evidence from rows as they are read: named columns, and some lists of runs for each row."""

    def __init__(self, columns: Mapping[str, bool], lists: int = 1) -> None:
        """`columns`: by name, whether it is one of numbers (decimal strings are numbers, too)."""
        self._columns = columns
        self._parts: dict[str, list[Any]] = {name: [] for name in columns}
        self._flat: list[list[tuple[Int64s, Pairs]]] = [[] for _ in range(lists)]
        self._size = 0
        self._texts = _Texts()

    def add(self, values: Iterable[Sequence[Any]], lists: Sequence[Sequence[Any]]) -> None:
        """Add rows: the values of each column, and for each list of runs every row's."""
        for (name, is_number), column in zip(self._columns.items(), values, strict=True):
            held = np.array(column, np.int64) if is_number else list(map(self._texts.__getitem__, column))
            self._parts[name].append(held)
        for flat, each in zip(self._flat, lists, strict=True):
            flat.append(_flat(each, self._size))
        self._size += len(lists[0])

    def evidence(self) -> list[Evidence]:
        """Return the added rows, once for each list of runs."""
        held = {name: _together(self._parts[name], is_number) for name, is_number in self._columns.items()}
        return [Evidence(self._size, held, *_joined(each)) for each in self._flat]


def read(
    connection: Connection,
    table: Table,
    columns: Sequence[ColumnElement[Any]],
    where: ColumnElement[bool],
    *,
    ordered: bool = True,
    within: FromClause | None = None,
) -> Evidence:
    """Return rows of a projection with the runs of their leaves, in ledger order if `ordered`.

    `within`: ranges that `where` joins to the table, each looked up by an index.
    """
    return _read(connection, table, columns, where, ("runs",), ordered, within=within)[0]


def read_opened(
    connection: Connection,
    columns: Sequence[ColumnElement[Any]],
    where: ColumnElement[bool],
    *,
    ordered: bool = True,
    with_rules: bool = False,
    with_earlier: bool = False,
) -> tuple[Evidence, Evidence]:
    """Return openings of residencies, with attached runs and with handed-out runs.

    `with_rules`: a text column `rules` more, the JSON list of rules that the leaf names. `with_earlier`: a column of
    numbers `earlier_blocks` more.
    """
    cuts: dict[str, _Cut] = {"rules": _rules_of} if with_rules else {}
    cuts |= {EARLIER: _earlier_of} if with_earlier else {}
    attached, written = _read(connection, residencies, columns, where, ("runs", "written"), ordered, cuts)
    return attached, written


class Assignments(NamedTuple):
    """Blocks whose custody belongs to another tenant than the one they were handed to: sorted keys and owners."""

    keys: Int64s
    owner: Int64s  # a place in `parties`
    parties: list[tuple[str, str]]  # tenant and classification

    def of(self, keys: Int64s) -> Int64s:
        """Return the place in `parties` of each key; -1: the writer's own."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.owner[at], -1)


def read_assignments(connection: Connection, life: int, as_of: AsOf | None = None) -> Assignments:
    """Return the assignments in an incarnation's `blocks-assigned` leaves; each leaf is in two logs and read from
    both.
    """
    query = select(events.c.leaf).where(
        events.c.incarnation == life, events.c.kind == ASSIGNMENT, has_leaf(events), is_in(as_of, events)
    )
    leaves = [bytes(leaf) for leaf in connection.scalars(query)]
    rows, pairs = _flat(run_lists(leaves, "runs"), 0)
    parties = [(body["owner"], body["classification"]) for body in map(orjson.loads, leaves)]
    return assignments_of(rows, pairs, parties)


def assignments_of(rows: Int64s, pairs: Pairs, parties: list[tuple[str, str]]) -> Assignments:
    """Return assignments from the flat runs of leaves, the number of each run's leaf, and the parties of each leaf."""
    keys, first = np.unique(unit_keys(pairs.pools, pairs.generations), return_index=True)
    return Assignments(keys, rows[first], parties)


def _read(
    connection: Connection,
    table: Table,
    columns: Sequence[ColumnElement[Any]],
    where: ColumnElement[bool],
    lists: tuple[str, ...],
    ordered: bool,
    cuts: Mapping[str, _Cut] = MappingProxyType({}),
    within: FromClause | None = None,
) -> list[Evidence]:
    number = table.c.item if "item" in table.c else literal(0)
    source = table if within is None else within.join(table, where)
    query = (
        select(*columns, events.c.leaf, number.label("_item"))
        .select_from(source.join(events, is_leaf_of(table)))
        .where(where)
    )
    if ordered:
        query = query.order_by(*table.primary_key.columns)
    numeric = {str(column.key): isinstance(column.type, Integer | Boolean) for column in columns}
    builder = EvidenceBuilder(numeric | {name: name == EARLIER for name in cuts}, len(lists))
    with gc_paused():
        for rows in _some_at_once(connection, query):
            columns_read: list[Sequence[Any]] = list(zip(*rows, strict=True))
            run_lists = [_run_lists(columns_read[-2], columns_read[-1], key, kinds_of(table)) for key in lists]
            if None in run_lists[0]:  # rows of items that their leaves do not have
                is_there = [runs is not None for runs in run_lists[0]]
                columns_read = [list(compress(column, is_there)) for column in columns_read]
                run_lists = [list(compress(each, is_there)) for each in run_lists]
            *values, leaves, _ = columns_read
            builder.add([*values, *(cut(leaves) for cut in cuts.values())], run_lists)
    return builder.evidence()


def _some_at_once(connection: Connection, query: Select[Any]) -> Iterator[Sequence[Sequence[Any]]]:
    """Yield the rows of a query, `_ROWS_AT_ONCE` at a time."""
    if not dialect_of(connection).in_file:
        yield from connection.execute(query, execution_options={"yield_per": _ROWS_AT_ONCE}).partitions()
        return
    # From the driver's own cursor, which reads row by row: numbers, texts and leaves are as it gives them, and a row
    # object more for each costs a quarter of the reading.
    result = connection.execute(query)
    cursor: Any = result.cursor
    while rows := cursor.fetchmany(_ROWS_AT_ONCE):
        yield rows
    result.close()


def _flat(each: Sequence[Sequence[Any]], first_row: int) -> tuple[Int64s, Pairs]:
    """Owners and pairs of the run lists of some rows."""
    pairs, lengths = decode_flat(list(chain.from_iterable(each)))
    runs = np.fromiter(map(len, each), np.int64, len(each))
    rows = np.arange(first_row, first_row + len(each))
    return np.repeat(np.repeat(rows, runs), lengths), pairs


def _together(parts: Sequence[Any], is_number: bool) -> Int64s | list[Any]:
    if is_number:
        return np.concatenate([np.empty(0, np.int64), *parts])
    return list(chain.from_iterable(parts))


def _joined(parts: Sequence[tuple[Int64s, Pairs]]) -> tuple[Int64s, Pairs]:
    nothing = np.empty(0, np.int64)
    owner = np.concatenate([nothing, *(owner for owner, _ in parts)])
    columns = zip(*(pairs for _, pairs in parts), strict=True)
    pairs = Pairs(*map(np.concatenate, columns)) if parts else Pairs(nothing, nothing, nothing)
    return owner, pairs


def _run_lists(leaves: Sequence[bytes], numbers: Sequence[int], key: str, kinds: Collection[str]) -> list[Any]:
    """Return the run list of each row, from its leaf or that leaf's item; None if the leaf has no such item."""
    if not any(numbers):
        return run_lists(leaves, key)
    held: dict[bytes, dict[int, Any]] = {}
    plain = iter(run_lists([leaf for leaf, number in zip(leaves, numbers, strict=True) if not number], key))
    found = []
    for leaf, number in zip(leaves, numbers, strict=True):
        if number and leaf not in held:
            held[leaf] = runs_of_items(orjson.loads(leaf), kinds)
        found.append(held[leaf].get(number) if number else next(plain))
    return found


def run_lists(leaves: Sequence[bytes], key: str) -> list[Any]:
    """Return the run list under `key` of each leaf (empty without one); raises `LedgerError` for bytes that are no
    leaf.

    Canonical leaves have their keys in order and no space, so the list is cut out and parsed without the rest: its text
    ends at the first `]],"`, as the name of the next key follows it.
    """
    start = f'"{key}":'.encode()
    rests = [data.partition(start)[2] for data in leaves]
    texts = [b"[]" if rest[:2] in _NONE else rest[: rest.find(b']],"') + 2] for rest in rests]
    try:
        found: list[Any] = orjson.loads(b"[" + b",".join(texts) + b"]")
    except ValueError as problem:
        raise LedgerError(f"the list `{key}` of a leaf cannot be read: {problem}") from problem
    return found


def _rules_of(leaves: Sequence[bytes]) -> list[bytes]:
    """Return the list of rules of each opening. Leaves have sorted keys and escaped quotes, so bytes can be
    searched.
    """
    starts = [data.find(_RULES) + len(_RULES) for data in leaves]
    return [data[at : data.find(_AFTER_RULES, at)] for data, at in zip(leaves, starts, strict=True)]


def _earlier_of(leaves: Sequence[bytes]) -> list[int]:
    """Return how many blocks of each opening are the request's own earlier work; few leaves have any."""
    return [int(data.partition(_EARLIER)[2].split(b",", 1)[0]) if _EARLIER in data else 0 for data in leaves]


_EARLIER = f'"{EARLIER}":'.encode()
_RULES, _AFTER_RULES = b'"reasons":', b',"residency":'
_NONE = (b"", b"[]")
_ROWS_AT_ONCE = 20_000  # so many leaves are held at once, beside what is kept of all
POOL_SHIFT = 48  # 2^48 generations a pool, 2^15 pools
GENERATION_MASK = (1 << POOL_SHIFT) - 1


def distinct(values: Int64s) -> Int64s:
    """Return the distinct values in order, by sorting: faster than `np.unique`'s table if most values differ."""
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def is_among(values: Int64s, ordered: Int64s) -> NDArray[np.bool_]:
    """Return whether each value is in the sorted list."""
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    found: NDArray[np.bool_] = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return found


def unit_keys(pools: Int64s, generations: Int64s) -> Int64s:
    """Return (pool, generation) as one sortable number, which names a custody within an incarnation."""
    return (pools << POOL_SHIFT) | generations
