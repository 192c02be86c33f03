"""Open the ledger: engines for SQLite files and PostgreSQL, and their failures as one-line errors.

1. A SQLite ledger is WAL with synchronous=FULL; a PostgreSQL session has synchronous_commit on, whatever the default of
   its database or role is. A commit that returned survives a crash of the machine.
2. A writing transaction begins IMMEDIATE, so two writers queue up at its start and never fail in its middle.
3. Every wait is bounded: a locked or silent database becomes an error within the timeout, so the writer can spill. So
   is a reader's statement, by a longer one: no question keeps a server busy for good.
4. A PostgreSQL server that drops a session's options, as PgBouncer does, is refused at the first connection. Bounds,
   durability and the role are such options, and locks and prepared statements last as long as a session.
5. A ledger of another schema revision is refused, naming both, or what reads it.
"""

from __future__ import annotations

import secrets
import sqlite3
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Select, column, create_engine, event, inspect, select, table
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.util import LRUCache

from kvcustody.audit.store.database.database_place import PostgresServer, SqliteFile, database_place
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.sqlite_writers import begin_in_turns
from kvcustody.errors import LedgerError
from kvcustody.files import PRIVATE, claim_file, evidence_mode, take_back
from kvcustody.logger import get_logger

SCHEMA_REVISION = "0050"
FIRST_REVISION = "0041"  # older ledgers are of commits before any release
READS_OLDER = "commit f6818e1f"  # it upgrades them to the first revision
VERSION_TABLE = "kvcustody_schema"
STATEMENT_SECONDS = 300.0  # of a reader's statement, unless the opener says otherwise
WAL_PAGES_MAX = 8192  # 32 MiB of write-ahead log, at which a commit copies it into the file (`wal`)
WRITER_CACHE_KIB = 65_536  # what one large transaction changes stays in memory until its commit
COMPILED_KEPT = 1024  # statements of each kind of database that stay compiled
MAPPED_BYTES = 1 << 40  # SQLite maps as much of it as its build allows, 2 GiB as a rule
_MARK = "kvcustody.session"  # an option of a session that only ours has (rule 4)
_POOLER = (
    "a pooler is in front of PostgreSQL (such as PgBouncer) and drops the session's options; name the server itself in "
    "`database_url`"
)
_OPTIONS_REFUSED = "unsupported startup parameter"  # what PgBouncer says that is not told to drop them
WRITE = {"kvcustody_write": True}  # execution option of a writing transaction

_log = get_logger(__name__)

LOCKED = "it is locked by another writer"
_SQLITE_REASONS = {
    "SQLITE_FULL": "the disk is full",
    "SQLITE_IOERR": "the disk refused a read or write",
    "SQLITE_READONLY": "it is read-only",
    "SQLITE_BUSY": LOCKED,
    "SQLITE_LOCKED": LOCKED,
    "SQLITE_CANTOPEN": "it cannot be opened (missing directory or not a file)",
    "SQLITE_NOTADB": "it is not a SQLite database",
    "SQLITE_CORRUPT": "it is damaged",
    "SQLITE_PERM": "permission is denied",
}


def open_store(
    target: str | Path,
    *,
    read_only: bool = False,
    timeout_seconds: float = 1.0,
    mapped: bool = False,
    keys: bool = False,
    statement_seconds: float = STATEMENT_SECONDS,
) -> Engine:
    """Return an engine for a path or URL (`database_place`); it connects lazily.

    `mapped`: read a SQLite file through the memory map, a tenth faster where most of a ledger is read. A disk that
    fails then ends the process instead of the query: for a command that asks one question, never for a service.
    `keys`: it holds keys, so no setting lets anybody else read its file. `statement_seconds`: the longest that a
    statement of a reader may take on PostgreSQL (`as_long_as_it_takes` lifts it for a transaction).
    """
    place = database_place(target)
    if isinstance(place, PostgresServer):
        return _postgres(place, timeout_seconds, statement_seconds if read_only else None)
    return _sqlite(place, read_only, timeout_seconds, mapped, keys)


def _sqlite(place: SqliteFile, read_only: bool, timeout_seconds: float, mapped: bool, keys: bool) -> Engine:
    path, in_memory = place.path, place.in_memory
    engine = create_engine(
        place.engine_url("ro" if read_only else "rwc"),
        connect_args={"timeout": timeout_seconds, "check_same_thread": False, "cached_statements": 512},
    )
    engine.update_execution_options(compiled_cache=_sqlite_statements)

    @event.listens_for(engine, "do_connect")
    def _claimed(*_: object) -> None:
        if not read_only and not in_memory:
            with suppress(OSError):  # SQLite says better what is wrong with the place
                claim_file(path, _mode(keys))

    @event.listens_for(engine, "connect")
    def _connected(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        if not read_only:
            if not path.exists() or not path.stat().st_size:  # retention gives back what it frees
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            _close_to_others(path, _mode(keys))  # it is a database: the lines before would have failed
            connection.execute("PRAGMA secure_delete=ON")  # builds differ; a page that is split leaves copies too
            connection.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES_MAX}")
        connection.execute("PRAGMA cache_size=-16384")
        if mapped:
            connection.execute(f"PRAGMA mmap_size={MAPPED_BYTES}")

    begin_in_turns(engine, place, timeout_seconds, partial(_mode, keys))
    return engine


def _mode(keys: bool) -> int:
    return PRIVATE if keys else evidence_mode()


