"""Deltas on their way into sums: written with the leaves, folded later, by anybody and as often as they like.

1. A turn takes a bounded number of deltas and adds them to the sums in one transaction: one that is cut off has done
   nothing, and what was folded is not there to be folded again.
2. Several may fold at once. On PostgreSQL each takes deltas that no other has; sums are added to in the order of
   their keys, so that two wait for each other at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sqlalchemy import Connection, Engine, delete, select, tuple_

from kvcustody.audit.counters.count_events import FigureName
from kvcustody.audit.database.bulk_insert import Inserts
from kvcustody.audit.database.dialect import dialect_of
from kvcustody.audit.database.engine import WRITE
from kvcustody.audit.schema.counters import ALL_HOURS, counter_deltas, counters

DELTAS_MAX = 8192  # of one turn
_KEYS = 2048  # of one statement
_COMMITS = 32  # of one writer, after which it folds


def write_deltas(
    inserts: Inserts, found: Mapping[tuple[int, FigureName], int], sizes: Mapping[int, int]
) -> None:
    """Insert what a transaction changes, given the size that each log has afterwards (`schema.counters`, rule 1)."""
    rows = [
        (log, sizes[log], number, *figure, value)
        for number, ((log, figure), value) in enumerate(found.items())
    ]
    if rows:
        inserts.add(counter_deltas, [list(zip(*rows, strict=True))])


def fold(engine: Engine, *, deltas_max: int = DELTAS_MAX) -> int:
    """One turn; how many deltas it folded. Raises what the database raises."""
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        return fold_some(connection, deltas_max=deltas_max)


def fold_some(connection: Connection, *, deltas_max: int = DELTAS_MAX) -> int:
    """A turn inside the caller's transaction."""
    column = counter_deltas.c
    key = [column[name] for name in FigureName._fields]
    query = select(column.log, column.size, column.number, *key, column.value).limit(deltas_max)
    taken = connection.execute(dialect_of(connection).skipping_locked(query)).all()
    if not taken:
        return 0
    sums: Counter[tuple[int, FigureName]] = Counter()
    for log, _, _, *of, value in taken:
        figure = FigureName(*of)
        sums[log, figure] += value
        sums[log, figure._replace(hour_us=ALL_HOURS)] += value
    add_to_sums(connection, sums)
    place = tuple_(column.log, column.size, column.number)
    for start in range(0, len(taken), _KEYS):
        gone = [tuple(row[:3]) for row in taken[start : start + _KEYS]]
        connection.execute(delete(counter_deltas).where(place.in_(gone)))
    return len(taken)


def add_to_sums(connection: Connection, sums: Mapping[tuple[int, FigureName], int]) -> None:
    """Add values to sums, or make them; what has come to nothing is dropped."""
    rows = [
        {"log": log, **figure._asdict(), "value": value}
        for (log, figure), value in sorted(sums.items(), key=lambda item: (item[0][1].hour_us, item[0]))
        if value
    ]
    if rows:
        connection.execute(dialect_of(connection).insert_adding(counters, "value"), rows)
    if any(row["value"] < 0 for row in rows):
        connection.execute(delete(counters).where(counters.c.value == 0))


class FoldsBetweenCommits:
    """A writer's share of the folding: a turn after so many of its commits, and again while turns are full."""

    def __init__(self) -> None:
        self._commits = 0

    def is_due(self) -> bool:
        """Whether a turn is due after the commit that has just been made."""
        self._commits += 1
        return self._commits >= _COMMITS

    def turned(self, folded: int) -> None:
        """So many deltas were folded."""
        self._commits = _COMMITS if folded >= DELTAS_MAX else 0
