"""Batches into the database: new names, leaves and projections in one transaction.

1. `write` returned means committed. When it raises, the commit may have arrived all the same, so the next transaction
   skips the names that are there.
2. A ledger file that was deleted or replaced under an open connection would swallow commits: `StoreGoneError`.
3. After so many deltas of figures a transaction of its own folds them (`counters.fold`), unless somebody else is
   there to do it; that it fails changes no figure, and fails no write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from kvcustody.audit.evidence.counters.fold import FoldsBetweenCommits, fold_some
from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.evidence.subjects.subject_table import Row, store_names
from kvcustody.audit.leaf.batch import LeafBatch
from kvcustody.audit.leaf.merkle import TreeError
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import (
    GONE,
    WRITE,
    WRITER_CACHE_KIB,
    StoreGoneError,
    check_store,
    file_identity,
)
from kvcustody.audit.store.database.open_changes import SchemaChangedError
from kvcustody.audit.write.append_leaves import Appender, FreeLeaves
from kvcustody.audit.write.wal_checkpointer import WalCheckpointer
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError

Done = TypeVar("Done", int, FreeLeaves)


class Committer:
    """Owns the transactions of one writer."""

    def __init__(
        self, engine: Engine, directory: SubjectDirectory, clock: Clock | None = None, *, folds: bool = True
    ) -> None:
        check_store(engine)
        self._engine = engine
        self._directory = directory
        self._appender = Appender(clock)
        self._identity = file_identity(engine)
        self._uncertain = False
        self._connection: Connection | None = None
        self._wal = WalCheckpointer(engine)
        self._folds = FoldsBetweenCommits() if folds else None

    def write_made(self, make: Callable[[Connection], LeafBatch | None]) -> bool:
        """Commit the batch that `make` gives inside the transaction; False where it gives none, and nothing changes."""
        self.check_there()
        try:
            with self._begun() as connection:
                batch = make(connection)
                added = 0 if batch is None else self._appender.append_all(connection, [batch])
        except BaseException:
            self._appender.forget()
            raise
        self._wal.committed(added)
        return batch is not None

    def write(
        self,
        batch: LeafBatch,
        names: Sequence[Row] = (),
        *,
        skip_known: bool = False,
        rest: Sequence[LeafBatch] = (),
        given: Sequence[Row] = (),
    ) -> int:
        """Commit a batch, and return how many of its leaves were new; raises what the database raises.

        Those in `rest` are part of the same transaction, and so are the new `names` of the directory, and those in
        `given`, which may be there already.
        """
        added = self._written(
            names,
            given,
            lambda connection: self._appender.append_all(connection, [batch, *rest], skip_known=skip_known),
        )
        assert added is not None  # it needs no turn
        return added

    def write_free(
        self,
        batches: Sequence[LeafBatch],
        waits_for: Collection[str],
        given: Sequence[Row] = (),
        *,
        turn: int | None = None,
    ) -> FreeLeaves | None:
        """Commit of new batches what no other writer keeps from it (`Appender.append_free`), and the names.

        With the number of a `turn`: nothing, and None, while another transaction has it.
        """
        return self._written(
            (), given, lambda connection: self._appender.append_free(connection, batches, waits_for), turn
        )

    def _written(
        self,
        names: Sequence[Row],
        given: Sequence[Row],
        append: Callable[[Connection], Done],
        turn: int | None = None,
    ) -> Done | None:
        """One transaction from its begin to its commit; None where another has the turn that it needs."""
        try:
            self.check_there()
            with self._begun() as connection:
                if turn is not None and not dialect_of(connection).alone(connection, turn):
                    return None
                given = self._directory.kept(given, own=False) if given else given
                store_names(connection, names, skip_known=self._uncertain)
                store_names(connection, given, skip_known=True)
                done = append(connection)
        except BaseException:
            self._appender.forget()
            self._uncertain = True
            raise
        self._uncertain = False
        self._wal.committed(done if isinstance(done, int) else sum(done.added))
        if self._folds is not None and self._folds.is_due(self._appender.deltas):
            self._fold(self._folds)
        return done

    def _fold(self, folds: FoldsBetweenCommits) -> None:
        """Fold figures (rule 3), on the connection of commits: another's would cost it its pages."""
        folded = 0
        with suppress(SQLAlchemyError, LedgerError), self._begun() as connection:
            folded = fold_some(connection)
        folds.turned(folded)

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
        """End the thread of checkpoints; may be called again."""
        self._wal.close()
        self._release_connection()


def refused(problem: Exception) -> bool:
    """True when the statement, not the database, is at fault."""
    if isinstance(problem, (StoreGoneError, SchemaChangedError, TreeError)):
        return False
    return isinstance(problem, (IntegrityError, DataError)) or not isinstance(problem, DBAPIError)
