"""Batches into the database: new names, leaves and projections in one transaction, the commit beside other work.

1. `write` returned means committed. When it raises, the commit may have arrived all the same, so the next transaction
   skips the names that are there.
2. A ledger file that was deleted or replaced under an open connection would swallow commits: `StoreGoneError`.
3. What runs during a transaction (`meanwhile`) sees neither success nor failure of it, and ends before `write` does.
4. Every so many commits a transaction of its own folds what the leaves added up to (`counters.fold`); that it fails
   changes no figure, and fails no write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from kvcustody.audit.counters.fold import FoldsBetweenCommits, fold_some
from kvcustody.audit.database.dialect import dialect_of
from kvcustody.audit.database.engine import (
    GONE,
    WRITE,
    WRITER_CACHE_KIB,
    StoreGoneError,
    check_store,
    file_identity,
)
from kvcustody.audit.events.batch import LeafBatch
from kvcustody.audit.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.subjects.subject_table import Row, store_names
from kvcustody.audit.tlog.merkle import TreeError
from kvcustody.audit.writer.append_leaves import Appender
from kvcustody.audit.writer.wal_checkpointer import WalCheckpointer

Call = Callable[[], None]


class Committer:
    """Owns the transactions of one writer."""

    def __init__(self, engine: Engine, directory: SubjectDirectory) -> None:
        check_store(engine)
        self._engine = engine
        self._directory = directory
        self._appender = Appender()
        self._identity = file_identity(engine)
        self._uncertain = False
        self._connection: Connection | None = None
        self._aside = _SideThread()
        self._wal = WalCheckpointer(engine)
        self._folds = FoldsBetweenCommits()

    def write(
        self,
        batch: LeafBatch,
        *,
        skip_known: bool = False,
        rest: Sequence[LeafBatch] = (),
        given: Sequence[Row] = (),
        meanwhile: Call | None = None,
    ) -> int:
        """Commit a batch, and return how many of its leaves were new; raises what the database raises.

        Those in `rest` are part of the same transaction (on SQLite alone, `Appender.append_all`), and so are the names
        in `given`, which may be there already.
        """
        names = self._directory.fresh()
        given = self._directory.kept(given, own=False) if given else given
        added: list[int] = []

        def act() -> None:
            added.append(self._transaction([batch, *rest], names, given, skip_known))

        try:
            if meanwhile is None:
                act()
            else:
                self._aside.run(act, meanwhile)
        except BaseException:
            if not added:  # else it is `meanwhile` that failed
                self._appender.forget()
                self._uncertain = True
            raise
        finally:
            if added:
                self._uncertain = False
                self._directory.settle(names)
        self._wal.committed(added[0])
        if self._folds.is_due():
            self._fold()
        return added[0]

    def _transaction(
        self,
        batches: Sequence[LeafBatch],
        names: list[Row],
        given: Sequence[Row],
        skip_known: bool,
    ) -> int:
        """One transaction from its begin to its commit; leaves that were new."""
        self.check_there()
        with self._begun() as connection:
            store_names(connection, names, skip_known=self._uncertain)
            store_names(connection, given, skip_known=True)
            if skip_known:
                return sum(
                    self._appender.append(connection, batch, skip_known=True).added for batch in batches
                )
            return self._appender.append_all(connection, batches)

    def _fold(self) -> None:
        """Fold figures (rule 4), on the connection of commits: another's would cost it its pages."""
        folded = 0
        with suppress(SQLAlchemyError), self._begun() as connection:
            folded = fold_some(connection)
        self._folds.turned(folded)

    def check_there(self) -> None:
        """Raise `StoreGoneError` where the file is another one, before a connection makes an empty one in its place."""
        if file_identity(self._engine) != self._identity:
            raise StoreGoneError("the ledger's file was removed or replaced")

    def write_names(self, rows: Sequence[Row], *, own: bool = False) -> None:
        """Commit names of a replay; those that are there already are skipped. `own`: as for `SubjectDirectory.kept`."""
        rows = self._directory.kept(rows, own=own) if rows else rows
        with self._begun() as connection:
            store_names(connection, rows, skip_known=True)

    @contextmanager
    def _begun(self) -> Iterator[Connection]:
        """A transaction on the connection that was used last, kept by this writer.

        SQLite drops a connection's pages when another one has committed; so commits that took turns on the pool's
        connections would each read the ends of every index again.
        """
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(**WRITE)
            dialect_of(self._connection).cache_of_writer(self._connection, WRITER_CACHE_KIB)
        try:
            with self._connection.begin():
                yield self._connection
        except BaseException:
            self._release_connection()
            raise

    def _release_connection(self) -> None:
        """Give the connection back, whatever state it is in."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.close()

    def reopen(self) -> None:
        """Accept the file that is there now; raises `LedgerError` where there is none, or none that fits."""
        self._release_connection()
        self._identity = file_identity(self._engine)
        if self._identity == GONE:
            raise StoreGoneError("the ledger's file is missing")
        check_store(self._engine)

    def close(self) -> None:
        """End the threads of commits; may be called again."""
        self._aside.close()
        self._wal.close()
        self._release_connection()


def refused(problem: Exception) -> bool:
    """True when the statement, not the database, is at fault."""
    if isinstance(problem, (StoreGoneError, TreeError)):
        return False
    return isinstance(problem, (IntegrityError, DataError)) or not isinstance(problem, DBAPIError)


class _SideThread:
    """A thread that runs one call while its owner does something else."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._problems: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Call, meanwhile: Call) -> None:
        """Run both and return when both have ended; raises what `meanwhile` raises, else what `call` does."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="kvcustody-commit", daemon=True)
            self._thread.start()
        self._calls.put(call)
        try:
            meanwhile()
        finally:
            problem = self._problems.get()
        if problem is not None:
            raise problem

    def close(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while call := self._calls.get():
            try:
                call()
            except BaseException as problem:  # handed to the owner, who decides
                self._problems.put(problem)
            else:
                self._problems.put(None)
