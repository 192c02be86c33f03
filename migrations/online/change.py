"""An online change of tables of leaves' rows, step by step, from the revision that requests it to the swap.

    open_change(connection, tables, revision, before)   # in the transaction that records the revision
    finish_change(engine, actor=..., step=..., progress=...)

1. Opening makes the new form and adds missing parts to the old one. It records for each log how far rows are to be
   copied. From there on, writers of this version write both forms. Those of an older one are refused: the revision is
   recorded.
2. Then rows are copied and compared (`row_windows`), each step in short transactions whose place is recorded. Whoever
   is killed, or stopped by a difference, goes on from there; several processes may do it together.
3. The swap takes every lock in one statement, or gives up within `LOCK_MS` and tries again after a pause: readers that
   come meanwhile wait no longer. The leaf `schema-changed` commits with it.
4. `undo_change` drops an unfinished copy and what was added to the old form, and records the revision from before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, delete, func, insert, select
from sqlalchemy.exc import OperationalError

from kvcustody.audit.kinds import SchemaChanged
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import VERSION_TABLE, WRITE
from kvcustody.audit.store.schema.ledger import logs, metadata
from kvcustody.audit.store.schema.schema_changes import schema_change_logs, schema_changes
from kvcustody.audit.write.append_leaves import Appender, record_apart
from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import LedgerError
from kvcustody.migrations.online import new_form
from kvcustody.migrations.online.row_windows import Progress, Step, compare_rows, copy_rows, is_in_the_way

STEPS = (
    *("opening", "opened", "window made", "window copied", "copied", "window compared", "compared"),
    *("swapping", "swapped"),
)
"""Every step of a change, as `step` is told of it: those that end in -ing and `window made` are before a commit."""
_COUNTS = ("copied", "compared", "rows", "leafless")
LOCK_MS = 300  # of waiting for readers and writers, who wait behind that
_LOCKED_MS = 800  # of each statement, those that take the locks included
_TRIES, _PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 60, 0.2, 10.0
Done = TypeVar("Done")
_RECORDER = "ledger:schema"  # no name of a worker has a colon


class OpenChange(NamedTuple):
    """An unfinished change: its tables, its target revision, and the revision before (empty: no undo)."""

    tables: tuple[str, ...]
    revision: str
    before: str


def open_change(connection: Connection, names: Sequence[str], revision: str, before: str) -> None:
    """Begin a change of these tables inside the transaction that records `revision` (rule 1)."""
    _lock(connection, names, both=False)
    sizes = connection.execute(select(logs.c.id, logs.c.size).order_by(logs.c.id)).all()
    for name in names:
        table = metadata.tables[name]
        new_form.make(connection, table)
        added = " ".join(new_form.add_columns(connection, table))
        row = {"of_table": name, "revision": revision, "before": before, "added": added}
        connection.execute(insert(schema_changes), row)
        places = [{"of_table": name, "log_id": log, "below": size} | dict.fromkeys(_COUNTS, 0) for log, size in sizes]
        if places:
            connection.execute(insert(schema_change_logs), places)


def opened_change(connection: Connection) -> OpenChange | None:
    """Return the change that is open, or None."""
    rows = connection.execute(select(schema_changes).order_by(schema_changes.c.of_table)).all()
    if not rows:
        return None
    return OpenChange(tuple(row.of_table for row in rows), rows[0].revision, rows[0].before)


def finish_change(
    engine: Engine,
    *,
    actor: str,
    step: Step,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> None:
    """Copy, compare and swap, resuming where the last process stopped (rule 2); raises `LedgerError` if rows differ."""
    copy_rows(engine, step, progress)
    step("copied")
    compare_rows(engine, step, progress)
    step("compared")
    under_locks(engine, lambda connection: _swap(connection, actor, clock or SystemClock(), step))
    step("swapped")


def undo_change(engine: Engine) -> str:
    """Drop an unfinished copy (rule 4); return the revision reached. Raises `LedgerError` if no change can be
    undone.
    """
    return under_locks(engine, _undo)


def under_locks(engine: Engine, act: Callable[[Connection], Done]) -> Done:
    """Run `act` in a transaction and return its result; retry after pauses while others hold locks (rule 3)."""
    pause = _PAUSE_SECONDS
    for left in reversed(range(_TRIES)):
        try:
            with engine.connect().execution_options(**WRITE) as connection, connection.begin():
                return act(connection)
        except OperationalError as problem:
            if not left or not is_in_the_way(problem):
                raise
        _rest(pause)
        pause = min(2 * pause, _PAUSE_SECONDS_MAX)
    raise AssertionError


def _rest(seconds: float) -> None:
    """Leave the tables to others for a while."""
    time.sleep(seconds)


def _lock(connection: Connection, names: Sequence[str], *, both: bool = True) -> None:
    """Rule 3, for the rest of the transaction."""
    dialect_of(connection).wait_for_locks_at_most(connection, LOCK_MS)
    dialect_of(connection).end_statements_after(connection, _LOCKED_MS)
    new_form.lock(connection, names, both=both)


def _swap(connection: Connection, actor: str, clock: Clock, step: Step) -> None:
    change = opened_change(connection)
    if change is None:  # another process was first
        return
    tables = [metadata.tables[name] for name in change.tables]
    _lock(connection, change.tables)
    for table in tables:
        if not new_form.has_same_months(connection, table.name):
            new_form.add_months(connection, table.name)
    column = schema_change_logs.c
    counted = select(func.coalesce(func.sum(column.rows), 0), func.coalesce(func.sum(column.leafless), 0))
    rows, leafless = connection.execute(counted).one()
    behind = select(func.count()).where(column.copied < column.below)
    if connection.scalar(behind):
        raise LedgerError("rows of an online change are not copied yet; run `kvcustody db upgrade` again")
    connection.execute(delete(schema_change_logs))
    connection.execute(delete(schema_changes))
    new_form.swap(connection, tables)
    now_us = clock.now_us()
    act = SchemaChanged(now_us, change.before, change.revision, change.tables, int(rows), int(leafless), actor)
    Appender(clock).append(connection, record_apart(connection, _RECORDER, clock, [act], now_us))
    step("swapping")


def _undo(connection: Connection) -> str:
    change = opened_change(connection)
    if change is None:
        raise LedgerError("no change of the ledger's schema is open: there is nothing to undo")
    if not change.before:
        raise LedgerError(
            f"the upgrade to revision `{change.revision}` changed more than is copied now, so it cannot be undone: "
            "finish it with `kvcustody db upgrade`",
            revision=change.revision,
        )
    _lock(connection, change.tables)
    columns = schema_changes.c
    added = {row[0]: row[1] for row in connection.execute(select(columns.of_table, columns.added))}
    new_form.drop(connection, change.tables)
    for name in change.tables:
        new_form.take_columns(connection, name, added[name].split())
    connection.execute(delete(schema_change_logs))
    connection.execute(delete(schema_changes))
    update = dialect_of(connection).with_placeholders(f"UPDATE {VERSION_TABLE} SET version_num = ?")  # noqa: S608 - our own names
    connection.exec_driver_sql(update, (change.before,))
    return change.before
