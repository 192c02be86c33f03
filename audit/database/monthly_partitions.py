"""Months of leaves: on PostgreSQL `events` is partitioned by the time that each leaf states.

1. A leaf lies in the UTC month of its `at_us`, or in `events_rest` where that month has no partition: none is refused
   for its time.
2. A unique index of a partitioned table has to contain `at_us`, so it no longer keeps (log, idx) by itself. The
   trigger `places` does, and keeps it gapless too: an insert has to begin at the `logs.size` of each log that it
   touches, go on without a hole or a double, and moves that size, whose row stays locked until the commit.
3. (incarnation, sequence, part, log) comes with the leaf's bytes, and so does `at_us`: a leaf that is replayed meets
   its own month and key. Two different leaves of one name are for `fsck` to find.
4. Months are made ahead and attached: that waits for no writer, and none waits for it.
5. No role has rights on a partition by itself; row-level security without a policy stands behind that, and triggers
   refuse TRUNCATE of it outside retention.

Migration 0012 makes the partitioned table and its triggers; docs/adr/0008 has the measurements and what else was
considered. A SQLite ledger is one table.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from kvcustody.audit.database.append_only_triggers import triggers_lifted
from kvcustody.audit.database.dialect import dialect_of
from kvcustody.audit.database.engine import WRITE
from kvcustody.times import utc

MONTHS_AHEAD = 3
REST = "events_rest"
_MICROSECONDS = 1_000_000
_WAIT_MS = 500
_MAKING = 7215410  # advisory lock: one process makes partitions at a time
_BOUNDS = re.compile(r"FROM \((MINVALUE|'?-?\d+'?)\) TO \((MAXVALUE|'?-?\d+'?)\)")


class MonthPartition(NamedTuple):
    """Leaves of at_us in [`first_us`, `below_us`); None is no bound, and both None the rest."""

    name: str
    first_us: int | None
    below_us: int | None


def partitioned(connection: Connection) -> bool:
    """True where `events` is partitioned: on PostgreSQL, from revision 0012 on."""
    if not dialect_of(connection).partitions:
        return False
    query = "SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass('events')"
    return bool(connection.exec_driver_sql(query).scalar())


def partitions(connection: Connection) -> tuple[MonthPartition, ...]:
    """Every partition, the earliest first and the rest last; none on SQLite."""
    if not partitioned(connection):
        return ()
    query = (
        "SELECT relname, pg_get_expr(relpartbound, pg_class.oid) AS bound FROM pg_inherits"
        " JOIN pg_class ON pg_class.oid = inhrelid WHERE inhparent = to_regclass('events')"
    )
    found = [
        MonthPartition(row.relname, *_parsed(row.bound)) for row in connection.exec_driver_sql(query).all()
    ]
    return tuple(sorted(found, key=lambda part: (part.name == REST, part.first_us or 0)))


def size_bytes(connection: Connection, part: MonthPartition) -> int:
    """What a partition takes on disk, indexes included."""
    query = "SELECT pg_total_relation_size(to_regclass(%s))"
    return int(connection.exec_driver_sql(query, (part.name,)).scalar() or 0)


def month_of(at_us: int) -> MonthPartition:
    """The UTC month of an instant."""
    moment = utc(at_us)
    return _month(moment.year, moment.month)


def months_from(at_us: int, count: int) -> tuple[MonthPartition, ...]:
    """The month of an instant and those that follow it, `count` in all."""
    moment = utc(at_us)
    start = 12 * moment.year + moment.month - 1
    return tuple(_month(number // 12, number % 12 + 1) for number in range(start, start + count))


def create_partitions(connection: Connection, now_us: int, months: int = MONTHS_AHEAD) -> tuple[str, ...]:
    """Make the partitions of this month and of `months` after it that are missing; their names (rule 4).

    Only the tables' owner may; for anybody else, and where `events` is one table, nothing is done.
    """
    if not partitioned(connection) or not owns_tables(connection):
        return ()
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MAKING})")
    known = [part for part in partitions(connection) if part.name != REST]
    missing = [
        month for month in months_from(now_us, months + 1) if not any(_overlap(month, part) for part in known)
    ]
    for month in missing:
        _attach(connection, month)
    return tuple(month.name for month in missing)


def ensure_partitions(engine: Engine, now_us: int, months: int = MONTHS_AHEAD) -> tuple[str, ...]:
    """`create_partitions` in a transaction of its own, given up where a long read of the rest is in the way."""
    try:
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            dialect_of(connection).wait_for_locks_at_most(connection, _WAIT_MS)
            return create_partitions(connection, now_us, months)
    except (
        OperationalError
    ):  # until the next start, or the next `kvcustody db partitions`, the rest takes its leaves
        return ()


def _attach(connection: Connection, month: MonthPartition) -> None:
    """A month's partition, with the leaves of it that the rest holds; beside the table first, for rule 4."""
    run = connection.exec_driver_sql
    run(f"CREATE TABLE {month.name} (LIKE events)")
    inside = f"at_us >= {month.first_us} AND at_us < {month.below_us}"
    with triggers_lifted(connection):
        run(
            f"WITH moved AS (DELETE FROM {REST} WHERE {inside} RETURNING *)"  # noqa: S608 - our own names
            f" INSERT INTO {month.name} SELECT * FROM moved"
        )
    _settle(connection, month.name, f"FOR VALUES FROM ({month.first_us}) TO ({month.below_us})")


def _settle(connection: Connection, name: str, bound: str) -> None:
    """Attach a table, and wall it off by itself (rule 5)."""
    run = connection.exec_driver_sql
    run(f"ALTER TABLE events ATTACH PARTITION {name} {bound}")
    run(
        f"CREATE TRIGGER no_truncate BEFORE TRUNCATE ON {name}"
        " FOR EACH STATEMENT EXECUTE FUNCTION kvcustody_append_only()"
    )
    run(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")


def owns_tables(connection: Connection) -> bool:
    """True where this login owns the table: it alone may make partitions, and empty one."""
    query = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass('events')"
    return bool(connection.exec_driver_sql(query).scalar())


def _month(year: int, month: int) -> MonthPartition:
    following = (year + month // 12, month % 12 + 1)
    return MonthPartition(f"events_{year}_{month:02d}", _start_us(year, month), _start_us(*following))


def _start_us(year: int, month: int) -> int:
    return int(datetime(year, month, 1, tzinfo=UTC).timestamp()) * _MICROSECONDS


def _parsed(bound: str) -> tuple[int | None, int | None]:
    found = _BOUNDS.search(bound)
    if found is None:  # DEFAULT
        return None, None
    first, below = (
        None if "VALUE" in text else int(text.strip("'")) for text in (found.group(1), found.group(2))
    )
    return first, below


def _overlap(one: MonthPartition, other: MonthPartition) -> bool:
    return (one.first_us or 0) < (other.below_us or 0) and (other.first_us or 0) < (one.below_us or 0)
