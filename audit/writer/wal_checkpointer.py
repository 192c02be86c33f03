"""Copies a SQLite ledger's write-ahead log into its file beside the writer, not in the middle of its commits.

1. Durability is the commit's alone: what is copied here was on disk before, and nothing is lost when it is not
   copied.
2. A copy takes no lock that a writer waits for. Where copying falls behind, SQLite's own limit
   (`store.WAL_PAGES_MAX`) makes a commit do it, so the log stays bounded.
"""

from __future__ import annotations

import threading

from sqlalchemy import Engine

from kvcustody.audit.database.dialect import dialect_of
from kvcustody.guarding_thread import GuardingThread

_LEAVES = 3000  # between copies: about 1,000 pages


class WalCheckpointer:
    """One thread a writer, idle until enough was committed. For PostgreSQL there is nothing to do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._leaves = 0
        self._wake = threading.Event()
        self._done = False
        self._thread: GuardingThread | None = None

    def committed(self, leaves: int) -> None:
        """So many leaves were committed: copy, when there is enough to copy."""
        self._leaves += leaves
        if self._leaves < _LEAVES or not dialect_of(self._engine).in_file:
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
        while self._wake.wait() and not self._done:
            self._wake.clear()
            try:
                connection = self._engine.raw_connection()
                try:
                    connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                finally:
                    connection.close()
            except Exception:  # noqa: S110 - rule 1: whatever is wrong, the next commit meets it and deals with it
                pass
