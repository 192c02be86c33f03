"""Leaves whose stated time contradicts the ledger's own times: computed from signed checkpoints, and not stored.

    times = LedgerTimes(connection)
    for odd in times.odd("tenant/acme"): ...   # ahead, early or late, with the times that bracket it
    times.of(log).older_than(before_us)        # leaves that were under a signature by then, whatever they say

1. A leaf was there when the first checkpoint that covers it was signed, and not when the one before was: the two times
   bracket its commit, by the signer's clock. The time of an unsigned checkpoint is that of a leaf, and proves nothing.
2. `ahead` states a time after the signature, by more than clocks may be apart. `early` states one before the earlier
   signature, by more than a spill may hold.
3. `late` is as early, and explained: by its process's own record those sequences went to its spill. It states when it
   happened, and came when it did.
4. What a process that replays or generates history states is its own time, on purpose: it is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, select

from kvcustody.audit.evidence.processes.marked_processes import read_marked
from kvcustody.audit.evidence.query.events import CursorError
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.store.database.dialect import fetch_all
from kvcustody.audit.store.schema.all_tables import is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import outages
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.store.schema.trees import root_leaves, signed_checkpoints
from kvcustody.times import SECOND_US

AHEAD, EARLY, LATE = "ahead", "early", "late"
APART_US = 300 * SECOND_US  # as `worker_clock_seconds` is by default
SPILL_US = 7 * 86_400 * SECOND_US  # as `worker_silence_days` is by default
_AT_ONCE = 20_000
# The sum keeps a planner from walking an index by time, past all leaves that are older, for each question anew.
_EARLIEST = "SELECT min(at_us + 0) FROM events WHERE log = ? AND idx >= ? AND idx < ?"
_NEVER_US = np.iinfo(np.int64).min // 2


class OddTime(NamedTuple):
    """A leaf and why its stated time is odd (`ahead`, `early`, `late`); times are UTC.

    It was committed after `not_before_us`, 0 where no checkpoint was signed before, and before `not_after_us`.
    """

    log: str
    idx: int
    kind: str
    incarnation: str
    at_us: int
    not_before_us: int
    not_after_us: int
    why: str


class LogTimes:
    """When one log's leaves arrived, by signatures: `sizes` ascending, each first covered at `after`."""

    def __init__(self, sizes: Int64s, after_us: Int64s, before_us: Int64s) -> None:
        """`before_us`: when the signature before the one that first covers a size was made."""
        self.size = int(sizes[-1]) if len(sizes) else 0
        self._sizes = sizes
        # Every later signature covers the leaf, too: a clock that stepped back says no more than the earliest.
        self._after_us = np.minimum.accumulate(after_us[::-1])[::-1] if len(sizes) else after_us
        self._before_us = np.minimum(before_us, self._after_us) if len(sizes) else before_us

    def bracket(self, idx: Int64s) -> tuple[Int64s, Int64s]:
        """Return the two times between which covered leaves were committed."""
        place = np.searchsorted(self._sizes, idx, side="right")
        return self._before_us[place], self._after_us[place]

    def latest_before(self, first: int, end: int) -> int:
        """Return the latest time after which the covered leaves from `first` up to but without `end` were committed."""
        places = np.searchsorted(self._sizes, (first, end - 1), side="right")
        return int(self._before_us[places[0] : places[1] + 1].max())

    def older_than(self, before_us: int) -> int:
        """Return how many leaves signatures from before an instant cover."""
        place = int(np.searchsorted(self._after_us, before_us, side="left"))
        return int(self._sizes[place - 1]) if place else 0


