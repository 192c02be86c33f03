"""Past and present processes, kept in memory and updated from the system log.

    lives = RememberedLives()
    with service.reading() as connection:
        mine = lives.of_worker(connection, "gpu-0")     # reads the leaves that came since the last question

1. Every answer is what `work_periods` says of the whole log. A question reads the leaves that are new, and the last one
   that was read before. Where that one is another now, as after a restore, the whole log is read again.
2. Connections see committed leaves alone: one that wrote a life itself must not ask.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.evidence.processes.marked_processes import Marked, is_marked_start, marked_of
from kvcustody.audit.evidence.processes.work_periods import (
    STARTED,
    Body,
    LifeLeaf,
    WorkPeriod,
    about,
    life_leaves,
    note_end,
)
from kvcustody.audit.kinds.control_events import SIGNED


class KnownLives(NamedTuple):
    """Facts about every process from its leaves: its period, its end, whether it is marked or follows only signed
    orders.
    """

    periods: dict[str, WorkPeriod]
    ends: dict[str, tuple[int, str]]
    marked: Marked
    signed: frozenset[str]


class RememberedLives:
    """The processes of one ledger; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def all(self, connection: Connection) -> KnownLives:
        """Return every process; raises like `life_leaves`."""
        with self._lock:
            self._follow(connection)
            return KnownLives(dict(self._periods), dict(self._ends), self._marked, frozenset(self._signed))

    def of_worker(self, connection: Connection, worker: str) -> dict[str, WorkPeriod]:
        """Return the processes of one worker, by incarnation; raises like `life_leaves`."""
        with self._lock:
            self._follow(connection)
            return {life: self._periods[life] for life in self._of_worker.get(worker, ())}

    def marked(self, connection: Connection) -> Marked:
        """Return those that replayed or generated their records; raises like `life_leaves`."""
        with self._lock:
            self._follow(connection)
            return self._marked

    def _forget(self) -> None:
        self._last: LifeLeaf | None = None
        self._starts: dict[str, Body] = {}
        self._ends: dict[str, tuple[int, str]] = {}
        self._periods: dict[str, WorkPeriod] = {}
        self._of_worker: dict[str, list[str]] = {}
        self._signed: set[str] = set()
        self._marked_starts: dict[str, Body] = {}
        self._marked: Marked = ()

    def _follow(self, connection: Connection) -> None:
        last = self._last
        leaves = life_leaves(connection, 0 if last is None else last.idx)
        if last is not None:
            if leaves and leaves[0] == last:
                leaves = leaves[1:]
            else:
                self._forget()
                leaves = life_leaves(connection)
        for leaf in leaves:
            self._take(leaf.body)
            self._last = leaf
        if any(about(leaf.body) in self._marked_starts for leaf in leaves):
            self._marked = marked_of(self._marked_starts, self._ends)

    def _take(self, body: Body) -> None:
        life = about(body)
        if body["kind"] == STARTED and life not in self._starts:
            self._starts[life] = body
            self._of_worker.setdefault(str(body["worker"]), []).append(life)
        note_end(self._ends, body)
        start = self._starts.get(life)
        if start is not None:
            end = self._ends.get(life, (None, None))
            self._periods[life] = WorkPeriod(start["worker"], int(start["at_us"]), *end)
        if is_marked_start(body):
            self._marked_starts.setdefault(life, body)
        if body.get("orders") == SIGNED:
            self._signed.add(life)