def _close_to_others(path: Path, mode: int) -> None:
    """A database is its user's alone, whatever the umask; one that was open to others is taken back, and it is said."""
    with suppress(OSError):
        if take_back(path, mode):
            _log.warning("a database file was accessible to other users; its mode was corrected", file=path.name)


def _postgres(place: PostgresServer, timeout_seconds: float, reading_seconds: float | None) -> Engine:
    milliseconds = max(1, int(timeout_seconds * 1000))
    url_options = place.url.query.get("options", "")  # such as `-c role=kvcustody_writer`
    mark = secrets.token_hex(8)
    options = f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds} -c synchronous_commit=on"
    if reading_seconds is not None:
        longest = max(1, int(reading_seconds * 1000))
        options = f"-c default_transaction_read_only=on -c statement_timeout={longest}"
    # Rows and their leaves are joined month by month, instead of each process's with all leaves that there are.
    options += f" -c enable_partitionwise_join=on -c {_MARK}={mark}"
    if url_options:
        options = " ".join((options, url_options if isinstance(url_options, str) else url_options[-1]))
    engine = create_engine(
        place.url,
        connect_args={
            "connect_timeout": max(2, int(timeout_seconds)),
            "options": options,
            "tcp_user_timeout": 2 * milliseconds,
            "keepalives_idle": 2,
            "keepalives_interval": 1,
            "keepalives_count": 3,
        },
        pool_pre_ping=False,
    )
    engine.update_execution_options(compiled_cache=_postgres_statements)

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        """Send integers as int8, however small: else a statement is another one, planned anew, for each size.

        A session without our mark came about without our options (rule 4).
        """
        from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper  # where there is PostgreSQL alone

        for dumper in (Int8Dumper, Int8BinaryDumper):
            connection.adapters.register_dumper(int, dumper)
        with connection.cursor() as cursor:
            arrived = cursor.execute(f"SELECT current_setting('{_MARK}', true)").fetchone()
        connection.rollback()
        if arrived != (mark,):
            raise engine.dialect.loaded_dbapi.OperationalError(_POOLER)

    return engine


class _CompiledStatements:
    """Statements as text, compiled once in a process, whichever engine of one kind of database asks first."""

    def __init__(self) -> None:
        self._kept: LRUCache[Any, Any] = LRUCache(COMPILED_KEPT)

    def get(self, key: tuple[Any, ...]) -> Any:
        return self._kept.get(key[1:])  # the rest: the dialect, which each engine has one of

    def __setitem__(self, key: tuple[Any, ...], statement: Any) -> None:
        self._kept[key[1:]] = statement


_sqlite_statements, _postgres_statements = _CompiledStatements(), _CompiledStatements()


def describe(problem: BaseException) -> str:
    """Return why the database failed, in a few words on one line and without statement values."""
    cause = getattr(problem, "orig", None) or problem
    name = str(getattr(cause, "sqlite_errorname", ""))
    for prefix, reason in _SQLITE_REASONS.items():
        if name.startswith(prefix):
            return reason
    if _OPTIONS_REFUSED in str(cause):
        return _POOLER
    lines = str(cause).strip().splitlines()
    return lines[0][:200] if lines else type(cause).__name__


def ledger_error(engine: Engine, problem: BaseException) -> LedgerError:
    """Return the one-line error for a failed database."""
    place = dialect_of(engine).place(engine)
    path = dialect_of(engine).file(engine)
    if path is not None and not path.exists():
        return LedgerError(
            f"no ledger here: `{place}` does not exist; name one with `--ledger`, or start with `kvcustody up`",
            place=place,
            reason="it does not exist",
        )
    reason = describe(problem)
    return LedgerError(f"ledger `{place}` cannot be used: {reason}", place=place, reason=reason)


def check_there(target: str | Path) -> None:
    """Refuse a place without a ledger's database, which opening for writing would create. Raises `LedgerError`."""
    engine = open_store(target, read_only=True)
    try:
        with engine.connect():
            pass
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    finally:
        engine.dispose()


def check_store(engine: Engine) -> None:
    """Refuse a ledger that cannot be read, has no schema, or has another revision's."""
    try:
        with engine.connect() as connection:
            known = inspect(connection).has_table(VERSION_TABLE)
            version: Select[str] = select(column("version_num")).select_from(table(VERSION_TABLE))
            versions = connection.scalars(version).all() if known else []
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    if not versions:
        raise LedgerError("the database holds no kvcustody schema; run `kvcustody db upgrade` first", found=None)
    if len(versions) > 1:
        raise LedgerError(
            f"the ledger names {len(versions)} schemas, and a migration writes one: somebody added a row to "
            f"`{VERSION_TABLE}`",
            found=versions,
        )
    if versions[0] != SCHEMA_REVISION:
        raise other_schema(versions[0])


def other_schema(revision: str) -> LedgerError:
    """Return the error for a ledger of another revision."""
    if revision < FIRST_REVISION:
        sentence = (
            f"the ledger's schema `{revision}` is older than `{FIRST_REVISION}`, the first that this program reads; "
            f"upgrade the ledger with {READS_OLDER} of kvcustody first"
        )
    else:
        is_newer = revision > SCHEMA_REVISION
        age = "newer" if is_newer else "older"
        advice = "use the version that upgraded it" if is_newer else "run `kvcustody db upgrade`"
        sentence = f"the ledger's schema `{revision}` is {age} than this program's `{SCHEMA_REVISION}`; {advice}"
    return LedgerError(sentence, found=revision, expected=SCHEMA_REVISION)


class StoreGoneError(LedgerError):
    """The file of an open ledger is not the file that was opened."""

    code = "KVC612"
