"""Compare stored rows of a window of one log with those that its leaves give, table by table.

A table in two forms (`open_changes`) is looked at in either. Only reads, and creates nothing: SELECT is enough, on a
standby and on a read-only file too. Memory is bounded by the window. Rows that are of no leaf of the window are looked
for elsewhere (`stray_rows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, Table, bindparam, select

from kvcustody.audit.project import rows_of
from kvcustody.audit.store.schema.all_tables import projections

Projected = Mapping[Table, Sequence[Sequence[Sequence[Any]]]]  # as `project` has it
_RowKey = tuple[int, int]  # the leaf's idx, and the item of it


class RowDifference(NamedTuple):
    """A row that differs from what its leaf gives: the leaf, and its item (0: the leaf is no list).

    `column` is the first that differs; empty where the row is missing, is there twice, or no leaf gives it.
    """

    table: Table
    idx: int
    item: int
    is_missing: bool
    column: str = ""


def differences(
    connection: Connection,
    log: int,
    places: range,
    projected: Projected,
    forms: Mapping[Table, Table] | None = None,
    besides: Mapping[Table, frozenset[str]] | None = None,
) -> Iterator[RowDifference]:
    """Yield stored rows of the leaves in `places` that differ from what these give, in the order of tables and places.

    `forms`: what the new forms of these tables have is looked at instead, and no other table. `besides`: columns that
    are not looked at, for the old form has them for the time of a change alone.
    """
    between = {"of_log": log, "first": places.start, "last": places.stop - 1}
    for table, stored_in in forms.items() if forms is not None else zip(projections(), projections(), strict=True):
        rows = list(map(tuple, connection.execute(_rows_between(stored_in), between).all()))
        key_of = _key_of(table)
        stored: dict[_RowKey, tuple[Any, ...]] = dict(zip(map(key_of, rows), rows, strict=True))
        if len(stored) < len(rows):  # a month's key lets another of another month through
            stored |= {key: () for key, count in Counter(map(key_of, rows)).items() if count > 1}
        pieces = [rows_of(columns) for columns in projected.get(table, ())]
        made = {key_of(row): row for row in chain.from_iterable(pieces)}
        if stored != made:
            for key in sorted(stored.keys() | made.keys()):
                here, wanted = stored.get(key), made.get(key)
                if here != wanted and not _is_same_besides(table, here, wanted, besides):
                    yield RowDifference(table, *key, here is None, _first_column(table, here, wanted))


def _is_same_besides(
    table: Table,
    stored: tuple[Any, ...] | None,
    derived: tuple[Any, ...] | None,
    besides: Mapping[Table, frozenset[str]] | None,
) -> bool:
    """Return whether two rows are equal except for ignored columns."""
    left_out = (besides or {}).get(table)
    if not left_out or not stored or derived is None:
        return False
    rows = zip(table.columns.keys(), stored, derived, strict=True)
    return all(here == wanted for name, here, wanted in rows if name not in left_out)


def _first_column(table: Table, stored: tuple[Any, ...] | None, made: tuple[Any, ...] | None) -> str:
    if not stored or made is None:
        return ""
    pairs = zip(table.columns.keys(), stored, made, strict=True)
    return next(name for name, here, wanted in pairs if here != wanted)


@cache
def _rows_between(table: Table) -> Select[Any]:
    """Return a projection's rows for leaves of one log from `first` to `last`."""
    column = table.c
    here = (
        column.log == bindparam("of_log"),
        column.idx >= bindparam("first"),
        column.idx <= bindparam("last"),
    )
    return select(table).where(*here)


@cache
def _key_of(table: Table) -> Callable[[Sequence[Any]], _RowKey]:
    return itemgetter(1, 2) if "item" in table.columns else _without_item


def _without_item(row: Sequence[Any]) -> _RowKey:
    return row[1], 0
