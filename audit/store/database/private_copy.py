"""A snapshot of a ledger for long readers: a report, a full check, a record.

1. SQLite's write-ahead log cannot begin anew while somebody reads an older state. So whoever reads for longer than
   `WalCheckpointer` waits for reads a copy: the one read transaction of the ledger is that of copying, which takes as
   long as the file is large. Where that is over `COPY_SECONDS`, a warning says for how long the log could not begin
   anew. It is not copied in steps: SQLite begins a copy from its start where another has written between two steps.
2. The copy is its user's alone, in a folder of its own in the folder for temporary files (`TMPDIR`), and goes at the
   end.
3. Where it cannot be written, the ledger itself is read, and a warning says that its log grows meanwhile.
4. A server is read as it is: it keeps old rows beside new ones.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Engine

from kvcustody.audit.store.database.database_place import SqliteFile
from kvcustody.audit.store.database.dialect import file_of
from kvcustody.audit.store.database.engine import open_store
from kvcustody.files import PRIVATE, claim_file
from kvcustody.logger import get_logger

COPY_SECONDS = 2.0  # as long as a reader's transaction may take
_log = get_logger(__name__)


@contextmanager
def at_rest(engine: Engine) -> Iterator[Engine]:
    """Yield an engine that reads the ledger as of now, for any length of time, with the options of `engine`."""
    path = file_of(engine)
    if path is None or SqliteFile(path).in_memory:
        yield engine
        return
    with tempfile.TemporaryDirectory(prefix="kvcustody-", ignore_cleanup_errors=True) as folder:
        copy = _copied(engine, Path(folder) / path.name)
        if copy is None:
            yield engine
            return
        reader = open_store(copy, read_only=True, mapped=True)
        reader.update_execution_options(**engine.get_execution_options())
        try:
            yield reader
        finally:
            reader.dispose()


def _copied(engine: Engine, copy: Path) -> Path | None:
    """Where the copy is; None where it cannot be written (rule 3)."""
    source = engine.raw_connection()
    try:
        claim_file(copy, PRIVATE)
        with closing(sqlite3.connect(copy)) as target:
            target.execute("PRAGMA synchronous=OFF")  # it ends with this process
            assert isinstance(source.driver_connection, sqlite3.Connection)
            begun = time.monotonic()
            source.driver_connection.backup(target)
            seconds = time.monotonic() - begun
        if seconds > COPY_SECONDS:
            _log.warning(
                "copying the ledger exceeded the time limit for readers, and its write-ahead log grew meanwhile",
                seconds=round(seconds, 1),
                ledger_bytes=_bytes(file_of(engine)),
            )
    except (OSError, sqlite3.OperationalError) as problem:
        _log.warning(
            "the ledger is not copied, and its write-ahead log grows while this reads it; TMPDIR needs as much room",
            reason=str(problem),
            ledger_bytes=_bytes(file_of(engine)),
            free_bytes=shutil.disk_usage(copy.parent).free,
        )
        return None
    finally:
        source.close()
    return copy


def _bytes(path: Path | None) -> int:
    try:
        return 0 if path is None else path.stat().st_size
    except OSError:
        return 0
