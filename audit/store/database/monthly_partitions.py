"""Months: on PostgreSQL each table that grows with traffic (`all_tables.MONTHLY`) is partitioned by its leaves' time.

1. A leaf lies in the UTC month of its `at_us`, and its rows lie in the same month of their tables. Each table has the
   same months. Rows outside all months lie in the `rest`, so none is refused for its time. `first` holds what is older
   than the oldest month: the remainder of months that retention dropped (`fold_month`).
2. A unique index of a partitioned table has to contain the time, so it no longer keeps (log, idx) unique. The trigger
   `places` does so for leaves, and keeps each log gapless too. An insert must begin at the `logs.size` of each log that
   it touches, without a gap or a duplicate. It moves that size, whose row stays locked until the commit. A row of a
   projection is written with its leaf and has its time. Because (log, idx) is given only once, so is (log, idx, item).
3. (incarnation, sequence, part, log) and `at_us` come with the leaf's bytes. So a replayed leaf meets its own month and
   key. `fsck` finds two different leaves of one name, and two openings of one residency.
4. Months are made in advance and attached. This waits for no writer, and no writer waits for it.
5. No role has rights on a single partition. As a second barrier, each has row-level security without a policy, and
   triggers refuse its TRUNCATE outside retention.

`create_schema` makes the partitioned tables; docs/build/adr/0008 and 0011 have the measurements and the alternatives. A
SQLite ledger has no months.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from kvcustody.audit.store.database.append_only_triggers import no_truncate, triggers_lifted
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.database.open_changes import forms_of
from kvcustody.audit.store.schema.all_tables import MONTHLY
from kvcustody.times import utc

MONTHS_AHEAD = 3
REST, FIRST = "rest", "first"
_MICROSECONDS = 1_000_000
_WAIT_MS = 500
_FOLDING_WAIT_MS = 100  # for each table, of which all are held until the last one
_MAKING = 7215410  # advisory lock: one process makes partitions at a time
_BOUNDS = re.compile(r"FROM \((MINVALUE|'?-?\d+'?)\) TO \((MAXVALUE|'?-?\d+'?)\)")


class MonthPartition(NamedTuple):
    """The rows for leaves of [`first_us`, `below_us`), in every table; None means no bound, and both None the rest."""

    name: str
    first_us: int | None
    below_us: int | None

    def of(self, table: str) -> str:
        """Return the partition of a table."""
        return f"{table}_{self.name}"


def partitioned(connection: Connection) -> tuple[str, ...]:
    """Return the tables that are partitioned: all of `MONTHLY` on PostgreSQL, none on SQLite."""
    return tuple(MONTHLY) if dialect_of(connection).partitions else ()


def partitions(connection: Connection) -> tuple[MonthPartition, ...]:
    """Return every existing month, earliest first and the rest last; empty on SQLite."""
    if not partitioned(connection):
        return ()
    query = (
        "SELECT relname, pg_get_expr(relpartbound, pg_class.oid) AS bound FROM pg_inherits"
        " JOIN pg_class ON pg_class.oid = inhrelid WHERE inhparent = to_regclass('events')"
    )
    found = [
        MonthPartition(row.relname.removeprefix("events_"), *_parsed(row.bound))
        for row in connection.exec_driver_sql(query).all()
    ]
    return tuple(sorted(found, key=lambda part: (part.name == REST, part.first_us or 0)))


def size_bytes(connection: Connection, part: MonthPartition, tables: Sequence[str] = tuple(MONTHLY)) -> int:
    """Return a month's disk usage, including indexes."""
    query = "SELECT sum(pg_total_relation_size(to_regclass(name))) FROM unnest(%s::text[]) AS name"
    return int(connection.exec_driver_sql(query, ([part.of(table) for table in tables],)).scalar() or 0)


def month_of(at_us: int) -> MonthPartition:
    """Return the UTC month of an instant."""
    moment = utc(at_us)
    return _month(moment.year, moment.month)


def months_from(at_us: int, count: int) -> tuple[MonthPartition, ...]:
    """Return the month of an instant and the following ones, `count` in all."""
    moment = utc(at_us)
    start = 12 * moment.year + moment.month - 1
    return tuple(_month(number // 12, number % 12 + 1) for number in range(start, start + count))


def create_rest(connection: Connection, table: str) -> None:
    """Create the partition of a new table for rows outside all months."""
    _create_like(connection, table, f"{table}_{REST}")
    connection.exec_driver_sql(f"ALTER TABLE {table} ATTACH PARTITION {table}_{REST} DEFAULT")
    _wall_off(connection, f"{table}_{REST}")


def create_partitions(connection: Connection, now_us: int, months: int = MONTHS_AHEAD) -> tuple[str, ...]:
    """Create this month and `months` after it if missing; return their names (rule 4).

    Only the tables' owner may; for anybody else, and where no table is partitioned, nothing is done.
    """
    tables = partitioned(connection)
    if not tables or not owns_tables(connection):
        return ()
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MAKING})")
    known = [part for part in partitions(connection) if part.name != REST]
    missing = [month for month in months_from(now_us, months + 1) if not any(_overlap(month, part) for part in known)]
    for month in missing:
        for table in tables:
            _create_month(connection, table, month)
    return tuple(month.name for month in missing)


def create_months(connection: Connection, table: str) -> None:
    """Create the months that a table lacks among all existing ones."""
    for month in partitions(connection):
        query = "SELECT to_regclass(current_schema() || '.' || %s::text)"
        there = connection.exec_driver_sql(query, (month.of(table),)).scalar()
        if month.name != REST and there is None:
            _create_month(connection, table, month)


def fold_month(engine: Engine, month: MonthPartition) -> bool:
    """Move the rest of the oldest month into `first`, and drop its tables; return whether that was done.

    The tables are locked meanwhile: writers wait at their next insert, for less time than makes them spill. The rows in
    `first` are read, so this is for months with few remaining rows. If somebody reads for longer, or it takes too long,
    nothing is done.
    """
    try:
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            if forms_of(connection):  # the new form of a table has months of its own
                return False
            dialect_of(connection).wait_for_locks_at_most(connection, _FOLDING_WAIT_MS)
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {10 * _FOLDING_WAIT_MS}")
            _fold(connection, month)
    except OperationalError:
        return False
    return True


def _fold(connection: Connection, month: MonthPartition) -> None:
    run, tables = connection.exec_driver_sql, partitioned(connection)
    run(f"SELECT pg_advisory_xact_lock({_MAKING})")
    first = MonthPartition(FIRST, None, month.below_us)
    is_there = any(part.name == FIRST for part in partitions(connection))
    run(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")
    for table in tables:
        if is_there:
            run(f"ALTER TABLE {table} DETACH PARTITION {first.of(table)}")
        else:
            _create_like(connection, table, first.of(table))
        run(f"ALTER TABLE {table} DETACH PARTITION {month.of(table)}")
        run(f"INSERT INTO {first.of(table)} SELECT * FROM {month.of(table)}")  # noqa: S608 - our own names
        run(f"DROP TABLE {month.of(table)}")
        _attach(connection, table, first)
        if not is_there:
            _wall_off(connection, first.of(table))


def ensure_partitions(engine: Engine, now_us: int, months: int = MONTHS_AHEAD) -> tuple[str, ...]:
    """Run `create_partitions` in its own transaction; give up if a long read of the rest blocks it."""
    try:
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            dialect_of(connection).wait_for_locks_at_most(connection, _WAIT_MS)
            return create_partitions(connection, now_us, months)
    except OperationalError:  # until the next start, or the next `kvcustody db partitions`, the rest takes its leaves
        return ()


def _create_month(connection: Connection, table: str, month: MonthPartition) -> None:
    _create_like(connection, table, month.of(table))
    _attach(connection, table, month)
    _wall_off(connection, month.of(table))


def _create_like(connection: Connection, table: str, name: str) -> None:
    connection.exec_driver_sql(f"CREATE TABLE {name} (LIKE {table} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")


def _attach(connection: Connection, table: str, month: MonthPartition) -> None:
    """A table becomes a month of another, with what the rest holds of it; beside that first, for rule 4."""
    run, column = connection.exec_driver_sql, MONTHLY[table]
    since = "" if month.first_us is None else f"{column} >= {month.first_us} AND "
    with triggers_lifted(connection):
        run(
            f"WITH moved AS (DELETE FROM {table}_{REST} WHERE {since}{column} < {month.below_us} RETURNING *)"  # noqa: S608 - our own names
            f" INSERT INTO {month.of(table)} SELECT * FROM moved"
        )
    first = "MINVALUE" if month.first_us is None else month.first_us
    bound = f"FOR VALUES FROM ({first}) TO ({month.below_us})"
    run(f"ALTER TABLE {table} ATTACH PARTITION {month.of(table)} {bound}")


def _wall_off(connection: Connection, name: str) -> None:
    """Rule 5."""
    connection.exec_driver_sql(no_truncate(name))
    connection.exec_driver_sql(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")


def owns_tables(connection: Connection) -> bool:
    """Return whether this login owns the tables; only the owner may create months and empty one."""
    query = "SELECT bool_and(pg_has_role(relowner, 'USAGE')) FROM pg_class WHERE oid = ANY (%s::regclass[])"
    return bool(connection.exec_driver_sql(query, (list(partitioned(connection)),)).scalar())


def _month(year: int, month: int) -> MonthPartition:
    following = (year + month // 12, month % 12 + 1)
    return MonthPartition(f"{year}_{month:02d}", _start_us(year, month), _start_us(*following))


def _start_us(year: int, month: int) -> int:
    return int(datetime(year, month, 1, tzinfo=UTC).timestamp()) * _MICROSECONDS


def _parsed(bound: str) -> tuple[int | None, int | None]:
    found = _BOUNDS.search(bound)
    if found is None:  # DEFAULT
        return None, None
    first, below = (None if "VALUE" in text else int(text.strip("'")) for text in (found.group(1), found.group(2)))
    return first, below


def _overlap(one: MonthPartition, other: MonthPartition) -> bool:
    return (one.first_us or 0) < (other.below_us or 0) and (other.first_us or 0) < (one.below_us or 0)
