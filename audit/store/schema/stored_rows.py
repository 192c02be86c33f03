"""Read rows of the control plane's own tables, without letting an unreadable row end a list.

    rows = stored_rows(connection, select(service_jobs).where(...))
    rows[0].state, rows[0].unread                    # "lost", "service_jobs `cd…`: `state` is no word known here"

1. A value that its column cannot have is replaced by one that gives nothing. The replacement is 0 for a number or
   moment, and nothing for a document. In a column of words it is the word that stands for any other. For text it is the
   printable part. These values are not possible:
   - another type;
   - a number below 0 or from 2**53 on;
   - text that is not Unicode or contains U+0000;
   - a word or form that the schema does not declare;
   - nothing, where a value is required.
2. The row names itself and each such column in `unread`. Code that decides by a row checks that first: a principal, key
   or session that was not read completely is refused.
3. A page ends at a row whose order is known, so that the next begins there. So no row is left out or repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Column, Connection, Integer, Select, String

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.errors import ConfigError
from kvcustody.logger import get_logger

_log = get_logger(__name__)
LARGE = 1 << 53
_SHOWN_CHARACTERS = 64
_TOLD_KEPT = 1024


class StoredRow:
    """The values of a row by column name, as attributes; `unread`: the parts that cannot be read (rule 2)."""

    __slots__ = ("odd", "unread", "values")

    def __init__(self, values: dict[str, Any], odd: frozenset[str], unread: str) -> None:
        self.values, self.odd, self.unread = values, odd, unread

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


class RowPage(NamedTuple):
    """Rows in order, and whether more follow the last."""

    rows: list[StoredRow]
    more: bool


def stored_rows(connection: Connection, query: Select[Any]) -> list[StoredRow]:
    """Return every row of a query over the control plane's tables."""
    columns = _columns(query)
    with dialect_of(connection).any_text(connection):
        found = connection.execute(query).all()
    return [_stored(columns, dict(row._mapping)) for row in found]


def stored_row(connection: Connection, query: Select[Any]) -> StoredRow | None:
    """Return the first row of a query, if there is one."""
    return next(iter(stored_rows(connection, query.limit(1))), None)


def stored_page(connection: Connection, query: Select[Any], order: Sequence[Column[Any]], limit: int) -> RowPage:
    """Return the first rows of an ordered query: `limit`, and more up to one whose order is known (rule 3)."""
    names = {column.name for column in order}
    row_limit = limit + 1
    while True:
        rows = stored_rows(connection, query.limit(row_limit))
        ends = (at for at in range(limit, len(rows)) if not rows[at - 1].odd & names)
        end = next(ends, None)
        if end is not None:
            return RowPage(rows[:end], more=True)
        if len(rows) < row_limit:
            return RowPage(rows, more=False)
        row_limit *= 2


def check_read(row: StoredRow | Any) -> None:
    """Raise `ConfigError` for a fact from a row that was not fully read (rule 2)."""
    if row.unread:
        raise ConfigError(f"it cannot be read: {row.unread}")


def _columns(query: Select[Any]) -> dict[str, Column[Any]]:
    """Return the schema's columns behind a query's columns, by their names in its rows."""
    found = {name: getattr(each, "element", each) for name, each in query.exported_columns.items()}
    return {name: each for name, each in found.items() if isinstance(each, Column)}


def _stored(columns: Mapping[str, Column[Any]], found: Mapping[str, Any]) -> StoredRow:
    values = dict(found)
    whys: dict[str, str] = {}
    for name, column in columns.items():
        values[name], why = _read(column, found[name])
        if why:
            whys[name] = why
    if not whys:
        return StoredRow(values, frozenset(), "")
    by_table: dict[str, list[str]] = {}
    for name, why in whys.items():
        by_table.setdefault(columns[name].table.name, []).append(f"`{columns[name].name}` {why}")
    said = "; ".join(
        f"{table} `{_named(table, columns, values)}`: {', '.join(parts)}" for table, parts in by_table.items()
    )
    _tell(said)
    return StoredRow(values, frozenset(whys), said)


def _named(table: str, columns: Mapping[str, Column[Any]], values: Mapping[str, Any]) -> str:
    """Return a row's primary key as text, as far as the query has it."""
    keys = (name for name, each in columns.items() if each.table.name == table and each.primary_key)
    return "/".join(str(values[name]) for name in keys)


@lru_cache(_TOLD_KEPT)
def _tell(said: str) -> None:
    """Log a row once."""
    _log.warning("a row of the control plane cannot be read", row=said)


def _read(column: Column[Any], value: Any) -> tuple[Any, str]:
    """Return a column's value, and why the stored one differs (rule 1)."""
    if value is None:
        return (None, "") if column.nullable else (_nothing(column, value), "is not there")
    if isinstance(column.type, Integer):
        why = "" if type(value) is int and 0 <= value < LARGE else "is no number from 0 to 2**53 - 1"
    elif isinstance(column.type, String):
        return _read_text(column, value)
    else:
        return value, ""
    return (_nothing(column, value), why) if why else (value, "")


def _read_text(column: Column[Any], value: Any) -> tuple[Any, str]:
    why, form = "", column.info
    if not isinstance(value, str) or (not value.isprintable() and _unstorable(value)):
        why = "is no text"
    elif "json" in form:
        document = _document(value, _FORMS[form["json"]])
        return (document, "") if document is not None else (_nothing(column, value), "is no document of its form")
    elif "words" in form and value not in form["words"]:
        why = "is no word known here"
    elif "form" in form and re.fullmatch(form["form"], value) is None:
        why = "has another form"
    return (_nothing(column, value), why) if why else (value, "")


def _unstorable(value: str) -> bool:
    return "\0" in value or any("\ud800" <= each <= "\udfff" for each in value)


def _nothing(column: Column[Any], value: Any) -> Any:
    """What stands for a value that cannot be read: it gives nobody anything."""
    if isinstance(column.type, Integer):
        return 0
    if "json" in column.info:
        return None if column.nullable else {}
    if "words" in column.info:
        return column.info["else"]
    return "" if value is None else ascii(value)[:_SHOWN_CHARACTERS]


def _document(text: str, is_of_form: Callable[[Any], bool]) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and is_of_form(found) else None


def _are_numbers(found: Any) -> bool:
    return isinstance(found, dict) and all(type(each) in (int, float) for each in found.values())


_FORMS: dict[str, Callable[[Any], bool]] = {
    "object": lambda found: True,
    "numbers": _are_numbers,
    "numbers by name": lambda found: all(map(_are_numbers, found.values())),
}
