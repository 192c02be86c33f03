"""Return the space of dropped leaves to the disk while others read and write.

1. PostgreSQL: months that were dropped completely are freed together with their tables. Their remaining leaves (those
   of the system log) move into the partition `first`. So a ledger has as many months as it keeps, however old it is.
2. SQLite: free pages at the end of the file are returned in steps, each a short transaction of its own. Then the log is
   copied and emptied, which shortens the file. A file from before revision 0023 does not support this: its free pages
   are reused, and `VACUUM` without workers returns them once (docs/concepts/ledger/redaction-and-retention.md).
"""

from __future__ import annotations

from sqlalchemy import Engine

from kvcustody.audit.evidence.subjects.subject_key_store import empty_wal
from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.database.monthly_partitions import (
    FIRST,
    REST,
    MonthPartition,
    fold_month,
    owns_tables,
    partitions,
)

_PAGES = 1024  # of one step: a few milliseconds, for which a writer waits


def free_space(engine: Engine, before_us: int) -> None:
    """Free the space of leaves from before an instant; what others block is left for the next time."""
    if dialect_of(engine).partitions:
        _fold_months(engine, before_us)
    else:
        _free_pages(engine)
    empty_wal(engine)


def _fold_months(engine: Engine, before_us: int) -> None:
    """The oldest months, up to one that a tenant has leaves in (a purge may have left some in `first`)."""
    with engine.connect() as connection:
        months = [part for part in partitions(connection) if part.name != REST]
        if not months or not owns_tables(connection):
            return
    for month in months:
        if month.below_us is None or month.below_us > before_us or _is_held(engine, month):
            return
        if month.name != FIRST and not fold_month(engine, month):
            return


def _is_held(engine: Engine, month: MonthPartition) -> bool:
    leaves = f"SELECT 1 FROM {month.of('events')} JOIN logs ON logs.id = log WHERE logs.name <> %s LIMIT 1"  # noqa: S608 - our own names
    with engine.connect() as connection:
        return connection.exec_driver_sql(leaves, (SYSTEM,)).first() is not None


def _free_pages(engine: Engine) -> None:
    before = None
    while True:
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            left = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar() or 0)
            if not left or left == before:  # the second: a file that is not made for it
                return
            connection.connection.cursor().execute(f"PRAGMA incremental_vacuum({_PAGES})").fetchall()
        before = left
