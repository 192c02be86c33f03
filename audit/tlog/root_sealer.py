"""Seal committed leaves: once an interval, commitments to the grown sub-logs and one checkpoint over them.

1. Any process that holds the ledger may seal, in a transaction of its own. It locks the root log's row and no other:
   whoever does not get it leaves the work to who has it, and no writer waits for it, nor it for a writer.
2. `unsealed_heads` says which sub-logs grew. It is read together with their heads, in one statement: what commits
   later is for the next seal. Those that wait longest come first, a thousand under a checkpoint, so that no
   transaction is long. A sealer that dies leaves all as it was.
3. A leaf waits for its checkpoint at most the interval from its commit (`RootSealer.turn`), less where somebody waits
   for a proof (`ask`, `soon`, `seal_now`); `unsealed` says how long the oldest has waited.
4. A sub-log whose frontier is damaged is left out and named (`TreeError`, after the others are sealed).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.leaf.merkle import Frontier, TreeError, TreeHead, leaf_hashes, placed_nodes
from kvcustody.audit.store.database.bulk_insert import insert_rows
from kvcustody.audit.store.database.dialect import GONE, dialect_of, fetch_all, file_identity
from kvcustody.audit.store.database.engine import WRITE, StoreGoneError, describe
from kvcustody.audit.store.schema.trees import ROOT, root_leaves, tree_nodes
from kvcustody.audit.tlog.root_log import seal
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import LedgerError
from kvcustody.logger import get_logger

INTERVAL_SECONDS = 10.0
OVERDUE_INTERVALS = 3  # a leaf that waited for so many: nobody seals
_SOON_US = 1 * MICROSECONDS  # at least so long between seals that somebody would like
_LOGS_AT_ONCE = 1000
_AGAIN_US = 1 * MICROSECONDS  # where a seal failed, or another process was at it

_log = get_logger(__name__)


class Unsealed(NamedTuple):
    """Leaves without a checkpoint: their sub-logs, their number, and how long ago the oldest was committed."""

    logs: int
    leaves: int
    age_us: int

    def overdue(self, interval_seconds: float) -> bool:
        """Return whether sealing is overdue."""
        return self.age_us > OVERDUE_INTERVALS * interval_seconds * MICROSECONDS


def unsealed(connection: Connection, now_us: int) -> Unsealed:
    """Return what no checkpoint covers at `now_us` (UTC)."""
    logs, leaves, oldest_us = connection.exec_driver_sql(_UNSEALED).one()
    age_us = 0 if oldest_us is None else max(0, now_us - oldest_us)
    return Unsealed(int(logs), int(leaves or 0), age_us)


def load_frontier(log: int, size: int | None, stored: bytes) -> Frontier:
    """Return the frontier from stored bytes; raises `TreeError` if they are invalid or of another size."""
    frontier = Frontier.from_bytes(bytes(stored))
    if size is not None and frontier.size != size:
        problem = f"log `{log}` has `{size}` leaves, its tree `{frontier.size}`"
        raise TreeError(f"{problem}; run `kvcustody audit fsck`", log=log, size=size)
    return frontier


def seal_now(engine: Engine, *, wait: bool = True) -> bool:
    """Seal every sub-log that grew; return False if another process is sealing and `wait` is not set.

    Raises what the database raises, and `TreeError` for damage (rule 4).
    """
    if file_identity(engine) == GONE:  # a connection would make an empty file in its place
        raise StoreGoneError("the ledger's file is missing")
    with engine.connect() as connection:
        if connection.exec_driver_sql(_OLDEST).scalar() is None:
            return True
    damaged: list[str] = []
    sealed = _LOGS_AT_ONCE
    with engine.connect().execution_options(**WRITE) as connection:
        while sealed and sealed + len(damaged) >= _LOGS_AT_ONCE:
            with connection.begin():
                stored = _lock_root(connection, wait)
                if stored is None:
                    return False
                sealed, damaged = _seal(connection, load_frontier(ROOT, None, stored))
    if damaged:
        problem = f"`{len(damaged)}` logs are not sealed, `{damaged[0]}` first: their trees are damaged"
        raise TreeError(f"{problem}; run `kvcustody audit fsck`", logs=damaged)
    return True


class RootSealer:
    """Seals for one process; its writing thread calls `turn` and `end`."""

    def __init__(self, engine: Engine, clock: Clock, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._engine = engine
        self._clock = clock
        self._interval_us = round(interval_seconds * MICROSECONDS)
        self._due_us = clock.now_us()
        self._sealed_us = self._due_us - _SOON_US
        self._hurry = False
        self._waiting: deque[threading.Event] = deque()
        self._problem = ""
        self._failing_since_us: int | None = None

    @property
    def due_seconds(self) -> float:
        """In how many seconds `turn` has something to do."""
        return 0.0 if self._waiting else max(0.0, (self._next_us() - self._clock.now_us()) / MICROSECONDS)

    def turn(self) -> None:
        """Seal if the oldest leaf has waited for the interval, or somebody waits for a seal; never raises."""
        now_us = self._clock.now_us()
        if not self._waiting and now_us < self._next_us():
            return
        waiting = self._taken()
        asked, self._hurry = bool(waiting or self._hurry), False
        wait_us = min(_AGAIN_US, self._interval_us)
        try:
            left_us = 0 if asked else self._left_us()
            if left_us > 0:
                wait_us = left_us
            elif seal_now(self._engine, wait=bool(waiting)):
                wait_us, self._sealed_us = self._interval_us, now_us
            self._tell("")
        except (SQLAlchemyError, LedgerError) as problem:
            self._tell(describe(problem))
        self._due_us = now_us + min(wait_us, self._interval_us)
        for each in waiting:
            each.set()

    def ask(self) -> threading.Event:
        """Request a seal of what is committed now; the event is set when it is done, or impossible."""
        done = threading.Event()
        self._waiting.append(done)
        return done

    def soon(self) -> None:
        """Request a seal without waiting: the next is due a second after the last."""
        self._hurry = True

    def end(self, *, seal: bool) -> None:
        """Run the last turn and release everybody who waits."""
        if seal:
            self.ask()
            self.turn()
        self.give_up()

    def give_up(self) -> None:
        """Release everybody who waits, because nothing can be sealed now."""
        for each in self._taken():
            each.set()

    def _taken(self) -> list[threading.Event]:
        """Who waits by now; one thread takes, any may add."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _next_us(self) -> int:
        return min(self._due_us, self._sealed_us + _SOON_US) if self._hurry else self._due_us

    def _left_us(self) -> int:
        """Return how long the oldest waiting leaf may still wait; the interval if none waits."""
        if file_identity(self._engine) == GONE:
            raise StoreGoneError("the ledger's file is missing")
        with self._engine.connect() as connection:
            oldest_us = connection.exec_driver_sql(_OLDEST).scalar()
        if oldest_us is None:
            return self._interval_us
        return int(oldest_us) + self._interval_us - self._clock.utc_us()

    def _tell(self, problem: str) -> None:
        """Say once what lasts; a passing failure is in the age of what waits, and an outage the writer's to tell."""
        if not problem:
            self._problem, self._failing_since_us = "", None
            return
        now_us = self._clock.now_us()
        if self._failing_since_us is None:
            self._failing_since_us = now_us
        lasts = now_us - self._failing_since_us >= OVERDUE_INTERVALS * self._interval_us
        if lasts and problem != self._problem:
            _log.warning("leaves have no checkpoint yet", reason=problem)
            self._problem = problem


