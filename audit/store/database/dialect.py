"""Differences between the ledger's two databases; no other file asks which of them it has.

Code asks for a capability (`one_writer`, `arrays`, `row_walls`) and not for a name: what it does then has its reason in
the word. What both do in words of their own is a method here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

import orjson
from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    Table,
    cast,
    func,
    literal,
    select,
)
from sqlalchemy.exc import DBAPIError

from kvcustody.audit.store.database.database_place import PostgresServer

_STEPS = 10_000  # of SQLite between two looks at the clock: about a millisecond
GONE = (0, 0)  # in place of a file's identity, where there is none
_NO_CHANGE = "LOCK TABLE schema_changes IN ACCESS SHARE MODE"  # before a snapshot, and takes none

Question = tuple[str, tuple[Any, ...]]  # a statement as text, written with `?`, and its values


class Dialect:
    """PostgreSQL: a server with roles, many writers and a protocol that takes whole columns at once."""

    name = "postgresql"
    in_file = False  # the ledger is one file, with its log beside it, and the reader may take rows from the driver
    one_writer = False  # whoever writes has locked the whole database already
    arrays = True  # values of a column go into a statement as one, and rows in by COPY
    partitions = True  # tables by months
    roles = True  # logins with rights of their own, walls between tenants' rows, and a log that the server keeps

    def with_placeholders(self, statement: str) -> str:
        """Return a statement written with `?` with the driver's own placeholders."""
        return statement.replace("?", "%s")

    def insert_new(self, table: Table) -> Any:
        """Return an INSERT that skips rows whose key exists."""
        from sqlalchemy.dialects.postgresql import insert  # its import costs a tenth of a short command

        return insert(table).on_conflict_do_nothing()

    def contains(self, column: ColumnElement[bytes], part: ColumnElement[bytes]) -> ColumnElement[bool]:
        """Return the condition that the column contains these bytes."""
        return func.pg_catalog.position(column, part) > 0

    def place(self, engine: Engine) -> str:
        """Return the database's place for people, without its password and session options."""
        return PostgresServer(engine.url.set(query={})).masked()

    def file(self, engine: Engine) -> Path | None:
        """Return the file that the engine opens; None for a server."""
        return None

    def one_snapshot(self, connection: Connection) -> None:
        """Read everything on a fresh connection from one moment, and keep tables in their form."""
        connection.execution_options(isolation_level="REPEATABLE READ")
        connection.exec_driver_sql(_NO_CHANGE)

    def begin_reading(self, connection: Connection) -> None:
        """Make the transaction that just began read-only and of one moment; tables keep their form in it."""
        connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; {_NO_CHANGE}")

    def as_long_as_it_takes(self, connection: Connection) -> None:
        """Disable time limits for this transaction's statements."""
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")

    def look_up_by_index(self, connection: Connection) -> None:
        """Make this transaction's joins use indexes, because the planner cannot know how few rows a range has."""
        for way in ("seqscan", "hashjoin", "mergejoin"):
            connection.exec_driver_sql(f"SET LOCAL enable_{way} = off")

    def sort_in_memory(self, connection: Connection) -> None:
        """Let each sort and hash of this transaction use memory up to this size before temporary files."""
        connection.exec_driver_sql("SET LOCAL work_mem = '64MB'")

    def wait_for_locks_at_most(self, connection: Connection, milliseconds: int) -> None:
        """Make the transaction fail if a lock takes longer."""
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {milliseconds}")

    def end_statements_after(self, connection: Connection, milliseconds: int) -> None:
        """End statements of this transaction that take longer, which fails the transaction."""
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {milliseconds}")

    @contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[Callable[[], None]]:
        """Bound a part of a transaction to so many seconds: the yielded check raises after that.

        A statement that is still running then is ended with an `OperationalError`; the call raises `TimeoutError`.
        """
        until = time.monotonic() + seconds

        def check() -> None:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            self.end_statements_after(connection, max(1, round(left * 1000)))

        check()
        yield check

    def one_at_a_time(self, connection: Connection, number: int) -> None:
        """Let one of all transactions with this number continue; the others wait for its end."""
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({number})")

    def alone(self, connection: Connection, number: int) -> bool:
        """Return whether this transaction may continue; does not wait for another with the same number."""
        return bool(connection.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({number})").scalar())

    def leads(self, connection: Connection, number: int) -> bool:
        """Return whether this connection leads among all with the number, as long as it lasts."""
        held = (
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"  # noqa: S608 - our own number
            f" AND classid = 1 AND objid = {number} AND objsubid = 2"
        )
        if connection.exec_driver_sql(held).first() is not None:
            return True
        return bool(connection.exec_driver_sql(f"SELECT pg_try_advisory_lock(1, {number})").scalar())

    def resign(self, connection: Connection, number: int) -> None:
        """Stop leading immediately; the server ends a closed connection some time later."""
        connection.exec_driver_sql(f"SELECT pg_advisory_unlock(1, {number})")

    def spans(self, connection: Connection, spans: Sequence[tuple[int, int, int]]) -> FromClause:
        """Return (log, first, below) as rows for a join that looks each up, however large the other table is."""
        self.look_up_by_index(connection)
        columns = [list(column) for column in zip(*spans, strict=True)] or [[], [], []]
        arrays = (cast(literal(column, ARRAY(BigInteger)), ARRAY(BigInteger)) for column in columns)
        return func.unnest(*arrays).table_valued("log", "first", "below").render_derived(name="span")

    def size_bytes(self, connection: Connection) -> int:
        """Return the disk usage of the ledger's tables, including indexes."""
        query = (
            "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class"
            " WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
        )
        return int(connection.exec_driver_sql(query).scalar() or 0)

    @contextmanager
    def any_text(self, connection: Connection) -> Iterator[None]:
        """Read text that is not UTF-8 too, with its bytes as lone surrogates; a server has none."""
        yield

    def cache_of_writer(self, connection: Connection, kibibytes: int) -> None:
        """Set the memory that a writer's connection uses; a server manages its own."""


class _Sqlite(Dialect):
    """SQLite: one file, one writer at a time, and nobody beside whoever may read it."""

    name = "sqlite"
    in_file = True
    one_writer = True
    arrays = False
    partitions = False
    roles = False

    def with_placeholders(self, statement: str) -> str:
        return statement

    def insert_new(self, table: Table) -> Any:
        from sqlalchemy.dialects.sqlite import insert

        return insert(table).on_conflict_do_nothing()

    def contains(self, column: ColumnElement[bytes], part: ColumnElement[bytes]) -> ColumnElement[bool]:
        return func.instr(column, part) > 0

    def place(self, engine: Engine) -> str:
        return str(self.file(engine))

    def file(self, engine: Engine) -> Path | None:
        return Path(unquote(str(engine.url.database).removeprefix("file:")))

    def one_snapshot(self, connection: Connection) -> None:
        """As every read transaction here is."""

    def begin_reading(self, connection: Connection) -> None:
        """As every read transaction here is; a reader's file is opened for reading."""

    def as_long_as_it_takes(self, connection: Connection) -> None:
        """As every statement here may."""

    def look_up_by_index(self, connection: Connection) -> None:
        """As every range here is."""

    def sort_in_memory(self, connection: Connection) -> None:
        """A file's reader sorts by indexes."""

    def wait_for_locks_at_most(self, connection: Connection, milliseconds: int) -> None:
        """A writer has locked everything when it begins."""

    def end_statements_after(self, connection: Connection, milliseconds: int) -> None:
        """As long as it takes: a writer is alone."""

    @contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[Callable[[], None]]:
        until = time.monotonic() + seconds

        def is_over() -> bool:
            return time.monotonic() >= until

        def check() -> None:
            if is_over():
                raise TimeoutError

        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(is_over, _STEPS)
        try:
            yield check
        finally:
            driver.set_progress_handler(None, 0)

    def one_at_a_time(self, connection: Connection, number: int) -> None:
        """As all writers do here."""

    def alone(self, connection: Connection, number: int) -> bool:
        """As every writer is here."""
        return True

    def leads(self, connection: Connection, number: int) -> bool:
        """Return true: a ledger in a file has one service."""
        return True

    def resign(self, connection: Connection, number: int) -> None:
        """Nobody waits to lead."""

    def spans(self, connection: Connection, spans: Sequence[tuple[int, int, int]]) -> FromClause:
        each = func.json_each(orjson.dumps(spans).decode()).table_valued("value", name="each")
        parts = (
            func.json_extract(each.c.value, f"$[{place}]").label(name)
            for place, name in enumerate(("log", "first", "below"))
        )
        return select(*parts).select_from(each).subquery("span")

    def size_bytes(self, connection: Connection) -> int:
        """Return the size of the file's pages."""
        pages, size = (
            int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0) for name in ("page_count", "page_size")
        )
        return pages * size

    @contextmanager
    def any_text(self, connection: Connection) -> Iterator[None]:
        driver: Any = connection.connection.cursor().connection
        driver.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        try:
            yield
        finally:
            driver.text_factory = str

    def cache_of_writer(self, connection: Connection, kibibytes: int) -> None:
        connection.connection.cursor().execute(f"PRAGMA cache_size=-{kibibytes}")


