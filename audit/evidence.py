"""Evidence read back: the rows of a projection beside the runs in their leaves, laid flat for arithmetic.

V1 Runs come from the leaves, never from a column; the rest of a row is a projection of the same leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from sqlalchemy import ColumnElement, Connection, Table, select

from kvcustody.audit.runs import Int64s, Pairs, decode_flat
from kvcustody.audit.schema import events, residencies


class Evidence(NamedTuple):
    """Rows, and one flat entry per (pool, block, generation) with the number of its row."""

    rows: Sequence[Any]
    owner: Int64s
    pairs: Pairs

    def column(self, name: str) -> Int64s:
        """An integer column of the rows, as an array over rows."""
        return np.fromiter((int(getattr(row, name)) for row in self.rows), np.int64, len(self.rows))


def read(
    connection: Connection, table: Table, columns: Sequence[ColumnElement[Any]], where: ColumnElement[bool]
) -> Evidence:
    """Rows of a projection with the runs of their leaves, in ledger order."""
    return _read(connection, table, columns, where, ("runs",))[0]


def read_opened(
    connection: Connection, columns: Sequence[ColumnElement[Any]], where: ColumnElement[bool]
) -> tuple[Evidence, Evidence]:
    """Openings of residencies with the runs that they attached, and with those that they were handed."""
    attached, written = _read(connection, residencies, columns, where, ("runs", "written"))
    return attached, written


def _read(
    connection: Connection,
    table: Table,
    columns: Sequence[ColumnElement[Any]],
    where: ColumnElement[bool],
    lists: tuple[str, ...],
) -> list[Evidence]:
    query = (
        select(*columns, events.c.leaf)
        .join(events, (events.c.log == table.c.log) & (events.c.idx == table.c.idx))
        .where(where)
        .order_by(table.c.log, table.c.idx)
    )
    rows: Sequence[Any] = connection.execute(query).all()
    items: list[list[Any]] = [[] for _ in lists]
    runs = np.empty((len(lists), len(rows)), np.int64)
    for number, row in enumerate(rows):
        body = orjson.loads(row.leaf)
        for which, key in enumerate(lists):
            found = body.get(key, ())
            runs[which, number] = len(found)
            items[which] += found
    made = []
    for which in range(len(lists)):
        pairs, lengths = decode_flat(items[which])
        owner = np.repeat(np.repeat(np.arange(len(rows)), runs[which]), lengths)
        made.append(Evidence(rows, owner, pairs))
    return made


POOL_SHIFT = 48  # 2^48 generations a pool, 2^15 pools


def unit_keys(pools: Int64s, generations: Int64s) -> Int64s:
    """(pool, generation) as one sortable number: what names a custody inside an incarnation."""
    return (pools << POOL_SHIFT) | generations
