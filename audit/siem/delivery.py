"""Deliver leaves to one sink: at least once, in order, behind everything else, and independent of other sinks.

1. Nothing waits for this: commits, admission and scrubbing continue whatever a sink does. A failing sink is tried again
   after a wait that doubles, up to a limit.
2. A batch goes to the folder `dead` if the receiver refuses it for good, or if it could not be delivered for
   `give_up_seconds`. It is stored durably with its reason, and later batches continue. `status()` counts the dead
   batches; `retry_dead` sends them. The start of the receiver's failure is stored on disk, so a restart does not
   restart that time.
3. A detached sink stays detached over restarts until it is attached again; its position stays. The caller, not the
   sink, records that it was detached (`SinkChanged`).
4. A leaf that may not leave (`leaving`) is skipped and counted. If that cannot be decided, delivery stops.
5. The identity of a batch is its positions, so a receiver can recognise a repetition.
6. `status()` reports a restore of the ledger and a purge that overtakes the sink, after restarts too (`cursor_reader`,
   rules 4 and 5).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.siem.cursor_reader import CursorBatch, SinkPositions, pull
from kvcustody.audit.siem.sink import RejectedError, Sink, SinkError
from kvcustody.audit.siem.sink_folder import SinkFolder, SinkStatus
from kvcustody.audit.store.database.engine import describe
from kvcustody.clock import MICROSECONDS, Clock, SystemClock
from kvcustody.errors import CustodyError
from kvcustody.guarding_thread import GuardingThread

_WAIT_SECONDS_MAX = 300.0

Encode = Callable[[Sequence[EventRow]], bytes]
Leaving = Callable[[Sequence[EventRow]], Sequence[EventRow]]  # of some leaves, those that may be handed over


class DeliveryPump:
    """One sink with its folder of positions and dead batches; `start` and `close` run it on its own thread."""

    def __init__(
        self,
        engine: Engine,
        sink: Sink,
        folder: Path,
        encode: Encode,
        *,
        leaving: Leaving = lambda rows: rows,
        batch: int = 500,
        interval_seconds: float = 1.0,
        give_up_seconds: float = 86_400.0,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._sink = sink
        self._folder = SinkFolder(folder)
        self._encode = encode
        self._leaving = leaving
        self._withheld = 0
        self._batch = batch
        self._interval_seconds = interval_seconds
        self._give_up_us = round(give_up_seconds * MICROSECONDS)
        self._clock = clock or SystemClock()
        self._stop = threading.Event()
        self._thread: GuardingThread | None = None
        self._failing_since_us: int | None = None
        self._failures = 0
        self._problem = ""
        self._delivered = 0
        try:
            self._folder.make()
        except OSError as problem:
            raise SinkError(f"sink `{sink.name}`: `{folder}`: {problem.strerror}", name=sink.name) from None
        self._positions = self._folder.read_positions()

    @property
    def attached(self) -> bool:
        """Whether the sink receives leaves (rule 3)."""
        return self._folder.attached

    @property
    def positions(self) -> SinkPositions:
        """The sink's positions."""
        return self._positions

    def detach(self) -> None:
        """Stop deliveries, now and after a restart."""
        self._folder.detach()

    def attach(self) -> None:
        """Resume where it stopped."""
        self._folder.attach()

    def acknowledge(self) -> None:
        """Stop reporting the losses so far, which somebody has seen."""
        self._folder.acknowledge()

    def status(self) -> SinkStatus:
        """Return a snapshot for health."""
        stored = self._folder.status(self._sink.name, self._positions)
        since_us = stored.failing_since_us
        return stored._replace(
            delivered=self._delivered,
            failures=self._failures,
            problem=self._problem or stored.problem,
            withheld=self._withheld,
            failing_since_us=self._failing_since_us if since_us is None else since_us,
        )

    def step(self) -> int:
        """Deliver the next batch; return the number of leaves (0: nothing new, or detached). Raises `SinkError`."""
        if not self.attached:
            return 0
        with self._engine.connect() as connection:
            page = pull(connection, self._positions, limit=self._batch)
        if not page.rows:
            self._move(page)
            return 0
        rows = self._leaving(page.rows)
        body, identity = self._encode(rows), _identity(page)
        try:
            if rows:
                self._sink.deliver(identity, body)
        except RejectedError as problem:
            self._folder.bury(identity, body, self._sink.content_type, problem.message)
        except SinkError as problem:
            now_us = self._clock.utc_us()
            if now_us - self._folder.begin_failure(now_us, problem.message).since_us < self._give_up_us:
                raise
            self._folder.bury(identity, body, self._sink.content_type, problem.message)
        else:
            self._delivered += len(rows)
        self._withheld += len(page.rows) - len(rows)
        if rows:
            self._folder.end_failure()
        self._move(page)
        return len(page.rows)

    def retry_dead(self) -> int:
        """Send the dead batches again, oldest first; return how many were accepted. Raises `SinkError` at the first
        failure.
        """
        sent = 0
        for path in self._folder.dead():
            value = orjson.loads(path.read_bytes())
            self._sink.deliver(value["identity"], value["body"].encode(), value.get("content_type", ""))
            path.unlink()
            sent += 1
        return sent

    def start(self) -> None:
        """Deliver on a thread until `close`."""
        name = f"kvcustody-sink-{self._sink.name}"
        self._thread = GuardingThread(self._run, name=name)
        self._thread.start()

    def close(self, timeout_seconds: float = 15.0) -> None:
        """Stop after the current batch."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            try:
                pause = 0.0 if self.step() else self._interval_seconds
                self._failures, self._problem, self._failing_since_us = 0, "", None
            except (CustodyError, SQLAlchemyError) as problem:
                self._failures += 1
                self._failing_since_us = self._failing_since_us or self._clock.utc_us()
                self._problem = problem.message if isinstance(problem, CustodyError) else describe(problem)
                pause = min(_WAIT_SECONDS_MAX, self._interval_seconds * 2.0 ** min(self._failures, 16))

    def _move(self, batch: CursorBatch) -> None:
        if batch.positions != self._positions:
            self._folder.write_positions(batch.positions)
            self._positions = batch.positions


def _identity(batch: CursorBatch) -> str:
    return hashlib.sha256(batch.positions.to_bytes()).hexdigest()
