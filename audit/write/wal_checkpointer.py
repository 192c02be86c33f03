"""Copies a SQLite ledger's write-ahead log into its file beside the writer, not in the middle of its commits.

1. Durability is the commit's alone: what is copied here was on disk before, and nothing is lost when it is not
   copied.
2. A copy takes no lock that a writer waits for. Where copying falls behind, SQLite's own limit
   (`store.WAL_PAGES_MAX`) makes a commit do it.
3. The log begins anew once all of it is copied and nobody reads it. Where readers follow one another without a pause
   that never comes, so from `WAL_BYTES_MAX` on writers wait, at most `_WAIT_SECONDS`, until those who read now are
   done: whoever begins meanwhile reads the file. So the log is bounded by that and by what is written while the longest
   reader reads.
"""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Engine

from kvcustody.audit.store.database.database_place import file_of
from kvcustody.audit.store.database.sqlite_write_queue import queue_at
from kvcustody.guarding_thread import GuardingThread

WAL_BYTES_MAX = 64 << 20  # twice what a commit copies at once (`store.WAL_PAGES_MAX`)
_LEAVES = 3000  # between copies: about 1,000 pages
_WAIT_SECONDS = 2.0  # as long as a reader's transaction may take


class WalCheckpointer:
    """One thread a writer, idle until enough was committed. For PostgreSQL there is nothing to do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._path = file_of(engine)
        self._leaves = 0
        self._wake = threading.Event()
        self._done = False
        self._thread: GuardingThread | None = None

    def committed(self, leaves: int) -> None:
        """So many leaves were committed: copy, when there is enough to copy."""
        self._leaves += leaves
        if self._leaves < _LEAVES or self._path is None:
            return
        self._leaves = 0
        if self._thread is None:
            self._thread = GuardingThread(self._run, name="kvcustody-wal")
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End the thread; may be called again."""
        if self._thread is not None:
            self._done = True
            self._wake.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        assert self._path is not None
        while self._wake.wait() and not self._done:
            self._wake.clear()
            try:
                self._checkpoint("PASSIVE")
                if _log_bytes(self._path) > WAL_BYTES_MAX:
                    self._begin_anew(self._path)
            except Exception:  # noqa: S110 - rule 1: whatever is wrong, the next commit meets it and deals with it
                pass

    def _begin_anew(self, path: Path) -> None:
        """Have the next commit begin the log anew (rule 3); this process's writers wait in their queue meanwhile."""
        turns = queue_at(path)
        if not turns.take(_WAIT_SECONDS):
            return
        try:
            self._checkpoint("RESTART")
        finally:
            turns.give()

    def _checkpoint(self, mode: str) -> None:
        connection = self._engine.raw_connection()
        try:
            cursor = connection.cursor()
            (before,) = cursor.execute("PRAGMA busy_timeout").fetchone()
            cursor.execute(f"PRAGMA busy_timeout={round(_WAIT_SECONDS * 1000)}")
            try:
                cursor.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            finally:  # the connection goes back to the pool
                cursor.execute(f"PRAGMA busy_timeout={before}")
        finally:
            connection.close()


def _log_bytes(path: Path) -> int:
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        return 0
