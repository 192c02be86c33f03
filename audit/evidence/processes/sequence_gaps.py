"""Sequences of processes without a leaf. What was found complete is not examined again.

    gaps(connection)           # what is missing, and known to be
    lacks_below(connection, incarnation, sequence)      # whether something before a leaf is missing
    keep_spans(engine)         # what is whole goes on record: the next look goes on from there

1. A process numbers what it records from 1 on, over all logs. What is below its highest sequence, in no leaf and in no
   loss that its writer recorded, is missing.
2. `sequence_spans` has the ranges that were found whole. Beside them only what came later is read, and what was missing
   when they were kept: that may have come since.
3. Retention keeps them before it drops a leaf (`purge_and_legal_hold`): what went in order is not missing.
4. Where a range has as many sequences as lie between its lowest and highest, none is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Engine, delete, func, select

from kvcustody.audit.store.database.bulk_insert import insert_rows
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.database.postgres_roles import sees_one_tenant
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import outages
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.audit.store.schema.recorded_losses import (
    LOSING_FUNCTION,
    REFUSED,
    losing_processes,
    recorded_gaps,
)
from kvcustody.audit.store.schema.sequences import sequence_spans

NO_LEAF, TORN = "no leaf has these sequences", "a continuation leaf is missing"
_KEEPING = 7_215_414  # the number of the lock
_AT_ONCE = 1 << 18  # sequences of one question
_SHORT, _TOGETHER = 1 << 10, 1 << 8  # sequences of a short process; such processes of one transaction

Span = tuple[int, int]
"""First and last of consecutive sequences."""


class Gap(NamedTuple):
    """Evidence known to be missing: an incomplete leaf set, or a recorded loss."""

    incarnation: str
    first_sequence: int
    last_sequence: int
    cause: str


class _Life(NamedTuple):
    """A process: its highest sequence, and the ranges that were found whole."""

    id: int
    uuid: str
    highest: int
    kept: list[Span]


def gaps(connection: Connection) -> tuple[Gap, ...]:
    """Return leaf sets that lack a part, missing sequences, and losses that the writer recorded."""
    known = _recorded_gaps(connection)
    gaps = [gap for gap in known if gap.cause != REFUSED]
    for life in _lives(connection):
        whole, torn = _look(connection, life)
        gaps += [Gap(life.uuid, number, number, TORN) for number in torn]
        there = [*whole, *((number, number) for number in torn)]
        there += [(gap.first_sequence, gap.last_sequence) for gap in known if gap.incarnation == life.uuid]
        gaps += [Gap(life.uuid, *hole, NO_LEAF) for hole in holes_in(there)]
    return tuple(sorted(gaps))


def recorded_losses(connection: Connection) -> set[str]:
    """Return the processes whose writer recorded a loss; missing sequences are not searched."""
    if sees_one_tenant(connection):
        return set(connection.exec_driver_sql(f"SELECT {LOSING_FUNCTION}()").scalars())
    return set(connection.scalars(losing_processes()))


def _recorded_gaps(connection: Connection) -> list[Gap]:
    return [Gap(*row) for row in connection.execute(recorded_gaps())]


def keep_spans(engine: Engine) -> int:
    """Record complete ranges; return how many processes had new ones.

    NOTE: short processes that were never looked at go many to a transaction. 20,000 of them, each in its own, took a
    minute.
    """
    with engine.connect() as connection:
        lives = [life for life in _lives(connection) if not _is_done(life)]
    short = [life.id for life in lives if not life.kept and life.highest <= _SHORT]
    whole = set[int]().union(
        *(_keep_short(engine, short[at : at + _TOGETHER]) for at in range(0, len(short), _TOGETHER))
    )
    return len(whole) + sum(_keep(engine, life.id) for life in lives if life.id not in whole)


def kept_spans(connection: Connection, incarnation: int) -> list[Span]:
    """Return the recorded complete ranges of one process, ascending."""
    column = sequence_spans.c
    query = select(column.first_sequence, column.last_sequence).where(column.incarnation == incarnation)
    return [(row[0], row[1]) for row in connection.execute(query.order_by(column.first_sequence))]


def lacks_below(connection: Connection, incarnation: str, sequence: int) -> bool:
    """Return whether a process lacks some earlier sequence; only the part not yet recorded as complete is read."""
    life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == incarnation))
    if life is None:
        return sequence > 1
    kept = kept_spans(connection, life)
    for first, last in holes_in([*kept, (sequence, sequence)]):
        for low in range(first, min(last, sequence - 1) + 1, _AT_ONCE):
            high = min(last, sequence - 1, low + _AT_ONCE - 1)
            if _recorded(connection, life, low, high) != [(low, high)]:
                return True
    return False


def lacks_leaves(connection: Connection, incarnation: int, as_of: AsOf) -> bool:
    """Return whether a leaf was missing below a process's highest sequence in a state; refused events have no leaf."""
    here = (events.c.incarnation == incarnation, has_leaf(events), is_in(as_of, events))
    sets = select(events.c.sequence, (func.max(events.c.parts) - func.count()).label("lacking")).where(*here)
    each = sets.group_by(events.c.sequence, events.c.log).subquery()
    highest, leaf_count, lacking = connection.execute(
        select(func.max(each.c.sequence), func.count(each.c.sequence.distinct()), func.sum(each.c.lacking))
    ).one()
    length = outages.c.last_sequence - outages.c.first_sequence + 1
    refused = select(func.sum(length)).where(outages.c.incarnation == incarnation, outages.c.kind == "gap")
    refused = refused.where(outages.c.cause == REFUSED, has_leaf(outages), is_in(as_of, outages))
    return bool(lacking) or (highest or 0) > leaf_count + int(connection.scalar(refused) or 0)


