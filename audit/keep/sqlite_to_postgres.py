"""Move a SQLite ledger to PostgreSQL, leaf by leaf: same places, same trees, same root, same signatures.

1. Leaves, trees and what no leaf says are copied under their keys, so that what was signed stays what it is. Rows that
   are functions of one leaf are made from the leaves (`rebuild_rows`), as many as the source has.
2. The copy is one transaction, checked before it commits: `fsck` over the copy, row counts, and the root log's head.
   A move that fails leaves the new database as it was: empty.
3. The source is only read, under one snapshot, and has to be whole itself.
4. A move during which a worker wrote to the source is refused: what it wrote would be in no copy.
5. A source with an open change of tables is refused: writers would look for a second form that the target lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, Engine, Integer, Table, func, select
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.leaf.merkle import Frontier, TreeHead
from kvcustody.audit.store.database.bulk_insert import insert_rows
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE, check_store, ledger_error
from kvcustody.audit.store.database.monthly_partitions import partitioned
from kvcustody.audit.store.database.open_changes import forms_of
from kvcustody.audit.store.schema.all_tables import every_table, projections
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.trees import root_log
from kvcustody.audit.verify.ledger.fsck_ledger import REGISTERS, FsckReport, fsck
from kvcustody.audit.write.rebuild import rebuild_rows
from kvcustody.errors import LedgerError

Progress = Callable[[str, int, int], None]

_AT_ONCE = 5000


class MoveResult(NamedTuple):
    """A move's result: copied rows by table, and the root log's head, equal on both sides."""

    rows: dict[str, int]
    leaves: int
    head: TreeHead


def move_ledger(source: Engine, target: Engine, *, progress: Progress | None = None) -> MoveResult:
    """Copy a whole ledger into an empty one of the same schema revision, and prove that both are equal.

    Raises `LedgerError` where either is of another revision, the source is damaged or under change, the target holds
    anything, or the copy does not check. `progress(table, done, total)` counts rows, then leaves checked.
    """
    check_store(source)
    check_store(target)
    report_progress = progress or (lambda what, done, total: None)
    try:
        with source.connect() as reading, reading.begin():
            if forms_of(reading):  # rule 5
                raise LedgerError(
                    "a change of the source's schema is open: finish it with `kvcustody db upgrade`, then move"
                )
            _refuse(
                "source",
                fsck(reading, progress=lambda log, done, total: report_progress("checking source", done, total)),
            )
            with target.connect().execution_options(**WRITE) as writing, writing.begin():
                dialect_of(writing).as_long_as_it_takes(writing)
                _refuse_filled(writing)
                rows = {str(table.name): _copy(reading, writing, table, report_progress) for table in _in_order()}
                rows |= _project(reading, writing, report_progress)
                _check_sizes(reading, writing)
                report = fsck(writing, progress=lambda log, done, total: report_progress("checking copy", done, total))
                _refuse("copy", report)
                head = _head(writing)
                with source.connect() as later:  # past the snapshot (rule 4)
                    if head != _head(later):
                        raise LedgerError("the source changed during the move; stop its workers and move again")
    except SQLAlchemyError as problem:
        raise ledger_error(target, problem) from problem
    return MoveResult(rows, rows[events.name], head)


def _head(connection: Connection) -> TreeHead:
    return Frontier.from_bytes(bytes(connection.scalars(select(root_log.c.frontier)).one())).head()


def _refuse(what: str, report: FsckReport) -> None:
    """Of registers no leaf has to be lost: what is wrong with them is moved as it is, and `fsck` goes on saying so."""
    wrong = next((problem for problem in report.problems if problem.log != REGISTERS), None)
    if wrong is not None:
        raise LedgerError(f"the {what} is not whole: {wrong}; nothing was moved", problem=str(wrong))


def _refuse_filled(connection: Connection) -> None:
    for table in every_table():
        if table.name != root_log.name and connection.execute(select(table).limit(1)).first() is not None:
            raise LedgerError(f"the target holds rows in `{table.name}`; move into an empty ledger", table=table.name)


def _in_order() -> list[Table]:
    """Logs first: leaves are appended to them."""
    made = {logs, *projections()}
    return [logs, *(table for table in every_table() if table not in made)]


def _project(reading: Connection, writing: Connection, told: Progress) -> dict[str, int]:
    """Make the rows of every table that is a function of one leaf; how many each has."""
    total = reading.scalar(select(func.count()).select_from(events)) or 0
    row_counts = rebuild_rows(reading, writing, progress=lambda done: told("projecting leaves", done, total))
    for table in projections():
        there = reading.scalar(select(func.count()).select_from(table)) or 0
        if row_counts[table.name] != there:
            raise LedgerError(
                f"`{table.name}` has `{there}` rows, and the leaves give `{row_counts[table.name]}`",
                table=table.name,
            )
    return {str(table.name): row_counts[table.name] for table in projections()}


def _check_sizes(reading: Connection, writing: Connection) -> None:
    """The copied leaves have brought every log to its size."""
    sizes = select(logs.c.id, logs.c.size).order_by(logs.c.id)
    if writing.execute(sizes).all() != reading.execute(sizes).all():
        raise LedgerError("the copy's logs and the source's differ in size")


def _copy(reading: Connection, writing: Connection, table: Table, report_progress: Progress) -> int:
    """Copy one table in the order of its key; how many rows it has."""
    total = reading.scalar(select(func.count()).select_from(table)) or 0
    if table.name == root_log.name:
        frontier, identity = reading.execute(select(root_log.c.frontier, root_log.c.identity)).one()
        writing.execute(root_log.update().values(frontier=bytes(frontier), identity=identity))
        return total
    done = 0
    firsts = _firsts(reading) if table is logs and partitioned(writing) else None
    for rows in _rows(reading, table):
        insert_rows(writing, table, rows if firsts is None else _emptied(rows, firsts))
        done += len(rows)
        report_progress(f"copying {table.name}", done, total)
    if done != total:
        raise LedgerError(f"`{total - done}` rows of `{table.name}` were not copied", table=table.name)
    _continue_ids(writing, table)
    return total


def _firsts(reading: Connection) -> dict[int, int]:
    """Return the first existing leaf of each log, where its copy begins."""
    query = select(events.c.log, func.min(events.c.idx)).group_by(events.c.log)
    return {row[0]: row[1] for row in reading.execute(query)}


def _emptied(rows: list[tuple[Any, ...]], firsts: dict[int, int]) -> list[tuple[Any, ...]]:
    """Rows of `logs` as they are before their leaves."""
    return [(log, name, firsts.get(log, size), frontier) for log, name, size, frontier in rows]


def _rows(reading: Connection, table: Table) -> Iterator[list[tuple[Any, ...]]]:
    result = reading.execution_options(yield_per=_AT_ONCE).execute(select(table).order_by(*table.primary_key.columns))
    for part in result.partitions(_AT_ONCE):
        yield [tuple(row) for row in part]


def _continue_ids(writing: Connection, table: Table) -> None:
    """Ids that the database gives go on after the ones that were copied."""
    column = table.autoincrement_column
    given = column is not None and isinstance(column.type, (Integer, BigInteger)) and column.autoincrement is True
    if given and not dialect_of(writing).in_file:
        assert column is not None
        sequence = func.pg_get_serial_sequence(table.name, column.name)
        highest = writing.scalar(select(func.max(column)))
        if highest is not None:
            writing.execute(select(func.setval(sequence, highest)))
