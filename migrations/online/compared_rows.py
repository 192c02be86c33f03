"""The new form of tables against leaves, log by log, before it takes its place: nothing of it may differ.

1. Each window is read in one snapshot, with what writers have added since the copy. Writers go on.
2. A row that has no leaf any more is compared with the old form's.
3. Rows that are at no place of a log end the change too: those of the old form would be lost, those of the new one
   would be in the way of leaves to come, and no window has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import Connection, Engine, Table, func, or_, select, update

from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.project import project
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.database.open_changes import forms_of
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.schema_changes import schema_change_logs
from kvcustody.audit.verify.ledger.row_differences import differences
from kvcustody.migrations.online.copied_rows import (
    Lives,
    Progress,
    Step,
    added_columns,
    difference,
    key_of,
    rows_between,
)

_AT_ONCE = 5000


class _ComparedLog(NamedTuple):
    log: int
    size: int
    compared: int


def compare_rows(engine: Engine, step: Step, progress: Progress | None) -> None:
    """Compare every log from where the last process was; raises `LedgerError` at the first difference."""
    lives, done = Lives(), 0
    with engine.connect() as connection:
        _refuse_strays(connection)
        found = _logs(connection)
    total = sum(of.size for of in found)
    for log, size, compared in found:
        for first in range(compared, size, _AT_ONCE):
            places = range(first, min(first + _AT_ONCE, size))
            with engine.connect() as connection:
                dialect_of(connection).begin_reading(connection)
                dialect_of(connection).as_long_as_it_takes(connection)
                forms = forms_of(connection)
                if not forms:  # another process has ended the change
                    return
                _compare(connection, forms, log, places, lives)
            with engine.connect().execution_options(**WRITE) as connection, connection.begin():
                here = schema_change_logs.c.log_id == log
                connection.execute(update(schema_change_logs).where(here).values(compared=places.stop))
                step("window compared")
            if progress is not None:
                progress("rows compared", done + places.stop, total)
        done += size


def _logs(connection: Connection) -> list[_ComparedLog]:
    """Every log, with those that are new since the change was opened."""
    column = schema_change_logs.c
    compared = {
        row[0]: row[1]
        for row in connection.execute(select(column.log_id, func.min(column.compared)).group_by(column.log_id))
    }
    query = select(logs.c.id, logs.c.size).order_by(logs.c.id)
    return [_ComparedLog(log, size, compared.get(log, 0)) for log, size in connection.execute(query)]


def _compare(connection: Connection, forms: Mapping[Table, Table], log: int, places: range, lives: Lives) -> None:
    query = select(events.c.idx, events.c.leaf).where(
        events.c.log == log, events.c.idx >= places.start, events.c.idx < places.stop
    )
    found = connection.execute(query.order_by(events.c.idx)).all()
    there = [row.idx for row in found]
    projected = (
        project(
            read_leaves([bytes(row.leaf) for row in found], hashed=False),
            [log] * len(found),
            there,
            lives.of(connection),
            tables=frozenset(forms),
        )
        if found
        else {}
    )
    leafless: dict[Table, set[int]] = {}
    for row in differences(connection, log, places, projected, forms):
        if row.is_missing or row.column or row.idx in there:
            raise difference(connection, row.table, log, row.idx, row.column)
        leafless.setdefault(row.table, set()).add(row.idx)
    for table, form in forms.items():  # rule 2
        _compare_leafless(connection, table, form, log, places, leafless.get(table, set()), frozenset(there))


def _compare_leafless(
    connection: Connection,
    table: Table,
    form: Table,
    log: int,
    places: range,
    copied: set[int],
    there: frozenset[int],
) -> None:
    old = {key_of(table, row): row for row in rows_between(connection, table, log, places)}
    wanted = {key: row for key, row in old.items() if key[0] not in there}
    if not wanted and not copied:
        return
    added = added_columns(connection, table)
    kept = [number for number, name in enumerate(table.columns.keys()) if name not in added]
    new = {key_of(table, row): row for row in rows_between(connection, form, log, places)}
    for key in sorted(wanted.keys() | {key for key in new if key[0] in copied}):
        here, was = new.get(key), wanted.get(key)
        if here is None or was is None or [here[each] for each in kept] != [was[each] for each in kept]:
            raise difference(connection, table, log, key[0], "")


def _refuse_strays(connection: Connection) -> None:
    """Rule 3."""
    forms = forms_of(connection)
    for table in (*forms, *forms.values()):
        of = select(logs.c.size).where(logs.c.id == table.c.log).scalar_subquery()
        stray = or_(of.is_(None), table.c.idx < 0, table.c.idx >= of)
        found = connection.execute(select(table.c.log, table.c.idx).where(stray).limit(1)).first()
        if found is not None:
            raise difference(connection, table, found.log, found.idx, "")
