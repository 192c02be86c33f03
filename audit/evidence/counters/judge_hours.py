"""Keep verdicts by hour up to date: each pass reads only the leaves that were sealed since the last one.

    judging = HourlyJudge(reading, writing)
    judging.judge(now_us=clock.utc_us())     # a step; `behind` says whether there is more

1. Between passes these leaves are kept: those of custody without a final verdict, of the residencies that use it, and
   of whole processes. Each pass judges all of them again, with the one implementation of coverage.
2. A verdict is final if custody ended and was proved or can never be proved (in time, late, unproven). A verdict of
   wrong or missing evidence is final after a day (`_WAIT_US`). A final verdict is added to its hour once, and its
   leaves are released.
3. Two things restart the whole judgement: a leaf about custody with a final verdict, and leaves already read that
   retention drops. Such a leaf is a late spill, or evidence recorded before the event it is about. So the stored rows
   always equal a judgement of the whole state (`hourly_coverage.judged_rows`), and `fsck` compares.
   After each such late leaf, the judge waits twice as long before a verdict of wrong or missing evidence is final. So
   it does not begin anew for the same leaf again.
4. A step takes a bounded number of leaves, up to a checkpoint. While more remain, it judges as of that checkpoint's
   time.
5. The last hours are judged by minute too, for charts of short periods. Only this process has these rows, in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, compress, groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.evidence.counters.hourly_coverage import (
    JUDGING,
    HourRow,
    JudgedRow,
    JudgedState,
    drop_verdicts,
    first_hour,
    hour_rows,
    hours_back,
    judged_state,
    recent_rows,
    rows_of_hour,
)
from kvcustody.audit.evidence.coverage.block_uses import NEVER, Flags
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, LifeUnits, units_of
from kvcustody.audit.evidence.coverage.lag_counts import NO_LAGS, LagCounts, added
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.summary import CoverageRow, add_rows
from kvcustody.audit.evidence.coverage.verdicts import VERDICTS
from kvcustody.audit.evidence.query.evidence_columns import GENERATION_MASK
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.store.database.bulk_insert import insert_rows
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.database.gc_pause import gc_paused
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.counters import coverage_hours, coverage_pass
from kvcustody.audit.store.schema.leaf_tables import retention_purges
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.trees import checkpoints, root_leaves
from kvcustody.logger import get_logger
from kvcustody.times import DAY_US, HOUR_US, MINUTE_US

STEP_LEAVES = 200_000  # of one step, unless one seal has more
_SEALS = 20_000  # root leaves that one step looks at
_WAIT_US = DAY_US
MINUTES_US = 6 * HOUR_US  # judged by minute: the last of it
_Entries = dict[tuple[str, str], tuple[CoverageRow, LagCounts]]
_FINAL = [VERDICTS.index(name) for name in ("in_time", "late", "unproven")]
_log = get_logger(__name__)


class Spans:
    """A set of whole numbers, efficient for long runs."""

    def __init__(self) -> None:
        self._first: Int64s = np.empty(0, np.int64)
        self._below: Int64s = np.empty(0, np.int64)

    def has(self, values: Int64s) -> Flags:
        """Return for each value whether it is in the set."""
        place = np.searchsorted(self._first, values, side="right") - 1
        found: Flags = place >= 0
        found[found] = values[found] < self._below[place[found]]
        return found

    def add(self, values: Int64s) -> None:
        """Add values."""
        first, below = np.concatenate((self._first, values)), np.concatenate((self._below, values + 1))
        order = np.argsort(first, kind="stable")
        first, reached = first[order], np.maximum.accumulate(below[order])
        begins = np.ones(len(first), np.bool_)
        begins[1:] = first[1:] > reached[:-1]
        ends = np.ones(len(first), np.bool_)
        ends[:-1] = begins[1:]
        self._first, self._below = first[begins], reached[ends]


class _Grown(NamedTuple):
    """Up to where a step goes: a checkpoint, its time, and the new size of every log that grew."""

    size: int
    at_us: int
    logs: dict[int, int]
    more: bool


def judge(reader: Engine, writer: Engine, *, now_us: int) -> JudgedState | None:
    """Judge everything from the first leaf on; return the stored state."""
    judging = HourlyJudge(reader, writer)
    state = judging.judge(now_us=now_us)
    while judging.behind:
        state = judging.judge(now_us=now_us)
    return state


class HourlyJudge:
    """The judge's memory between two passes; for one thread."""

    def __init__(self, reader: Engine, writer: Engine) -> None:
        self._reader, self._writer = reader, writer
        self._leading: Connection | None = None
        self.behind = False  # there was more than one step takes
        self._stored: JudgedState | None = None
        self._hours: dict[int, list[HourRow]] = {}  # the rows of that state
        self._wait_us = _WAIT_US
        self.minutes: tuple[JudgedState, dict[int, list[JudgedRow]]] | None = None  # of the stored state
        self._forget()

    def leads(self) -> bool:
        """Return whether this process judges. One process on a ledger does, as long as its connection lasts."""
        try:
            if self._leading is None:
                made = self._reader.connect()
                self._leading = made.execution_options(isolation_level="AUTOCOMMIT")
            return dialect_of(self._leading).leads(self._leading, JUDGING)
        except SQLAlchemyError:
            self.close()
            raise

    def close(self) -> None:
        """Let another process judge; may be called again."""
        leading, self._leading = self._leading, None
        if leading is not None:
            with suppress(SQLAlchemyError):
                dialect_of(leading).resign(leading, JUDGING)
            leading.invalidate()  # the pool's next user must not lead
            leading.close()

    def _forget(self) -> None:
        """Begin anew."""
        self._size = 0  # root leaves, of the state that was judged
        self._last_us = 0  # the latest time of its leaves
        self._read: dict[int, int] = {}  # by log: how far
        self._first: dict[int, int] = {}  # by log: the first leaf that was there
        self._kept: list[bytes] = []
        self._over: dict[str, Spans] = {}  # by process: custody whose verdict is final
        self._shards: dict[str, int] = {}
        self._final: dict[int, _Entries] = {}  # by hour, and then by tenant and classification
        self._made: dict[int, list[HourRow]] = {}  # the rows of hours of which every verdict is final
        self._minutes: dict[int, _Entries] = {}  # as `_final`, by minute
        self._minute_rows: dict[int, list[JudgedRow]] = {}  # of everything that was judged, by minute

    def judge(self, *, now_us: int) -> JudgedState | None:
        """Judge one step; return the stored state, or None if there is none. Raises the database's errors."""
        try:
            with self._reader.connect() as connection, connection.begin():
                dialect_of(connection).begin_reading(connection)
                dialect_of(connection).as_long_as_it_takes(connection)
                before = judged_state(connection)
                grown = self._grown(connection)
                if grown is None:
                    return before
                leaves = self._leaves(connection, grown)
                ids = {name: log for log, name in connection.execute(select(logs.c.id, logs.c.name))}
            self.behind = grown.more
            state = JudgedState(grown.size, grown.at_us if grown.more else now_us)
            with gc_paused():
                rows = self._judged(leaves, state, ids)
        except BaseException:
            self._forget()  # some of it may be done
            raise
        if rows is None:
            _log.warning("evidence arrived after its verdict; the verdicts by hour are computed again")
            self._forget()
            self._wait_us *= 2
            self.behind = True
            return before
        self._size = grown.size
        with self._writer.connect().execution_options(**WRITE) as connection, connection.begin():
            dialect_of(connection).one_at_a_time(connection, JUDGING)
            before = judged_state(connection)
            if self._has_purged(connection):  # rule 3
                self._forget()
                self.behind = True
                return before
            if before is not None and before > state:
                return before
            self._store(connection, rows, state, mine=before is not None and before == self._stored)
        self._stored = state
        self.minutes = (state, self._minute_rows)
        return state

    def _store(self, connection: Connection, rows: list[HourRow], state: JudgedState, *, mine: bool) -> None:
        """Replace what is stored; where it is `mine`, the hours alone that say something else now."""
        hours = {hour: list(some) for hour, some in groupby(rows, key=itemgetter(0))}
        there = self._hours if mine else {}
        changed = [hour for hour in there.keys() | hours.keys() if there.get(hour) != hours.get(hour)]
        if mine:
            connection.execute(delete(coverage_hours).where(coverage_hours.c.hour_us.in_(changed)))
            connection.execute(update(coverage_pass).values(state._asdict()))
        else:
            drop_verdicts(connection)
            connection.execute(insert(coverage_pass).values(id=1, **state._asdict()))
        insert_rows(connection, coverage_hours, [row for hour in sorted(changed) for row in hours.get(hour, ())])
        self._hours = hours

    def _grown(self, connection: Connection) -> _Grown | None:
        """Return the next state; None if nothing is sealed, the present one if nothing was added."""
        column = checkpoints.c
        query = select(column.size, column.at_us)
        newest = connection.execute(query.order_by(column.size.desc()).limit(1)).first()
        if newest is None:
            return None
        seals = connection.execute(
            select(root_leaves.c.idx, root_leaves.c.log, root_leaves.c.size)
            .where(root_leaves.c.idx >= self._size, root_leaves.c.idx < newest.size)
            .order_by(root_leaves.c.idx)
            .limit(_SEALS)
        ).all()
        leaves, place, read = 0, self._size, dict(self._read)
        for idx, log, size in seals:
            leaves += size - read.get(log, 0)
            if leaves > STEP_LEAVES:
                break
            read[log], place = size, idx + 1
        whole = place == newest.size
        if not whole:  # as far as a checkpoint goes, one at least
            below = query.where(column.size <= place, column.size > self._size).order_by(column.size.desc())
            above = query.where(column.size > self._size).order_by(column.size)
            checkpoint = connection.execute(below.limit(1)).first() or connection.execute(above.limit(1)).one()
        else:
            checkpoint = newest
        sizes = (
            select(root_leaves.c.log, func.max(root_leaves.c.size).label("size"))
            .where(root_leaves.c.idx >= self._size, root_leaves.c.idx < checkpoint.size)
            .group_by(root_leaves.c.log)
        )
        grown = {row.log: row.size for row in connection.execute(sizes)}
        return _Grown(checkpoint.size, checkpoint.at_us, grown, checkpoint.size < newest.size)

    def _leaves(self, connection: Connection, grown: _Grown) -> list[bytes]:
        """Return the leaves of a step, log by log."""
        spans = [(log, self._read.get(log, 0), size) for log, size in sorted(grown.logs.items())]
        span = dialect_of(connection).spans(connection, spans)
        inside = (events.c.log == span.c.log) & (events.c.idx >= span.c.first) & (events.c.idx < span.c.below)
        query = select(events.c.log, events.c.idx, events.c.leaf).select_from(span.join(events, inside))
        query = query.where(has_leaf(events))
        leaves = []
        for log, idx, leaf in connection.execute(query, execution_options={"yield_per": 10_000}):
            leaves.append(bytes(leaf))
            if idx < self._first.get(log, 1 << 62):
                self._first[log] = idx
        self._read |= grown.logs
        return leaves

    def _has_purged(self, connection: Connection) -> bool:
        """Return whether retention drops or has dropped leaves that were read; it records this before dropping the
        first.
        """
        column = retention_purges.c
        query = select(logs.c.id, func.max(column.below)).join(logs, logs.c.name == column.of_log)
        query = query.where(has_leaf(retention_purges))
        return any(
            below > self._first.get(log, 1 << 62) for log, below in connection.execute(query.group_by(logs.c.id))
        )

    def _judged(self, leaves: Iterable[bytes], state: JudgedState, ids: dict[str, int]) -> list[HourRow] | None:
        """Return the rows of a state; None if something final no longer is (rule 3)."""
        old = len(self._kept)
        every = [*self._kept, *leaves]
        record = LeafRecord(every)
        if record.asked_before(old, self._last_us):
            return None
        since_us, final_us = first_hour(state.at_us), hours_back(state.at_us, self._wait_us)
        self._final = {hour_us: of_hour for hour_us, of_hour in self._final.items() if hour_us >= since_us}
        needed, pending = [np.array(record.told, np.int64)], list[LifeUnits]()
        since_fine_us, fine = state.at_us // MINUTE_US * MINUTE_US - MINUTES_US, list[LifeUnits]()
        for each in units_of(record, CustodySelection(until_us=state.at_us), now_us=state.at_us):
            life, over = each.life, self._over.setdefault(each.life.uuid, Spans())
            if record.names_any(life, old, over.has) or self._shards.get(life.uuid, life.shards) != life.shards:
                return None
            self._shards[life.uuid] = life.shards
            units = each.units.kept(~over.has(each.units.keys))
            claimed = each.ends.column("due_boot_us")[units.row]
            at_us = np.where(units.due < NEVER, units.due, claimed) + life.offset_us
            final = np.isin(units.verdict, _FINAL) | (at_us < final_us)
            nobody = each.overdue.kept(np.zeros(len(each.overdue.keys), np.bool_))
            ended = each._replace(units=units.kept(final), overdue=nobody)
            for hour_us in _add(self._final, [ended], since_us):
                self._made.pop(hour_us, None)
            lately = at_us >= since_fine_us
            _add(self._minutes, [ended._replace(units=units.kept(final & lately))], since_fine_us, MINUTE_US)
            over.add(units.keys[final])
            overdue = each.overdue.kept(~over.has(each.overdue.keys))
            pending.append(each._replace(units=units.kept(~final), overdue=overdue))
            late = overdue.kept(overdue.due + life.offset_us >= since_fine_us)
            fine.append(each._replace(units=units.kept(~final & lately), overdue=late))

            def is_over(keys: Int64s, over: Spans = over) -> Flags:
                made: Flags = over.has(keys) | (keys & GENERATION_MASK == 0)
                return made

            needed.append(record.needed(life, is_over, final_us - life.offset_us))
        kept = np.zeros(len(every), np.bool_)
        kept[np.concatenate(needed)] = True
        self._kept, self._last_us = list(compress(every, kept.tolist())), max(self._last_us, record.last_us)
        self._minute_rows = self._by_minute(fine, since_fine_us)
        return self._rows(pending, state, ids)

    def _rows(self, pending: list[LifeUnits], state: JudgedState, ids: dict[str, int]) -> list[HourRow]:
        """Rows as they are stored: of what is final, and of the rest. Hours that did not change are not made again."""
        of_rest: dict[int, list[JudgedRow]] = {}
        for (hour_us, *who), row, lags in hour_rows(pending, first_hour(state.at_us)):
            of_rest.setdefault(hour_us, []).append(((who[0], who[1]), row, lags))
        rows: dict[int, list[HourRow]] = {}
        for hour_us in sorted(self._final.keys() | of_rest.keys()):
            if hour_us not in of_rest and hour_us in self._made:
                rows[hour_us] = self._made[hour_us]
                continue
            final = ((who, *value) for who, value in self._final.get(hour_us, {}).items())
            rows[hour_us] = rows_of_hour(hour_us, [*final, *of_rest.get(hour_us, ())], ids)
        self._made = {hour_us: of_hour for hour_us, of_hour in rows.items() if hour_us not in of_rest}
        return [*recent_rows(rows, state.at_us), *chain.from_iterable(rows.values())]

    def _by_minute(self, pending: list[LifeUnits], since_us: int) -> dict[int, list[JudgedRow]]:
        """Return what is final and the rest by minute, from `since_us` on (rule 5)."""
        self._minutes = {at_us: entries for at_us, entries in self._minutes.items() if at_us >= since_us}
        rows = {at_us: [(who, *value) for who, value in of.items()] for at_us, of in self._minutes.items()}
        for (at_us, *who), row, lags in hour_rows(pending, since_us, MINUTE_US):
            rows.setdefault(at_us, []).append(((who[0], who[1]), row, lags))
        return rows


def _add(into: dict[int, _Entries], lives: list[LifeUnits], since_us: int, width_us: int = HOUR_US) -> set[int]:
    """Add what these units come to, by hour or a narrower width; return the hours that changed."""
    changed = set[int]()
    for (start_us, *who), row, lags in hour_rows(lives, since_us, width_us):
        entries = into.setdefault(start_us, {})
        there, before = entries.get((who[0], who[1]), (CoverageRow("", ""), NO_LAGS))
        entries[who[0], who[1]] = (add_rows((there, row)), added((before, lags)))
        changed.add(start_us)
    return changed
