"""Empty a whole month on PostgreSQL by TRUNCATE instead of row by row.

1. One transaction hashes the dropped leaves (in the database) and empties the month in every table that has months. The
   remaining ones are put back unchanged: those of the system log, under a hold, or of processes that continue. Tables
   that do not grow with traffic have no months: what was derived from the leaves goes from them row by row.
2. Other months are written and read meanwhile. The month itself takes no leaf until the end, and is closed to readers
   for the moment in which it is emptied; where a reader stays in the way, nothing has happened.
3. While a table has two forms (`open_changes`), no month is emptied at once: what goes is deleted row by row, in both.
4. A snapshot from before sees the month empty afterwards: an export that spans it stops with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from kvcustody.audit.evidence.counters.read_figures import uneven_lives
from kvcustody.audit.keep.counted_months import CountedMonths, ExpiredLeaves
from kvcustody.audit.keep.uncount import uncount
from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.database.monthly_partitions import (
    REST,
    MonthPartition,
    owns_tables,
    partitioned,
    partitions,
)
from kvcustody.audit.store.database.open_changes import forms_of
from kvcustody.audit.store.schema.all_tables import projections
from kvcustody.audit.tlog.proofs import TILE_WIDTH

_AT_ONCE = 4096


def old_months(engine: Engine, before_us: int) -> tuple[MonthPartition, ...]:
    """Return the months before an instant, in order; empty if this login may not empty one."""
    with engine.connect() as connection:
        months = tuple(
            part
            for part in partitions(connection)
            if part.name != REST and part.below_us is not None and part.below_us <= before_us
        )
        return months if months and owns_tables(connection) else ()


def counted_months(engine: Engine, before_us: int, going: Mapping[str, ExpiredLeaves], folder: Path) -> CountedMonths:
    """Return a counter by month for leaves read of `going`; its files are in the folder."""
    with engine.connect() as connection:
        uneven = frozenset(life.uuid for life in uneven_lives(connection))
    return CountedMonths(old_months(engine, before_us), going, folder, uneven)


def empty_months(
    engine: Engine,
    going: Sequence[ExpiredLeaves],
    allowed: Callable[[Connection], None],
    counted: CountedMonths,
) -> int:
    """Empty those counted months that are mostly dropped; return how many leaves lost their content.

    `allowed` is asked in each transaction and raises where something must stay after all. What is left of `going`
    (other months, months that mostly stay or that somebody reads) is the caller's to delete row by row.
    """
    gone = 0
    for month in counted.months if going else ():
        try:
            with engine.connect().execution_options(**WRITE) as connection, connection.begin():
                gone += _empty(connection, month, going, allowed, counted)
        except OperationalError:  # a reader is in the way (rule 2)
            continue
    return gone


def _empty(
    connection: Connection,
    part: MonthPartition,
    going: Sequence[ExpiredLeaves],
    allowed: Callable[[Connection], None],
    counted: CountedMonths,
) -> int:
    if forms_of(connection):  # rule 3
        return 0
    run, month = connection.exec_driver_sql, part.of("events")
    tables = {table: part.of(table) for table in partitioned(connection)}
    run("SET LOCAL statement_timeout = 0")
    run(f"LOCK TABLE {', '.join(tables.values())} IN SHARE ROW EXCLUSIVE MODE")
    allowed(connection)
    run(
        "CREATE TEMP TABLE going ON COMMIT DROP AS"
        " SELECT * FROM unnest(%s::int4[], %s::int8[], %s::int8[]) AS run (log, first, below)",
        tuple(list(column) for column in zip(*going, strict=True)),
    )
    run("ANALYZE going")
    plan = "going AS plan"
    inside = "plan.log = leaf.log AND leaf.idx >= plan.first AND leaf.idx < plan.below"
    dropped = f"FROM {month} AS leaf JOIN {plan} ON {inside}"
    leaves = int(run(f"SELECT count(*) FROM {month}").scalar() or 0)  # noqa: S608 - our own names and numbers
    gone = int(run(f"SELECT count(*) {dropped}").scalar() or 0)
    if not gone or 2 * gone < leaves:
        return 0
    # A tile that goes whole has its root. Counted by places alone: leaves are read of the few others.
    run(
        f"WITH part AS MATERIALIZED (SELECT leaf.log, leaf.idx / {TILE_WIDTH} AS tile {dropped}"
        f" GROUP BY 1, 2 HAVING count(*) < {TILE_WIDTH})"
        " INSERT INTO tree_nodes (log, level, idx, hash)"
        " SELECT leaf.log, 0, leaf.idx, sha256('\\x00'::bytea || leaf.leaf)"
        f" {dropped} JOIN part ON part.log = leaf.log AND part.tile = leaf.idx / {TILE_WIDTH}"
    )
    if counted.leaves(part.name) == gone:  # else some went before
        counted.take_off(connection, part.name)
    else:
        _uncount(connection, dropped)
    for derived in projections():
        if derived.name not in tables:
            run(
                f"DELETE FROM {derived.name} AS derived USING (SELECT leaf.log, leaf.idx {dropped}) AS gone"  # noqa: S608 - our own names
                " WHERE derived.log = gone.log AND derived.idx = gone.idx"
            )
    for table, name in tables.items():
        run(
            f"CREATE TEMP TABLE staying_{table} ON COMMIT DROP AS SELECT leaf.* FROM {name} AS leaf"  # noqa: S608 - our own names
            f" WHERE NOT EXISTS (SELECT 1 FROM {plan} WHERE {inside})"
        )
    with triggers_lifted(connection):
        run(f"TRUNCATE {', '.join(tables.values())}")
    for table, name in tables.items():
        run(f"INSERT INTO {name} SELECT * FROM staying_{table}")  # noqa: S608 - our own names
    return gone


def _uncount(connection: Connection, dropped: str) -> None:
    """Take what goes off the figures, some leaves of one log at a time."""
    query = text(f"SELECT leaf.log, leaf.idx, leaf.leaf {dropped} ORDER BY leaf.log, leaf.idx")
    rows = connection.execute(query.execution_options(stream_results=True))
    for log, of_log in groupby(rows, key=lambda row: int(row.log)):
        while some := list(islice(of_log, _AT_ONCE)):
            uncount(connection, log, some[0].idx, [bytes(row.leaf) for row in some])