_OLDEST = "SELECT min(grown_us) FROM unsealed_heads"
_UNSEALED = """
SELECT count(*), sum(l.size - coalesce((SELECT max(r.size) FROM root_leaves AS r WHERE r.log = l.id), 0)), min(u.first)
FROM (SELECT log, min(grown_us) AS first FROM unsealed_heads GROUP BY log) AS u JOIN logs AS l ON l.id = u.log
"""
_GROWN = """
SELECT l.id, l.name, l.size, l.frontier, u.newest_us
FROM (
    SELECT log, max(newest_us) AS newest_us FROM unsealed_heads GROUP BY log ORDER BY min(grown_us), log LIMIT ?
) AS u JOIN logs AS l ON l.id = u.log
"""
_STORE = """
WITH leaves AS (
    INSERT INTO root_leaves (idx, log, size, root, salt)
    SELECT * FROM unnest(%b::bigint[], %b::int[], %b::bigint[], %b::bytea[], %b::bytea[])
), nodes AS (
    INSERT INTO tree_nodes (log, level, idx, hash)
    SELECT * FROM unnest(%b::int[], %b::int[], %b::bigint[], %b::bytea[])
), head AS (
    INSERT INTO checkpoints (size, root, at_us) VALUES (%s, %s, %s)
), sealed AS (
    DELETE FROM unsealed_heads AS u USING unnest(%b::int[], %b::bigint[]) AS s (log, size)
    WHERE u.log = s.log AND u.size <= s.size
)
UPDATE root_log SET frontier = %s WHERE id = 1
"""
_CHECKPOINT = "INSERT INTO checkpoints (size, root, at_us) VALUES (?, ?, ?)"
_SEALED = "DELETE FROM unsealed_heads WHERE log = ? AND size <= ?"
_ROOT = "UPDATE root_log SET frontier = ? WHERE id = 1"