def dropped_spans(connection: Connection, incarnation: int) -> list[Span]:
    """Return the complete ranges of one process whose leaves retention has dropped."""
    kept = kept_spans(connection, incarnation)
    there: list[Span] = []
    for first, last in kept:
        for low in range(first, last + 1, _AT_ONCE):
            there += _recorded(connection, incarnation, low, min(last, low + _AT_ONCE - 1))
    return list(_minus(kept, _merged(there)))


def holes_in(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the ranges between 1 and the highest of these that none of them covers."""
    reached = 0
    for first, last in sorted(spans):
        if first > reached + 1:
            yield reached + 1, first - 1
        reached = max(reached, last)


def _keep_short(engine: Engine, incarnations_new: list[int]) -> set[int]:
    """Of processes without a kept range, put those on record that have every sequence from 1 on; which these were."""
    column = events.c
    query = (
        select(column.incarnation, func.max(column.sequence))
        .where(column.incarnation.in_(incarnations_new), has_leaf(events))
        .group_by(column.incarnation)
        .having(
            func.min(column.sequence) == 1,
            func.max(column.sequence) == func.count(column.sequence.distinct()),
            func.max(column.parts) == 1,
        )
    )
    kept = select(sequence_spans.c.incarnation).where(sequence_spans.c.incarnation.in_(incarnations_new))
    with _in_turn(engine) as connection:
        known = set(connection.scalars(kept))  # another control plane was first
        rows = [(life, 1, last) for life, last in connection.execute(query) if life not in known]
        insert_rows(connection, sequence_spans, rows)
    return {life for life, _, _ in rows}


def _keep(engine: Engine, incarnation: int) -> bool:
    with _in_turn(engine) as connection:
        (life,) = _lives(connection, incarnations.c.id == incarnation)
        whole, _ = _look(connection, life)
        if whole == life.kept:
            return False
        connection.execute(delete(sequence_spans).where(sequence_spans.c.incarnation == incarnation))
        insert_rows(connection, sequence_spans, [(incarnation, *span) for span in whole])
    return True


@contextmanager
def _in_turn(engine: Engine) -> Iterator[Connection]:
    """A transaction in which no other process keeps spans."""
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        dialect_of(connection).one_at_a_time(connection, _KEEPING)
        yield connection


def _lives(connection: Connection, *conditions: ColumnElement[bool]) -> list[_Life]:
    highest = select(events.c.sequence).where(events.c.incarnation == incarnations.c.id, has_leaf(events))
    highest = highest.order_by(events.c.sequence.desc()).limit(1)
    query = select(incarnations.c.id, incarnations.c.uuid, highest.scalar_subquery().label("highest"))
    rows = connection.execute(query.where(*conditions).order_by(incarnations.c.id)).all()
    column = sequence_spans.c
    spans = select(sequence_spans).order_by(column.incarnation, column.first_sequence)
    if conditions:
        spans = spans.where(column.incarnation.in_([row.id for row in rows]))
    kept = {
        life: [(row.first_sequence, row.last_sequence) for row in of_life]
        for life, of_life in groupby(connection.execute(spans), key=lambda row: int(row.incarnation))
    }
    return [_Life(row.id, row.uuid, row.highest or 0, kept.get(row.id, [])) for row in rows]


def _is_done(life: _Life) -> bool:
    """Return whether everything possible was already found complete."""
    return not life.highest or (len(life.kept) == 1 and life.kept[0][0] == 1 <= life.highest <= life.kept[0][1])


def _look(connection: Connection, life: _Life) -> tuple[list[Span], list[int]]:
    """Return the ranges that are complete now, and the sequences that lack a part."""
    if _is_done(life):
        return life.kept, []
    spans, torn = list(life.kept), list[int]()
    reached = max((last for _, last in life.kept), default=0)
    open_ended = [(reached + 1, life.highest)] if life.highest > reached else []
    for first, last in [*holes_in(life.kept), *open_ended]:
        for low in range(first, last + 1, _AT_ONCE):
            high = min(last, low + _AT_ONCE - 1)
            lacking = _torn(connection, life.id, low, high)
            torn += lacking
            spans += _minus(_recorded(connection, life.id, low, high), [(each, each) for each in lacking])
    return _merged(spans), sorted(torn)


def _inside(life: int, low: int, high: int) -> tuple[ColumnElement[bool], ...]:
    column = events.c
    return column.incarnation == life, column.sequence >= low, column.sequence <= high, has_leaf(events)


def _torn(connection: Connection, life: int, low: int, high: int) -> list[int]:
    column = events.c
    query = (
        select(column.sequence)
        .where(*_inside(life, low, high), column.parts > 1)
        .group_by(column.sequence, column.log, column.parts)
        .having(func.count() != column.parts)
    )
    return sorted(set(connection.scalars(query)))


def _recorded(connection: Connection, life: int, low: int, high: int) -> list[Span]:
    """Every range of consecutive sequences with a leaf, ascending; an event of several leaves counts once."""
    there = select(events.c.sequence).where(*_inside(life, low, high)).distinct().subquery()
    sequence = there.c.sequence
    count, first, last = connection.execute(
        select(func.count(), func.min(sequence), func.max(sequence)).select_from(there)
    ).one()
    if not count:
        return []
    if count == last - first + 1:
        return [(first, last)]
    before = func.lag(sequence).over(order_by=sequence).label("before")
    steps = select(before, sequence).subquery()
    jumps = select(steps).where(steps.c.sequence > steps.c.before + 1).order_by(steps.c.sequence)
    ends, starts = zip(*connection.execute(jumps).all(), strict=True)
    return list(zip((first, *starts), (*ends, last), strict=True))


def _minus(spans: Iterable[Span], others: Iterable[Span]) -> Iterator[Span]:
    """What is in ranges and not in others; both ascending, neither overlapping itself."""
    remaining = iter(others)
    other = next(remaining, None)
    for first, last in spans:
        at = first
        while other is not None and other[0] <= last:
            if at < other[0]:
                yield at, other[0] - 1
            at = max(at, other[1] + 1)
            if other[1] > last:
                break
            other = next(remaining, None)
        if at <= last:
            yield at, last


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged
