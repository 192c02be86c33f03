"""Copy rows into the new form of tables, then compare it with the leaves, window by window.

A window is some leaves of one log. Progress is recorded for each log in the transaction that writes the rows.

1. A transaction copies the next leaves of one log: as many as take about `SECONDS_WANTED`, estimated from the previous
   windows. A transaction that takes longer than `SECONDS_MAX` is ended and repeated with fewer leaves; a single leaf
   has no limit. A process that is killed resumes after the last transaction that committed.
2. `project` makes the rows. Rows whose leaves were purged are copied from the old form unchanged, a new column with its
   default, and counted.
3. A value of the old form that its leaf does not give ends the change before it is lost: `LedgerError` names table,
   log, idx and column.
4. No leaf is dropped while its rows are copied (`one_copy_at_a_time`).
5. The comparison reads each window in one snapshot, with the rows that writers added since the copy. Writers continue.
   A row without a leaf is compared with the old form's row.
6. A row at no place of a log ends the change too. In the old form it would be lost; in the new one it would block
   later leaves. No window contains such rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, Table, func, or_, select, update
from sqlalchemy.exc import IntegrityError, OperationalError

from kvcustody.audit.leaf.batch import EMPTY, read_leaves
from kvcustody.audit.project import IncarnationRow, project, rows_of
from kvcustody.audit.store.database.bulk_insert import Inserts, insert_rows
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import LOCKED, WRITE, describe
from kvcustody.audit.store.database.open_changes import forms_of, one_copy_at_a_time
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.store.schema.schema_changes import schema_change_logs, schema_changes
from kvcustody.audit.verify.ledger.row_differences import differences
from kvcustody.errors import LedgerError

SECONDS_WANTED, SECONDS_MAX = 0.4, 1.0  # of a transaction, until its commit
_LEAVES, _LEAVES_MIN, _LEAVES_MAX = 1000, 1, 50_000  # of the first, and bounds of the others
_FAILURES_MAX = 8  # in a row: the database is away, or refuses
_ENDED, _INTERRUPTED = "57014", "SQLITE_INTERRUPT"
_WAITED = frozenset({"55P03", _ENDED, "40P01"})  # a lock, a statement's time, a circle

Progress = Callable[[str, int, int], None]  # what, done, total
Step = Callable[[str], None]
_Row = tuple[Any, ...]
_RowKey = tuple[int, int]


_AT_ONCE = 5000


class Lives:
    """The ids of processes, each read once."""

    def __init__(self) -> None:
        self._known: dict[str, IncarnationRow] = {}

    def of(self, connection: Connection) -> Callable[[str], IncarnationRow]:
        """Return the look-up that `project` needs."""
        column = incarnations.c

        def life_of(uuid: str) -> IncarnationRow:
            if uuid not in self._known:
                query = select(column.id, column.offset_us).where(column.uuid == uuid)
                self._known[uuid] = IncarnationRow(*connection.execute(query).one())
            return self._known[uuid]

        return life_of


class _CopiedWindow(NamedTuple):
    """What one transaction came to: as far as it is, and whether that is all."""

    copied: int
    is_last: bool


def copy_rows(engine: Engine, step: Step, progress: Progress | None) -> None:
    """Copy the remaining rows of every log; call `step` before and after each commit."""
    lives = Lives()
    with engine.connect() as connection:
        column = schema_change_logs.c
        sizes = select(column.log_id, func.max(column.below), func.min(column.copied)).group_by(column.log_id)
        found = connection.execute(sizes.order_by(column.log_id)).all()
    total, done, leaves = sum(row[1] for row in found), 0, _LEAVES
    for log, below, _ in found:
        is_last = False
        while not is_last:
            (copied, is_last), leaves = _one_window(engine, log, leaves, lives, step)
            step("window copied")
            if progress is not None:
                progress("rows copied", done + copied, total)
        done += below


def _one_window(engine: Engine, log: int, leaves: int, lives: Lives, step: Step) -> tuple[_CopiedWindow, int]:
    """One transaction, and how many leaves the next one takes (rule 1)."""
    for failures in count():
        began = time.monotonic()
        try:
            with engine.connect().execution_options(**WRITE) as connection, connection.begin():
                one_copy_at_a_time(connection)
                if leaves > _LEAVES_MIN:
                    with dialect_of(connection).bounded(connection, SECONDS_MAX) as check:
                        window = _copy(connection, log, leaves, lives, check)
                else:
                    dialect_of(connection).as_long_as_it_takes(connection)
                    window = _copy(connection, log, leaves, lives, lambda: None)
                step("window made")
        except TimeoutError:
            leaves = max(_LEAVES_MIN, leaves // 4)
            continue
        except OperationalError as problem:  # it took too long, or waited for a purge
            is_too_long = leaves > _LEAVES_MIN and is_ended(problem)
            if not is_too_long and (failures >= _FAILURES_MAX or not is_in_the_way(problem)):
                raise
            leaves = max(_LEAVES_MIN, leaves // 4)
            continue
        return window, next_window(leaves, time.monotonic() - began)
    raise AssertionError  # `count` does not end


def is_ended(problem: OperationalError) -> bool:
    """Return whether a statement was ended because it took too long."""
    orig = problem.orig
    return getattr(orig, "sqlstate", None) == _ENDED or getattr(orig, "sqlite_errorname", "") == _INTERRUPTED


def is_in_the_way(problem: OperationalError) -> bool:
    """Return whether a transaction may be retried: others held its locks, or it took too long."""
    state = getattr(problem.orig, "sqlstate", None)
    return state in _WAITED if state else describe(problem) == LOCKED


def next_window(leaves: int, seconds: float) -> int:
    """Return how many leaves the next window takes, given the size and duration of the last."""
    wanted = leaves * min(2.0, max(0.25, SECONDS_WANTED / max(seconds, 1e-6)))
    return int(min(_LEAVES_MAX, max(_LEAVES_MIN, wanted)))


def _copy(connection: Connection, log: int, leaves: int, lives: Lives, check: Callable[[], None]) -> _CopiedWindow:
    forms = forms_of(connection)
    column = schema_change_logs.c
    place = select(func.min(column.copied), func.max(column.below)).where(column.log_id == log)
    copied, below = connection.execute(place).one()
    if not forms or copied is None or copied >= below:
        return _CopiedWindow(copied or 0, is_last=True)
    first = _first_there(connection, (events, *forms), log, copied, below)
    places = range(first, min(first + leaves, below))
    rows = _made_and_left(connection, forms, log, places, lives)
    for table, (pieces, left) in rows.items():
        check()
        inserts = Inserts(connection)
        inserts.add(forms[table], pieces)
        inserts.finish()
        _insert_left(connection, forms[table], log, left)
        change = {
            "copied": places.stop,
            "rows": column.rows + sum(len(piece[0]) for piece in pieces) + len(left),
            "leafless": column.leafless + len(left),
        }
        here = column.log_id == log, column.of_table == table.name
        connection.execute(update(schema_change_logs).where(*here).values(change))
        check()
    return _CopiedWindow(places.stop, is_last=places.stop >= below)


def _first_there(connection: Connection, tables: Sequence[Table], log: int, copied: int, below: int) -> int:
    """Return the next place with a leaf or a row; a purge may have removed everything before it."""
    first_places = [
        connection.scalar(
            select(table.c.idx)
            .where(table.c.log == log, table.c.idx >= copied, table.c.idx < below)
            .order_by(table.c.idx)
            .limit(1)
        )
        for table in tables
    ]
    return min([int(idx) for idx in first_places if idx is not None], default=below)


def _made_and_left(
    connection: Connection, forms: Mapping[Table, Table], log: int, places: range, lives: Lives
) -> dict[Table, tuple[list[Sequence[Sequence[Any]]], list[_Row]]]:
    """By table: what the leaves give, column by column, and the rows of the old form that have no leaf (rule 2)."""
    query = select(events.c.idx, events.c.leaf).where(
        events.c.log == log, events.c.idx >= places.start, events.c.idx < places.stop
    )
    found = connection.execute(query.order_by(events.c.idx)).all()
    batch = read_leaves([bytes(row.leaf) for row in found], hashed=False) if found else EMPTY
    there = [row.idx for row in found]
    made = project(batch, [log] * len(found), there, lives.of(connection), tables=frozenset(forms))
    rows = {}
    for table in forms:
        pieces = made.get(table, [])
        rows[table] = pieces, _left(connection, table, log, places, frozenset(there), pieces)
    return rows


def _left(
    connection: Connection,
    table: Table,
    log: int,
    places: range,
    places_with_leaf: frozenset[int],
    pieces: Sequence[Sequence[Sequence[Any]]],
) -> list[_Row]:
    """Rows of the old form whose leaf is gone; raises where one differs from what its leaf gives (rule 3)."""
    added = added_columns(connection, table)
    compared_columns = [number for number, name in enumerate(table.columns.keys()) if name not in added]
    projected = {key_of(table, row): row for piece in pieces for row in rows_of(piece)}
    leafless = []
    for row in rows_between(connection, table, log, places):
        key = key_of(table, row)
        wanted = projected.pop(key, None)
        if wanted is None and key[0] not in places_with_leaf:
            leafless.append(row)
        elif wanted is None:
            raise difference(connection, table, log, key[0], "")
        elif wrong := next((number for number in compared_columns if row[number] != wanted[number]), None):
            raise difference(connection, table, log, key[0], table.columns.keys()[wrong])
    if projected:
        raise difference(connection, table, log, min(projected)[0], "")
    return leafless


def rows_between(connection: Connection, table: Table, log: int, places: range) -> list[_Row]:
    """Return the rows of one form of a table at these places of a log."""
    here = table.c.log == log, table.c.idx >= places.start, table.c.idx < places.stop
    return [(*row,) for row in connection.execute(select(table).where(*here))]


def key_of(table: Table, row: Sequence[Any]) -> _RowKey:
    """Return the place of a row's leaf, and its item."""
    return row[1], row[2] if "item" in table.columns else 0


def added_columns(connection: Connection, table: Table) -> frozenset[str]:
    """Return the columns that the old form only has during the change."""
    query = select(schema_changes.c.added).where(schema_changes.c.of_table == table.name)
    return frozenset((connection.scalar(query) or "").split())


def _insert_left(connection: Connection, form: Table, log: int, leafless: Sequence[_Row]) -> None:
    try:
        insert_rows(connection, form, leafless)
    except IntegrityError:
        table = form.name
        raise LedgerError(
            f"rows of `{table}` at `{leafless[0][1]}` and after it in log `{log}` have no leaf, and its new form has "
            "no default for what they lack; the change stops here, and `kvcustody db upgrade --undo` takes it back",
            table=table,
            log=log,
        ) from None


def difference(connection: Connection, table: Table, log: int, idx: int, column: str) -> LedgerError:
    """Return the error for a row that its leaf does not give (rule 3)."""
    name = connection.scalar(select(logs.c.name).where(logs.c.id == log)) or str(log)
    where = f" in column `{column}`" if column else ""
    return LedgerError(
        f"the row of `{table.name}` at leaf `{idx}` of `{name}` differs from the leaf{where}: run `kvcustody audit "
        "fsck`; the change stops here, and `kvcustody db upgrade --undo` takes it back",
        table=table.name,
        log=name,
        idx=idx,
        column=column,
    )


