"""A witness's memory: the keys it trusts for each log, and the newest head it signed.

1. A head moves forward only by compare-and-set, in one transaction that is on disk (SQLite, synchronous=FULL) before
   the signature leaves. So a witness never signs two histories, whatever crashes and concurrent requests occur.
2. The file is the witness's own and 0600. Restoring it from a backup would forget heads: it must not be backed up.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from kvcustody.audit.leaf.merkle import EMPTY_ROOT, TreeHead
from kvcustody.audit.tlog.signed_note import VerifierKey, parse_vkey
from kvcustody.errors import LedgerError

_TABLES = """
CREATE TABLE IF NOT EXISTS logs (origin TEXT NOT NULL, vkey TEXT NOT NULL, PRIMARY KEY (origin, vkey));
CREATE TABLE IF NOT EXISTS heads (origin TEXT PRIMARY KEY, size INTEGER NOT NULL, root BLOB NOT NULL);
"""


class WitnessError(LedgerError):
    """A witness cannot be set up or reached, or refuses to sign."""

    code = "KVC630"


class WitnessMemory:
    """The file of a witness. Every call opens it again, so that any thread may use it."""

    def __init__(self, path: Path, *, create: bool = False, timeout_seconds: float = 5.0) -> None:
        self._path = path
        self._timeout_seconds = timeout_seconds
        if create:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except OSError as problem:
                raise WitnessError(f"witness memory `{path}`: {problem.strerror}", path=path) from None
        elif not path.is_file():
            raise WitnessError(f"`{path}` is not there; run `kvcustody witness init` first", path=path)
        with closing(self._open()) as connection:
            connection.executescript(_TABLES)

    def trust(self, keys: Sequence[VerifierKey]) -> None:
        """Trust these keys, each for the log with its name."""
        with closing(self._open()) as connection:
            rows = [(key.name, str(key)) for key in keys]
            connection.executemany("INSERT OR IGNORE INTO logs VALUES (?, ?)", rows)

    def keys(self, origin: str) -> list[VerifierKey]:
        """Return the keys of a log; empty if the log is unknown."""
        with closing(self._open()) as connection:
            rows = connection.execute("SELECT vkey FROM logs WHERE origin = ? ORDER BY vkey", (origin,))
            return [parse_vkey(vkey) for (vkey,) in rows]

    def head(self, origin: str) -> TreeHead:
        """Return the newest signed head; the empty tree if there is none."""
        with closing(self._open()) as connection:
            row = connection.execute("SELECT size, root FROM heads WHERE origin = ?", (origin,)).fetchone()
        return TreeHead(0, EMPTY_ROOT) if row is None else TreeHead(row[0], row[1])

    def heads(self) -> dict[str, TreeHead]:
        """Return the newest head of every trusted log, in name order."""
        with closing(self._open()) as connection:
            names = [name for (name,) in connection.execute("SELECT DISTINCT origin FROM logs ORDER BY origin")]
        return {name: self.head(name) for name in names}

    def advance(self, origin: str, old: TreeHead, new: TreeHead) -> bool:
        """Replace the old head by the new one, durably; return False if it changed meanwhile (rule 1)."""
        with closing(self._open()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            row = connection.execute("SELECT size, root FROM heads WHERE origin = ?", (origin,)).fetchone()
            held = TreeHead(0, EMPTY_ROOT) if row is None else TreeHead(row[0], row[1])
            if held != old:
                connection.execute("ROLLBACK")
                return False
            connection.execute(
                "INSERT INTO heads VALUES (?, ?, ?) ON CONFLICT (origin) "
                "DO UPDATE SET size = excluded.size, root = excluded.root",
                (origin, *new),
            )
            connection.execute("COMMIT")
        return True

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=self._timeout_seconds, isolation_level=None)
        connection.execute("PRAGMA synchronous=FULL")
        return connection