_BY_NAME: dict[str, Dialect] = {kind.name: kind() for kind in (Dialect, _Sqlite)}


def dialect_of(database: Engine | Connection) -> Dialect:
    """Return the capabilities of the database behind an engine or connection."""
    return _BY_NAME[database.dialect.name]


def file_of(engine: Engine) -> Path | None:
    """Return the file that a SQLite engine opens; None for a server."""
    return dialect_of(engine).file(engine)


def file_identity(engine: Engine) -> tuple[int, int]:
    """Return device and inode of a SQLite ledger's file (`GONE` without one); a constant for a server."""
    path = file_of(engine)
    if path is None:
        return (1, 1)
    try:
        found = path.stat()
    except OSError:
        return GONE
    return (found.st_dev, found.st_ino)


def fetch_all(connection: Connection, statement: str, values: tuple[Any, ...]) -> Sequence[Any]:
    """Return every row of a textual statement, written with `?`, for these values."""
    return connection.exec_driver_sql(dialect_of(connection).with_placeholders(statement), values).all()


def fetch_binary(connection: Connection, statement: str, values: tuple[Any, ...]) -> Sequence[tuple[Any, ...]]:
    """Return rows as plain tuples, for many leaves; PostgreSQL sends bytes in binary instead of as text."""
    if dialect_of(connection).in_file:
        return [tuple(row) for row in fetch_all(connection, statement, values)]
    if not connection.in_transaction():
        connection.begin()  # as a question through SQLAlchemy would
    driver: Any = connection.connection.driver_connection
    try:
        with driver.cursor(binary=True) as cursor:
            found: list[tuple[Any, ...]] = cursor.execute(
                dialect_of(connection).with_placeholders(statement), values
            ).fetchall()
            return found
    except connection.dialect.loaded_dbapi.Error as problem:
        raise_driver_error(connection, statement, problem)


def fetch_pipelined(connection: Connection, questions: Sequence[Question]) -> list[Sequence[Any]]:
    """Return `fetch_all`'s rows for each statement. PostgreSQL receives all statements at once: one wait instead of
    many.
    """
    if dialect_of(connection).in_file or len(questions) < 2:
        return [fetch_all(connection, *question) for question in questions]
    if not connection.in_transaction():
        connection.begin()  # as a question through SQLAlchemy would
    driver: Any = connection.connection.driver_connection
    try:
        with driver.pipeline():
            mark = dialect_of(connection).with_placeholders
            cursors = [driver.execute(mark(text), values) for text, values in questions]
            return [cursor.fetchall() for cursor in cursors]
    except connection.dialect.loaded_dbapi.Error as problem:
        raise_driver_error(connection, "; ".join(statement for statement, _ in questions), problem)


def raise_driver_error(connection: Connection, statement: str, problem: Exception) -> NoReturn:
    """Raise a driver's error as the error that SQLAlchemy raises for its own statements."""
    base = connection.dialect.loaded_dbapi.Error
    raise DBAPIError.instance(statement, None, problem, base, dialect=connection.dialect) from problem