# -- the comparison ----------------------------------------------------------------------------------------------------


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
    leaf_rows = connection.execute(query.order_by(events.c.idx)).all()
    places_there = [row.idx for row in leaf_rows]
    projected = (
        project(
            read_leaves([bytes(row.leaf) for row in leaf_rows], hashed=False),
            [log] * len(leaf_rows),
            places_there,
            lives.of(connection),
            tables=frozenset(forms),
        )
        if leaf_rows
        else {}
    )
    leafless: dict[Table, set[int]] = {}
    for row in differences(connection, log, places, projected, forms):
        if row.is_missing or row.column or row.idx in places_there:
            raise difference(connection, row.table, log, row.idx, row.column)
        leafless.setdefault(row.table, set()).add(row.idx)
    for table, form in forms.items():  # rule 5
        _compare_leafless(connection, table, form, log, places, leafless.get(table, set()), frozenset(places_there))


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
    """Rule 6."""
    forms = forms_of(connection)
    for table in (*forms, *forms.values()):
        of = select(logs.c.size).where(logs.c.id == table.c.log).scalar_subquery()
        stray = or_(of.is_(None), table.c.idx < 0, table.c.idx >= of)
        found = connection.execute(select(table.c.log, table.c.idx).where(stray).limit(1)).first()
        if found is not None:
            raise difference(connection, table, found.log, found.idx, "")