class LedgerTimes:
    """The time brackets of a ledger's logs; reads through one connection, including the system log's own rows."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        column = signed_checkpoints.c
        rows = connection.execute(select(column.size, column.at_us).order_by(column.size)).all()
        self._sizes = np.array([row.size for row in rows], np.int64)
        self._times = np.array([row.at_us for row in rows], np.int64)
        self._spilled: dict[int, list[tuple[int, int | None]]] | None = None
        self._marked: frozenset[int] | None = None

    def of(self, log: int) -> LogTimes:
        """Return a log's brackets, by its id."""
        column = root_leaves.c
        query = select(column.idx, column.size).where(column.log == log).order_by(column.idx)
        found = np.array([tuple(row) for row in self._connection.execute(query)], np.int64).reshape(-1, 2)
        if not len(found) or not len(self._sizes):
            nothing = np.empty(0, np.int64)
            return LogTimes(nothing, nothing, nothing)
        under = np.searchsorted(found[:, 0], self._sizes, side="left")
        covered = np.where(under > 0, found[np.maximum(under - 1, 0), 1], 0)
        sizes, first = np.unique(covered, return_index=True)
        sizes, first = sizes[sizes > 0], first[sizes > 0]
        before = np.where(first > 0, self._times[np.maximum(first - 1, 0)], _NEVER_US)
        return LogTimes(sizes, self._times[first], before)

    def odd(self, log: str, *, since: int = 0) -> Iterator[OddTime]:
        """Yield odd times of a log from the leaf `since` on, of signed and existing leaves, in order."""
        number, times = self._named(log)
        while since < times.size and (rows := self._rows(number, since, times.size)):
            since = rows[-1][0] + 1
            yield from self._odd(log, times, rows)

    def page(self, log: str, since: int, items: int, leaves: int) -> tuple[list[OddTime], int | None]:
        """Return the next `items` odd times of a log from at most `leaves` leaves, and where to continue, None at the
        end.

        Raises `CursorError` where the log has no signed leaf before `since`.
        """
        number, times = self._named(log)
        if since > times.size:
            raise CursorError(f"log `{log}` is shorter than before, as after a restore; start again without a cursor")
        end = min(times.size, since + leaves)
        odd_times: list[OddTime] = []
        while since < end and (rows := self._rows(number, since, end)):
            since = rows[-1][0] + 1
            odd_times += self._odd(log, times, rows)
            if len(odd_times) > items:
                return odd_times[:items], odd_times[items].idx
        return odd_times, end if end < times.size else None

    def _named(self, log: str) -> tuple[int, LogTimes]:
        number = self._connection.scalar(select(logs.c.id).where(logs.c.name == log))
        return number or 0, self.of(number or 0)

    def first_early(self, log: int, times: LogTimes, since: int, below: int) -> int | None:
        """Return the first leaf in [since, below) of a log that is early."""
        below = min(below, times.size)
        while since < below:
            end = min(below, since + _AT_ONCE)
            stated = fetch_all(self._connection, _EARLIEST, (log, since, end))
            earliest: int | None = stated[0][0]
            if earliest is not None and earliest < times.latest_before(since, end) - SPILL_US:
                rows = self._rows(log, since, end)
                found = next((odd.idx for odd in self._odd("", times, rows) if odd.why == EARLY), None)
                if found is not None:
                    return found
            since = end
        return None

    def _rows(self, log: int, since: int, end: int) -> list[tuple[int, int, int, int, str]]:
        column = events.c
        query = select(column.idx, column.at_us, column.incarnation, column.sequence, column.kind).where(
            column.log == log, column.idx >= since, column.idx < end
        )
        return [tuple(row) for row in self._connection.execute(query.order_by(column.idx).limit(_AT_ONCE))]

    def _odd(self, log: str, times: LogTimes, rows: list[tuple[int, int, int, int, str]]) -> Iterator[OddTime]:
        idx, at_us, lives, sequences = (np.array(column, np.int64) for column in list(zip(*rows, strict=True))[:4])
        before_us, after_us = times.bracket(idx)
        ahead = at_us > after_us + APART_US
        early: NDArray[np.bool_] = at_us < before_us - SPILL_US
        for place in np.flatnonzero(ahead | early).tolist():
            life = int(lives[place])
            if life in self._marked_lives():
                continue
            why = AHEAD if ahead[place] else LATE if self._was_spilled(life, int(sequences[place])) else EARLY
            bracket = max(0, int(before_us[place])), int(after_us[place])
            yield OddTime(log, int(idx[place]), rows[place][4], self._uuid(life), int(at_us[place]), *bracket, why)

    def _uuid(self, life: int) -> str:
        return str(self._connection.scalar(select(incarnations.c.uuid).where(incarnations.c.id == life)))

    def _marked_lives(self) -> frozenset[int]:
        if self._marked is None:
            uuids = [one.incarnation for one in read_marked(self._connection)]
            query = select(incarnations.c.id).where(incarnations.c.uuid.in_(uuids))
            self._marked = frozenset(self._connection.scalars(query)) if uuids else frozenset()
        return self._marked

    def _was_spilled(self, life: int, sequence: int) -> bool:
        """Return whether a process's own leaves record a spill of one of its events (rule 3)."""
        if self._spilled is None:
            self._spilled = self._read_spills()
        return any(
            first <= sequence and (last is None or sequence <= last) for first, last in self._spilled.get(life, ())
        )

    def _read_spills(self) -> dict[int, list[tuple[int, int | None]]]:
        """By process the sequences that went to its spill; None: it did not read it back itself."""
        column = outages.c
        query = (
            select(column.incarnation, column.kind, column.first_sequence, events.c.sequence)
            .select_from(outages.join(events, is_leaf_of(outages)))
            .where(column.kind.in_(("spill-started", "replay-completed")))
            .order_by(column.incarnation, events.c.sequence)
        )
        spans_by_life: dict[int, list[tuple[int, int | None]]] = {}
        for life, kind, first, sequence in self._connection.execute(query):
            spans = spans_by_life.setdefault(life, [])
            if kind == "spill-started":
                spans.append((first, None))
            elif spans and spans[-1][1] is None:
                spans[-1] = (spans[-1][0], sequence)
        return spans_by_life
