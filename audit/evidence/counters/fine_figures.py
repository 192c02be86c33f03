"""Figures of a short period in narrow cells, counted from its leaves: hours are too coarse for its charts.

    fine = FineFigures()
    cells = fine.read(connection, since_us, until_us)      # None: too long, or too many leaves

1. They are the figures of `read_figures`, of the same leaves by the same function (`project.count_events`), in
   narrower cells.
2. The work of a call is bounded, whatever the size of the ledger: by the length of the period (`SPAN_MAX_US`), by its
   leaves (`LEAVES_MAX`), and by those that no earlier call counted (`NEW_MAX`). Where more are new, a call counts some
   of them and returns None, and the next call goes on from there.
3. Leaves never change. A slice of five minutes with as many leaves as before is not read again. `keep` counts those
   that are over before anybody asks.
4. A cell is of fifteen seconds; of five minutes where there are more than `CELL_LEAVES_MAX` leaves, or `CELLS_SPAN_US`.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, func, select

from kvcustody.audit.evidence.counters.read_figures import Denials, HourlyFigure, leaves_in
from kvcustody.audit.kinds import log_of, tenant_of
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.project import COUNTED_KEYS, DENIED, Figures, count_events
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.times import HOUR_US, MINUTE_US, SECOND_US

CELL_US = 15 * SECOND_US
SPAN_MAX_US, CELLS_SPAN_US = 7 * HOUR_US, 150 * MINUTE_US  # six hours, up to the end of the last one
LEAVES_MAX, CELL_LEAVES_MAX, NEW_MAX = 120_000, 40_000, 8_000
_COUNTED_MAX = 500_000  # leaves of the touched hours that are counted in their index
_SLICE_US = 5 * MINUTE_US
_SLICES_MAX = 1_000


class _Slice(NamedTuple):
    """The figures of five minutes, by cell and together, and of how many leaves they are."""

    leaves: int
    figures: Figures
    together: Figures


class FineCells(NamedTuple):
    """A short period's figures by cell of `width_us`, those of its slices that have leaves.

    `starts_us` are the cells of which there is data: those of slices with leaves, from the first leaf on.
    """

    slices: Sequence[Figures]
    names: dict[int, str]
    starts_us: Sequence[int]
    width_us: int

    def figures(
        self, measures: Sequence[str], kinds: Sequence[str] | None = None, *, scraped: bool = False
    ) -> Iterator[HourlyFigure]:
        """Yield figures by cell, as `figures_by_hour` does by hour; one may come in several parts."""
        for each in self.slices:
            for (is_scraped, log, cell_us), figures in each.items():
                if is_scraped == scraped and log in self.names:
                    for (kind, measure, outcome, _, _), value in figures.items():
                        if measure in measures and (kinds is None or kind in kinds):
                            yield HourlyFigure(cell_us, self.names[log], kind, measure, outcome, value)

    def denials(self, since_us: int, until_us: int) -> tuple[Denials, ...]:
        """Return denied requests by reader, owner, rule and revision in the cells that a period touches."""
        since_us = since_us // self.width_us * self.width_us
        totals: Counter[tuple[str, str, str, int]] = Counter()
        for each in self.slices:
            for (is_scraped, log, cell_us), figures in each.items():
                if is_scraped and log in self.names and since_us <= cell_us < until_us:
                    for (_, measure, rule, detail, _), value in figures.items():
                        if measure == DENIED:
                            revision, _, owner = detail.partition(" ")
                            totals[tenant_of(self.names[log]), owner, rule, int(revision)] += value
        return tuple(Denials(*key, totals[key]) for key in sorted(totals) if totals[key])


class FineFigures:
    """Counted slices of one ledger, kept between calls; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slices: OrderedDict[tuple[str | None, int], _Slice] = OrderedDict()

    def read(
        self, connection: Connection, since_us: int, until_us: int, *, tenant: str | None = None
    ) -> FineCells | None:
        """Return the cells of the slices that a period touches, of one tenant's log or of all logs.

        Args:
            connection: A snapshot of the ledger.
            since_us: Where the period begins, in UTC microseconds.
            until_us: Where it ends.
            tenant: Only this tenant's log.

        Returns:
            The cells; None where the period is too long or has too many leaves (rule 2).
        """
        if not 0 < until_us - since_us <= SPAN_MAX_US:
            return None
        only = select(logs.c.id, logs.c.name)
        only = only if tenant is None else only.where(logs.c.name == log_of(tenant))
        names = {row.id: str(row.name) for row in connection.execute(only)}
        if tenant is not None and not names:
            return FineCells((), {}, (), CELL_US)
        since_us, until_us = since_us // _SLICE_US * _SLICE_US, -(-until_us // _SLICE_US) * _SLICE_US
        touched_us = -(-until_us // HOUR_US) * HOUR_US - since_us // HOUR_US * HOUR_US
        log = None if tenant is None else next(iter(names))
        in_hours = leaves_in(connection, log, since_us=since_us, until_us=until_us)
        if in_hours > _COUNTED_MAX or in_hours * (until_us - since_us) > LEAVES_MAX * touched_us:
            return None
        inside = _inside(since_us, until_us, log)
        number = events.c.at_us // _SLICE_US
        counted = select(number, func.count()).where(inside).group_by(number)
        sizes = {int(place): int(size) for place, size in connection.execute(counted)}
        with self._lock:
            known = {place: self._slices.get((tenant, place)) for place in sizes}
        new = [place for place, size in sizes.items() if (kept := known[place]) is None or kept.leaves != size]
        read = 0
        for place in sorted(new, reverse=True):
            if read and read + sizes[place] > NEW_MAX:
                return None
            read += sizes[place]
            known[place] = self._counted(connection, tenant, place, log, sizes[place])
        slices = [each for _, each in sorted(known.items()) if each is not None]
        is_narrow = sum(sizes.values()) <= CELL_LEAVES_MAX and until_us - since_us <= CELLS_SPAN_US
        width_us = CELL_US if is_narrow else _SLICE_US
        figures = [each.figures if is_narrow else each.together for each in slices]
        return FineCells(figures, names, _starts(known, width_us, until_us), width_us)

    def keep(self, connection: Connection, now_us: int) -> None:
        """Count some of the slices of all logs that are over, for whoever asks next."""
        until_us = now_us // _SLICE_US * _SLICE_US
        self.read(connection, until_us - SPAN_MAX_US, until_us)

    def _counted(self, connection: Connection, tenant: str | None, place: int, log: int | None, leaves: int) -> _Slice:
        inside = _inside(place * _SLICE_US, (place + 1) * _SLICE_US, log)
        query = select(events.c.leaf, events.c.log).where(inside, has_leaf(events))
        rows = connection.execute(query).all()
        batch = read_leaves([bytes(row.leaf) for row in rows], hashed=False, keys=COUNTED_KEYS)
        logs_of = [row.log for row in rows]
        figures, together = (count_events(batch, logs_of, width_us=width_us) for width_us in (CELL_US, _SLICE_US))
        counted = _Slice(leaves, figures, together)
        with self._lock:
            self._slices[tenant, place] = counted
            self._slices.move_to_end((tenant, place))
            while len(self._slices) > _SLICES_MAX:
                self._slices.popitem(last=False)
        return counted


def _inside(since_us: int, until_us: int, log: int | None) -> ColumnElement[bool]:
    of_log = events.c.log.in_(select(logs.c.id)) if log is None else events.c.log == log
    return and_(of_log, events.c.at_us >= since_us, events.c.at_us < until_us)


def _starts(slices: dict[int, _Slice | None], width_us: int, until_us: int) -> list[int]:
    """Return the cells of which there is data."""
    if not slices:
        return []
    first = slices[min(slices)]
    first_us = min((cell_us for _, _, cell_us in first.figures), default=0) if first is not None else 0
    every = (cell for place in sorted(slices) for cell in range(place * _SLICE_US, (place + 1) * _SLICE_US, width_us))
    return [cell_us for cell_us in every if first_us < cell_us + width_us and cell_us < until_us]
