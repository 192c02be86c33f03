"""Fold deltas into sums: deltas are written with the leaves and folded later, by anybody, any number of times.

1. A turn takes a bounded number of deltas and adds them to the sums in one transaction. So an interrupted turn has done
   nothing, and a folded delta cannot be folded again.
2. One folds at a time; whoever else comes has nothing to do. Deltas are taken log by log, so a turn changes few sums.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, Engine, delete, or_, select, tuple_

from kvcustody.audit.evidence.counters.packed_figures import pack_hour, shared_by_logs, unpack_hour
from kvcustody.audit.project import HourFigure
from kvcustody.audit.store.database.bulk_insert import replace_rows
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.all_tables import is_of_leaves
from kvcustody.audit.store.schema.counters import ALL_HOURS, ALL_LOGS, counter_deltas, counters

DELTAS_MAX = 8192  # of one turn
_FOLDING = 7_215_411  # the number of the lock
_Place = tuple[bool, int, int]  # the key of a sum
_Sum = dict[HourFigure, int]


def fold(engine: Engine, *, deltas_max: int = DELTAS_MAX) -> int:
    """Fold one turn; return how many deltas it folded. Raises the database's errors."""
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        return fold_some(connection, deltas_max=deltas_max)


def fold_some(connection: Connection, *, deltas_max: int = DELTAS_MAX) -> int:
    """Fold one turn inside the caller's transaction; return 0 if another folds (rule 2)."""
    if not dialect_of(connection).alone(connection, _FOLDING):
        return 0
    column = counter_deltas.c
    key = tuple(column[name] for name in counter_deltas.primary_key.columns.keys())  # noqa: SIM118 - no mapping
    oldest = select(*key).where(is_of_leaves(counter_deltas)).order_by(*key).limit(deltas_max)
    taking = delete(counter_deltas).where(tuple_(*key).in_(oldest))
    taken = connection.execute(taking.returning(column.scraped, column.hour_us, column.log, column.figures)).all()
    by_hour: dict[_Place, _Sum] = {}
    for scraped, hour_us, log, packed in taken:
        _add(by_hour, (scraped, hour_us, log), unpack_hour(hour_us, packed).items())
    sums = {place: dict(figures) for place, figures in by_hour.items()}
    for (scraped, hour_us, log), figures in by_hour.items():
        if hour_us == ALL_HOURS:
            continue  # it is of no hour
        _add(sums, (scraped, ALL_HOURS, log), figures.items())
        _add(sums, (scraped, hour_us, ALL_LOGS), shared_by_logs(figures))
    add_to_sums(connection, sums)
    return len(taken)


def add_to_sums(connection: Connection, sums: dict[_Place, _Sum]) -> None:
    """Add values to sums, or create them; sums that reach zero are dropped. One transaction at a time (rule 2)."""
    if not sums:
        return
    column = counters.c
    of = [log for _, _, log in sums if log != ALL_LOGS]
    hours = {hour for _, hour, _ in sums}
    there = select(counters).where(
        column.hour_us.in_(hours),
        or_(column.log == ALL_LOGS, column.log.between(min(of, default=ALL_LOGS), max(of, default=ALL_LOGS))),
    )
    for wanted in {scraped for scraped, _, _ in sums}:
        for row in connection.execute(there.where(column.scraped == wanted)):
            place = (wanted, row.hour_us, row.log)
            if place in sums:
                _add(sums, place, unpack_hour(row.hour_us, row.figures).items())
    packed = [(*place, pack_hour(figures)) for place, figures in sorted(sums.items())]
    replace_rows(connection, counters, [each for each in packed if each[3] != _NOTHING])
    for scraped, hour_us, log, text in packed:
        if text == _NOTHING:
            key = (column.scraped == scraped, column.hour_us == hour_us, column.log == log)
            connection.execute(delete(counters).where(*key))


def _add(sums: dict[_Place, _Sum], place: _Place, figures: Iterable[tuple[HourFigure, int]]) -> None:
    known = sums.get(place)
    if known is None:
        known = sums[place] = {}
    for figure, value in figures:
        known[figure] = known.get(figure, 0) + value


_NOTHING = pack_hour({})
