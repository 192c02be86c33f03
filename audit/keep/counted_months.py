"""The contribution of leaves about to be dropped to the figures, by month, computed once, while they are verified.

    counted = CountedMonths(months, log_ids)
    verify_export(part, keys, seen=counted.take)   # any number of parts, from any thread
    counted.take_off(connection, month)            # in the transaction that empties the month

1. It stands for exactly the leaves that it was given. So it can take off a month only if as many leaves are dropped as
   it was given of that month. Whoever empties a month checks `leaves` first.
2. Memory does not grow with the ledger: the counts are in an unnamed file.
"""

from __future__ import annotations

import tempfile
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

import orjson
from sqlalchemy import Connection

from kvcustody.audit.evidence.counters.hourly_coverage import drop_verdicts
from kvcustody.audit.evidence.counters.packed_figures import pack_hour
from kvcustody.audit.keep.uncount import taken_off
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.project import COUNTED_KEYS
from kvcustody.audit.store.database.bulk_insert import Inserts
from kvcustody.audit.store.database.gc_pause import gc_paused
from kvcustody.audit.store.database.monthly_partitions import MonthPartition
from kvcustody.audit.store.schema.counters import counter_deltas

_TOGETHER = 1 << 12  # leaves that are read at once
_ROWS = 1 << 12
_EVER = -(1 << 63)


class ExpiredLeaves(NamedTuple):
    """Leaves of a log from `first` up to but without `below`, which may lose their content."""

    log: int
    first: int
    below: int


class CountedMonths:
    """Figures of leaves by month, in order; thread-safe. Use it as a context manager, which deletes its files.

    going: the leaves that may go, by name of their log; no other is counted. folder: on whose disk the files stand.
    uneven: processes whose leaves do not add up (`uncount`, rule 2).
    """

    def __init__(
        self,
        months: Sequence[MonthPartition],
        going: Mapping[str, ExpiredLeaves],
        folder: Path,
        uneven: frozenset[str] = frozenset(),
    ) -> None:
        self.months = tuple(months)
        self._going = going
        bounded = [month for month in months if month.below_us is not None]
        self._names = [month.name for month in bounded]
        self._firsts = [_EVER if month.first_us is None else month.first_us for month in bounded]
        self._ends = [month.below_us or 0 for month in bounded]
        self._lock = threading.Lock()
        self._waiting: dict[int, list[tuple[str, int, Sequence[bytes]]]] = {}
        self._leaves: Counter[str] = Counter()
        self._files: dict[str, IO[bytes]] = {}
        self._held = ExitStack()
        self._folder = folder
        self._uneven = uneven

    def __enter__(self) -> CountedMonths:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def take(self, log: str, first: int, leaves: Sequence[bytes]) -> None:
        """Count leaves of a log from `first` on, if they will be dropped and lie in one of the months."""
        run = self._going.get(log)
        if run is None or not self._names:
            return
        leaves = leaves[max(0, run.first - first) : max(0, run.below - first)]
        first = max(first, run.first)
        waiting = self._waiting.setdefault(threading.get_ident(), [])
        waiting.append((log, first, leaves))
        if sum(len(some) for _, _, some in waiting) >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Count what this thread has taken; call it after each part."""
        runs = self._waiting.pop(threading.get_ident(), [])
        leaves = [leaf for _, _, some in runs for leaf in some]
        if not leaves:
            return
        with gc_paused():
            batch = read_leaves(leaves, hashed=False, keys=COUNTED_KEYS)
            moments = iter(batch.at_us)
            numbered: dict[tuple[int, str], int] = {}  # by log and month
            firsts: list[int] = []  # of each of these, where its first leaf stands
            numbers: list[int] = []
            for log, first, some in runs:
                of_log = self._going[log].log
                for idx, at_us in enumerate(islice(moments, len(some)), first):
                    number = numbered.setdefault((of_log, self._month_of(at_us)), len(firsts))
                    if number == len(firsts):
                        firsts.append(idx)
                    numbers.append(number)
            found = taken_off(batch, numbers, self._uneven)
        keys, counts = list(numbered), Counter(numbers)
        by_month: dict[str, list[bytes]] = {}
        for (scraped, number, hour_us), figures in found.items():
            of_log, month = keys[number]
            # No other delta has this name: a size is above 0, and a leaf is dropped once.
            row = (scraped, of_log, -firsts[number] - 1, hour_us, pack_hour(figures))
            by_month.setdefault(month, []).append(orjson.dumps(row) + b"\n")
        with self._lock:
            for month, lines in by_month.items():
                if month:
                    self._file(month).writelines(lines)
            for number, count in counts.items():
                self._leaves[keys[number][1]] += count

    def leaves(self, month: str) -> int:
        """Return how many leaves of a month were given."""
        return self._leaves[month]

    def take_off(self, connection: Connection, month: str) -> None:
        """Subtract a month's counts from the figures; verdicts over it are dropped too."""
        drop_verdicts(connection)
        inserts = Inserts(connection)
        lines = self._lines(month)
        while rows := [tuple(orjson.loads(line)) for line in islice(lines, _ROWS)]:
            inserts.add(counter_deltas, [list(zip(*rows, strict=True))])
        inserts.finish()

    def _month_of(self, at_us: int) -> str:
        """Return the month of an instant; the empty name outside our months."""
        number = bisect_right(self._firsts, at_us) - 1
        return self._names[number] if number >= 0 and at_us < self._ends[number] else ""

    def _file(self, month: str) -> IO[bytes]:
        if month not in self._files:
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed with this
            self._files[month] = self._held.enter_context(file)
        return self._files[month]

    def _lines(self, month: str) -> Iterator[bytes]:
        file = self._files.get(month)
        if file is None:
            return
        file.seek(0)
        yield from file
