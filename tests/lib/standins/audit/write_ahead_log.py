"""Whether a reader keeps the write-ahead log of a SQLite ledger from beginning anew."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path


def is_held(path: Path, *, tries: int = 1) -> bool:
    """Whether a reader of an older state than the newest is there each time; readers that come and go need `tries`."""
    with closing(sqlite3.connect(path, timeout=30)) as writer:
        writer.execute("PRAGMA user_version = 7")  # something that is written
        writer.execute("PRAGMA busy_timeout = 0")
        for turn in range(tries):
            time.sleep(0.05 * (turn > 0))
            busy, _, _ = writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
            if not busy:
                return False
    return True
