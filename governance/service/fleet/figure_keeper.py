"""Keeps the ledger's figures current in the background: folds deltas, judges coverage by hour, keeps complete
sequences.

1. Nobody waits for it. Until its first pass there are no verdicts, and a reader is told so; a pass that fails leaves
   those that are there, with their age.
2. A pass costs as much as coverage of the new leaves, so the pause after it grows with that. Passes take at most a
   twentieth of the time, and a fifth while they are behind and no worker waits. Folding takes half of it while it is
   behind and no worker waits, else a tenth: the deltas of a tenant that come together meanwhile change its sums once.
3. Any number of control planes may do this over one ledger (`write.fold`, `counters.judge_hours`): verdicts are one
   plane's to make for as long as it goes on.
4. Charts of short periods read narrower cells than hours. `fine` counts them, ahead of readers. `coverage_by_minute` is
   the plane's own judgement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sqlalchemy import Engine

from kvcustody.audit.evidence.counters.fine_figures import FineFigures
from kvcustody.audit.evidence.counters.hourly_coverage import JudgedState, PeriodCoverage
from kvcustody.audit.evidence.counters.judge_hours import HourlyJudge
from kvcustody.audit.evidence.coverage.lag_counts import LagCounts, added
from kvcustody.audit.evidence.coverage.summary import CoverageRow, add_rows
from kvcustody.audit.evidence.processes.sequence_gaps import keep_spans
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.write.fold import DELTAS_MAX, fold
from kvcustody.clock import Clock
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger
from kvcustody.times import MINUTE_US

_TURNS_MAX = 16  # of a pass; what is left then is for the next
# A pass rests so many times as long as it took.
_REST, _REST_BEHIND = 20, 4
_SPANS_SECONDS = 30.0
_FINE_SECONDS = 5.0
_REST_FOLDED, _REST_FOLDED_BEHIND = 9, 1

_log = get_logger(__name__)


class FigureKeeper:
    """One thread; close it at the end. `waited`: whether workers wait for the database or a processor."""

    def __init__(
        self,
        engine: Engine,
        reader: Engine,
        clock: Clock,
        *,
        seconds: float,
        waited: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._seconds = seconds
        self._ending = threading.Event()
        self._waited = waited
        self._judge_at = self._spans_at = self._fine_at = self._folded_at = self._fold_seconds = 0.0
        self._reader = reader
        self._fold_behind = False  # there was more than one pass takes
        self._judging = HourlyJudge(reader, engine)
        self.fine = FineFigures()
        self._thread = GuardingThread(self._run, name="kvcustody-figures")
        self._thread.start()

    def keep(self) -> None:
        """Fold the deltas, and judge; raises what the database raises."""
        if time.monotonic() >= self._fold_at:
            started = time.monotonic()
            self._fold_behind = all(
                fold(self._engine) >= DELTAS_MAX and not self._ending.is_set() for _ in range(_TURNS_MAX)
            )
            self._folded_at = time.monotonic()
            self._fold_seconds = self._folded_at - started
        if time.monotonic() >= self._judge_at and self._judging.leads():
            started = time.monotonic()
            self._judging.judge(now_us=self._clock.utc_us())
            now = time.monotonic()
            hurried = self._judging.behind and not self._waited()
            self._judge_at = now + (_REST_BEHIND if hurried else _REST) * (now - started)

        if time.monotonic() >= self._spans_at:
            started = time.monotonic()
            keep_spans(self._engine)
            now = time.monotonic()
            self._spans_at = now + max(_SPANS_SECONDS, _REST * (now - started))

        if time.monotonic() >= self._fine_at:
            started = time.monotonic()
            with self._reader.connect() as connection, connection.begin():
                dialect_of(connection).begin_reading(connection)
                self.fine.keep(connection, self._clock.utc_us())
            now = time.monotonic()
            self._fine_at = now + max(_FINE_SECONDS, _REST * (now - started))

    def coverage_by_minute(
        self, state: JudgedState | None, since_us: int, until_us: int, *, tenant: str | None = None
    ) -> PeriodCoverage | None:
        """Return coverage of a period of minutes, its `hours` being minutes.

        Args:
            state: What the reader's other figures were judged of; a later state's minutes are as good.
            since_us: In UTC microseconds; the judge keeps six hours.
            until_us: Where the period ends; the minutes that it touches count.
            tenant: Only this tenant's custody.

        Returns:
            The coverage; None where another process judges.
        """
        judged = self._judging.minutes
        if judged is None or state is None or judged[0] < state:
            return None
        since_us = since_us // MINUTE_US * MINUTE_US
        minutes: dict[int, tuple[CoverageRow, LagCounts]] = {}
        by_tenant: dict[tuple[str, str], list[CoverageRow]] = {}
        for at_us in sorted(at_us for at_us in judged[1] if since_us <= at_us < until_us):
            own = [(who, row, lags) for who, row, lags in judged[1][at_us] if tenant is None or who[0] == tenant]
            for who, row, _ in own:
                by_tenant.setdefault(who, []).append(row)
            if own:
                minutes[at_us] = (add_rows([row for _, row, _ in own]), added([lags for _, _, lags in own]))
        rows = tuple(
            add_rows(rows)._replace(tenant=who[0], classification=who[1]) for who, rows in sorted(by_tenant.items())
        )
        return PeriodCoverage(judged[0], since_us, rows, added(lags for _, lags in minutes.values()), minutes)

    @property
    def _fold_at(self) -> float:
        """When folding may go on; sooner once nobody waits."""
        rest = _REST_FOLDED_BEHIND if self._fold_behind and not self._waited() else _REST_FOLDED
        return self._folded_at + rest * self._fold_seconds

    def _pause_seconds(self) -> float:
        """Until the next step, where there is more to judge or to fold."""
        until = [self._judge_at] if self._judging.behind else []
        until += [self._fold_at] if self._fold_behind else []
        return max(0.1, min(until) - time.monotonic()) if until else self._seconds

    def close(self) -> None:
        """End the thread once its turn is over; may be called again."""
        self._ending.set()
        self._thread.join()
        self._judging.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.keep()
            except Exception:
                _log.warning("figures are not up to date", exc_info=True)
            self._ending.wait(min(self._seconds, self._pause_seconds()))