def _lock_root(connection: Connection, wait: bool) -> bytes | None:
    """Return the root log's frontier with its row locked until the transaction ends; None if another process has it."""
    query = "SELECT frontier FROM root_log WHERE id = 1"
    alone = dialect_of(connection).one_writer
    if not alone:
        query += " FOR UPDATE" if wait else " FOR UPDATE SKIP LOCKED"
    row = connection.exec_driver_sql(query).first()
    if row is None and (wait or alone):
        raise TreeError("the ledger lost its root log")
    return None if row is None else bytes(row[0])


def _seal(connection: Connection, before: Frontier) -> tuple[int, list[str]]:
    """Append what grew and its checkpoint to the locked root log: how many logs, and those that are damaged."""
    heads: dict[str, TreeHead] = {}
    ids: dict[str, int] = {}
    damaged: list[str] = []
    times: list[int] = []
    for log, name, size, stored, newest_us in fetch_all(connection, _GROWN, (_LOGS_AT_ONCE,)):
        try:
            heads[name] = load_frontier(log, size, stored).head()
        except TreeError:
            damaged.append(name)
            continue
        ids[name] = log
        times.append(newest_us)
    if not heads:
        return 0, damaged
    openings = seal(heads)
    after, grown = before.extend(leaf_hashes(opening.commitment() for opening in openings), halves=True)
    root = after.root()
    leaves = [
        (idx, ids[opening.name], opening.head.size, opening.head.root, opening.salt)
        for idx, opening in enumerate(openings, before.size)
    ]
    _store(connection, leaves, placed_nodes(ROOT, grown), (after.size, root, max(times)), after.to_bytes(root))
    return len(heads), damaged


def _store(
    connection: Connection,
    leaves: Sequence[tuple[int, int, int, bytes, bytes]],
    nodes: Sequence[tuple[int, int, int, bytes]],
    checkpoint: tuple[int, bytes, int],
    frontier: bytes,
) -> None:
    """Root leaves, nodes, checkpoint and the root log's frontier; what they cover is not unsealed any more."""
    if dialect_of(connection).arrays:
        columns: list[Any] = [list(column) for column in zip(*leaves, strict=True)]
        upper = [list(column) for column in zip(*nodes, strict=True)] or [[]] * 4
        connection.exec_driver_sql(_STORE, (*columns, *upper, *checkpoint, columns[1], columns[2], frontier))
        return
    insert_rows(connection, root_leaves, leaves)
    if nodes:
        insert_rows(connection, tree_nodes, nodes)
    connection.exec_driver_sql(_CHECKPOINT, checkpoint)
    connection.exec_driver_sql(_SEALED, [(log, size) for _, log, size, _, _ in leaves])
    connection.exec_driver_sql(_ROOT, (frontier,))
