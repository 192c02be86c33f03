"""Evidence read back: the rows of a projection beside the runs in their leaves, laid flat for arithmetic.

V1 Runs come from the leaves, never from a column; the rest of a row is a projection of the same leaf.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson
from sqlalchemy import ColumnElement, Connection, Table, select

from kvcustody.audit.runs import Int64s, Pairs, decode_flat
from kvcustody.audit.schema import events, residencies
from kvcustody.errors import LedgerError


class Evidence(NamedTuple):
    """Rows, and one flat entry per (pool, block, generation) with the number of its row."""

    rows: Sequence[Any]
    owner: Int64s
    pairs: Pairs

    def column(self, name: str) -> Int64s:
        """An integer column of the rows, as an array over rows."""
        if not self.rows:
            return np.empty(0, np.int64)
        place = self.rows[0]._fields.index(name)  # by place: by name it costs twice as much
        return np.array([row[place] for row in self.rows], np.int64)


def read(
    connection: Connection,
    table: Table,
    columns: Sequence[ColumnElement[Any]],
    where: ColumnElement[bool],
    *,
    ordered: bool = True,
) -> Evidence:
    """Rows of a projection with the runs of their leaves, in ledger order unless that is said not to matter."""
    return _read(connection, table, columns, where, ("runs",), ordered)[0]


def read_opened(
    connection: Connection,
    columns: Sequence[ColumnElement[Any]],
    where: ColumnElement[bool],
    *,
    ordered: bool = True,
) -> tuple[Evidence, Evidence]:
    """Openings of residencies with the runs that they attached, and with those that they were handed."""
    attached, written = _read(connection, residencies, columns, where, ("runs", "written"), ordered)
    return attached, written


def _read(
    connection: Connection,
    table: Table,
    columns: Sequence[ColumnElement[Any]],
    where: ColumnElement[bool],
    lists: tuple[str, ...],
    ordered: bool,
) -> list[Evidence]:
    query = (
        select(*columns, events.c.leaf)
        .join(events, (events.c.log == table.c.log) & (events.c.idx == table.c.idx))
        .where(where)
    )
    if ordered:
        query = query.order_by(table.c.log, table.c.idx)
    with collector_off():
        found = connection.execute(query).all()
        leaf = len(columns)
        rows: Sequence[Any] = found
        made = []
        for key in lists:
            each = run_lists([row[leaf] for row in found], key)
            pairs, lengths = decode_flat(list(chain.from_iterable(each)))
            runs = np.fromiter(map(len, each), np.int64, len(each))
            made.append(Evidence(rows, np.repeat(np.repeat(np.arange(len(rows)), runs), lengths), pairs))
    return made


def run_lists(leaves: Sequence[bytes], key: str) -> list[Any]:
    """The run list under `key` of each leaf (empty where it has none); raises `LedgerError` for bytes that are no leaf.

    Canonical leaves have their keys in order and no space, so the list is cut out and parsed without the rest: its text
    ends at the first `]],"`, as the name of the next key follows it.
    """
    start, texts = f'"{key}":'.encode(), []
    for data in leaves:
        begin = data.find(start)
        if begin < 0:
            texts.append(b"[]")
            continue
        begin += len(start)
        if data[begin : begin + 2] == b"[]":
            texts.append(b"[]")
        else:
            texts.append(data[begin : data.find(b']],"', begin) + 2])
    try:
        found: list[Any] = orjson.loads(b"[" + b",".join(texts) + b"]")
    except ValueError as problem:
        raise LedgerError(f"the list `{key}` of a leaf cannot be read: {problem}") from problem
    return found


@contextmanager
def collector_off() -> Iterator[None]:
    """Bulk reading makes millions of objects that all stay: looking for cycles among them triples its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


POOL_SHIFT = 48  # 2^48 generations a pool, 2^15 pools


def unit_keys(pools: Int64s, generations: Int64s) -> Int64s:
    """(pool, generation) as one sortable number: what names a custody inside an incarnation."""
    return (pools << POOL_SHIFT) | generations
