"""Insert many rows into one table: prepared multi-row INSERTs on SQLite, binary COPY on PostgreSQL.

1. A failure raises the error that SQLAlchemy raises for a statement of its own. So callers distinguish a refused row
   from a lost database in one way.
2. Rows and columns arrive in the order of the table's columns.

On SQLite a statement of many rows costs a third less than as many statements of one row. It runs without the
interpreter lock from its first row to its last, so another thread can encode meanwhile. The widths are powers of two,
because each statement has to wait for that lock again at its end: a batch of any size takes the fewest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from sqlalchemy import BigInteger, Boolean, Connection, Integer, LargeBinary, Table

from kvcustody.audit.store.database.dialect import dialect_of, raise_driver_error

Row = tuple[Any, ...]
Columns = Sequence[Sequence[Any]]  # of one length
_NEW = " ON CONFLICT DO NOTHING"
# Rows of one statement; SQLite takes 32,766 values in one.
_WIDTHS = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)


def insert_rows(connection: Connection, table: Table, rows: Iterable[Row]) -> None:
    """Insert rows inside the caller's transaction; raises `DBAPIError` like a statement."""
    if not dialect_of(connection).arrays:
        _insert(connection, table, list(chain.from_iterable(rows)), _WIDTHS)
    else:
        _copy(connection, table, rows)


def insert_new(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows, except those whose key exists or that an earlier row of them has."""
    _insert_ending(connection, table, rows, _NEW)


def replace_rows(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows; a row whose key exists replaces it."""
    key = [column.name for column in table.primary_key.columns]
    others = ", ".join(f"{column.name} = excluded.{column.name}" for column in table.columns if column.name not in key)
    ending = f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {others}"
    _insert_ending(connection, table, rows, ending)


def _insert_ending(connection: Connection, table: Table, rows: Sequence[Row], ending: str) -> None:
    if not dialect_of(connection).arrays:
        _insert(connection, table, list(chain.from_iterable(rows)), _WIDTHS, ending=ending)
    elif rows:
        arrays = ", ".join(f"%b::{_type(column.type)}[]" for column in table.columns)
        statement = f"INSERT INTO {table.fullname} ({_names(table)}) SELECT * FROM unnest({arrays}){ending}"  # noqa: S608 - our own names
        connection.exec_driver_sql(statement, tuple(map(list, zip(*rows, strict=True))))


class Inserts:
    """Rows of one transaction. On SQLite, rows that do not fill a statement wait for more, or for `finish`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: dict[Table, list[Any]] = {}

    def add(self, table: Table, pieces: Sequence[Columns]) -> None:
        """Add rows in pieces, each with its values by column; raises like `insert_rows`."""
        if not dialect_of(self._connection).arrays:
            flat = self._waiting.setdefault(table, [])
            flat += _by_row(pieces, len(table.columns))
            _insert(self._connection, table, flat, _WIDTHS[:1])
        else:
            rows = (zip(*piece, strict=True) for piece in pieces)
            _copy(self._connection, table, chain.from_iterable(rows))

    def finish(self) -> None:
        """Insert the waiting rows."""
        for table, flat in self._waiting.items():
            _insert(self._connection, table, flat, _WIDTHS)


def _by_row(pieces: Sequence[Columns], width: int) -> list[Any]:
    """Values row after row, with no object made for any row."""
    flat: list[Any] = [None] * (width * sum(len(piece[0]) for piece in pieces))
    start = 0
    for piece in pieces:
        end = start + width * len(piece[0])
        for place, column in enumerate(piece, start):
            flat[place:end:width] = column
        start = end
    return flat


def _insert(connection: Connection, table: Table, flat: list[Any], widths: Sequence[int], *, ending: str = "") -> None:
    """Insert rows, given as their values one after the other, and drop them from the list; a few may stay."""
    cursor = connection.connection.cursor()
    columns, start = len(table.columns), 0
    try:
        for width in widths:
            statement, values = _insert_statement(table, width) + ending, width * columns
            while len(flat) - start >= values:
                cursor.execute(statement, flat[start : start + values])
                start += values
    except connection.dialect.loaded_dbapi.Error as problem:
        raise_driver_error(connection, _insert_statement(table, 1), problem)
    del flat[:start]


def _copy(connection: Connection, table: Table, rows: Iterable[Row]) -> None:
    statement, types = _copy_statement(table)
    try:
        with connection.connection.cursor() as cursor, cursor.copy(statement) as copy:  # type: ignore[attr-defined]
            copy.set_types(types)
            write = copy.write_row
            for row in rows:
                write(row)
    except connection.dialect.loaded_dbapi.Error as problem:
        raise_driver_error(connection, statement, problem)


@cache
def _insert_statement(table: Table, rows: int) -> str:
    marks = f"({', '.join('?' * len(table.columns))})"
    return f"INSERT INTO {table.fullname} ({_names(table)}) VALUES {', '.join([marks] * rows)}"  # noqa: S608 - our own names


@cache
def _copy_statement(table: Table) -> tuple[str, tuple[str, ...]]:
    types = tuple(_type(column.type) for column in table.columns)
    return f"COPY {table.fullname} ({_names(table)}) FROM STDIN (FORMAT BINARY)", types


def _names(table: Table) -> str:
    return ", ".join(f'"{column.name}"' for column in table.columns)


def _type(kind: Any) -> str:
    for known, name in ((BigInteger, "int8"), (Integer, "int4"), (Boolean, "bool"), (LargeBinary, "bytea")):
        if isinstance(kind, known):
            return name
    return "text"
