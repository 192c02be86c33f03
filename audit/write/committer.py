"""Commit batches to the database: new names, leaves and projections in one transaction.

1. `write` returned means committed. When it raises, the commit may still have succeeded, so the next transaction skips
   names that exist.
2. A ledger file that was deleted or replaced under an open connection would lose commits, so it raises
   `StoreGoneError`.
3. After `DELTAS_MAX` deltas of figures, a separate transaction folds them (`fold`), unless other code is responsible
   for it (`folds`). Its failure changes no figure, and fails no write.
4. A ledger writer uses it as a sink. Data that makes a statement fail is refused; a failure of the database raises
   `SinkAwayError`. The writer closes dead predecessors.
5. In a replay, only data that the database itself rejects as wrong is refused, because durable events are not given up
   for less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory, names_anybody
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import Row, store_names
from kvcustody.audit.kinds import Event
from kvcustody.audit.leaf.batch import LeafBatch, read_leaves
from kvcustody.audit.leaf.merkle import TreeError
from kvcustody.audit.store.database.dialect import GONE, dialect_of, file_identity
from kvcustody.audit.store.database.engine import (
    WRITE,
    WRITER_CACHE_KIB,
    StoreGoneError,
    check_store,
    describe,
    ledger_error,
)
from kvcustody.audit.store.database.open_changes import SchemaChangedError
from kvcustody.audit.store.database.sqlite_writers import WalCheckpointer
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.tlog.root_sealer import INTERVAL_SECONDS, RootSealer
from kvcustody.audit.write.append_leaves import Appender, FreeLeaves, register
from kvcustody.audit.write.crash_recovery import close_predecessors
from kvcustody.audit.write.fold import DELTAS_MAX, fold_some
from kvcustody.audit.write.sink import BatchRefusedError, Life, SinkAwayError
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError
from kvcustody.tenants import Issuers

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
        self._folds = folds
        self._unfolded = 0  # deltas of its own since the last turn; enough for one more where that was full

    def write_made(self, make: Callable[[Connection], LeafBatch | None]) -> bool:
        """Commit the batch that `make` returns inside the transaction; return False, without changes, if it returns
        none.
        """
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
        """Commit a batch and return how many of its leaves were new; raises the database's errors.

        The batches in `rest` are part of the same transaction. So are the new `names` of the directory, and those in
        `given`, which may exist already.
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
        """Commit the part of new batches that no other writer blocks (`Appender.append_free`), and the names.

        With the number of a `turn`: nothing, and None, while another transaction has it.
        """
        return self._written(
            (), given, lambda connection: self._appender.append_free(connection, batches, waits_for), turn
        )

    def _written(
        self,
        names: Sequence[Row],
        name_rows: Sequence[Row],
        append: Callable[[Connection], Done],
        turn: int | None = None,
    ) -> Done | None:
        """One transaction from its begin to its commit; None where another has the turn that it needs."""
        try:
            self.check_there()
            with self._begun() as connection:
                if turn is not None and not dialect_of(connection).alone(connection, turn):
                    return None
                if names:
                    store_names(connection, names, skip_known=self._uncertain)
                if name_rows:
                    store_names(connection, self._directory.kept(name_rows, own=False), skip_known=True)
                done = append(connection)
        except BaseException:
            self._appender.forget()
            self._uncertain = True
            raise
        self._uncertain = False
        self._wal.committed(done if isinstance(done, int) else sum(done.added))
        self._unfolded += self._appender.deltas
        if self._folds and self._unfolded >= DELTAS_MAX:
            self._fold()
        return done

    def _fold(self) -> None:
        """Fold figures (rule 3), on the connection of commits: another's would cost it its pages."""
        folded = 0
        with suppress(SQLAlchemyError, LedgerError), self._begun() as connection:
            folded = fold_some(connection)
        self._unfolded = DELTAS_MAX if folded >= DELTAS_MAX else 0

    def check_there(self) -> None:
        """Raise `StoreGoneError` if the file was replaced, before a connection creates an empty one."""
        if file_identity(self._engine) != self._identity:
            raise StoreGoneError("the ledger's file was deleted or replaced")

    def write_names(self, rows: Sequence[Row], *, own: bool = False) -> None:
        """Commit names of a replay, skipping existing ones. `own`: as for `SubjectDirectory.kept`."""
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
        """Accept the present file; raises `LedgerError` if there is none, or an unsuitable one."""
        self._release_connection()
        self._identity = file_identity(self._engine)
        if self._identity == GONE:
            raise StoreGoneError("the ledger's file is missing")
        check_store(self._engine)

    def close(self) -> None:
        """End the checkpoint thread; may be called again."""
        self._wal.close()
        self._release_connection()


def refused(problem: Exception) -> bool:
    """Return whether the statement, not the database, is at fault."""
    if isinstance(problem, (StoreGoneError, SchemaChangedError, TreeError)):
        return False
    return isinstance(problem, (IntegrityError, DataError)) or not isinstance(problem, DBAPIError)


_UNWRITABLE = (LedgerError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)


@contextmanager
def closing_committer(engine: Engine, clock: Clock) -> Iterator[Committer]:
    """Yield transactions of its own for a closing, for callers without any."""
    committer = Committer(engine, SubjectDirectory(clear_names=True), clock)
    try:
        yield committer
    finally:
        committer.close()


class DatabaseSink:
    """The sink of one writer."""

    batch_leaves, keeps = 5000, False
    early_seconds, wait_seconds_max = 0.0, 5.0  # it is near, and asking costs it little

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        subject_keys: SubjectKeys | None = None,
        *,
        clear_names: bool = False,
        root_interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        """`clear_names`: without `subject_keys`, subjects' names stand in the ledger; else no event may name one."""
        self.engine = engine
        self.subject_keys = subject_keys
        self.directory = SubjectDirectory(subject_keys, clear_names=clear_names)
        self._clock = clock
        self._committer = Committer(engine, self.directory, clock)
        self.sealer = RootSealer(engine, clock, root_interval_seconds)

    def register(self, life: Life) -> None:
        """Record a process, and close its dead predecessors."""
        with self._reaching():
            with self.engine.connect().execution_options(**WRITE) as connection, connection.begin():
                row = incarnations.c
                if connection.scalar(select(row.id).where(row.uuid == life.incarnation)) is None:
                    register(connection, life.incarnation, life.worker, life.offset_us, self._clock.utc_us())
            recorder = f"{life.worker}:closing"
            close_predecessors(self._committer, self.engine, self._clock, life.worker, life.incarnation, recorder)

    def prepare(self, events: Sequence[Event], *, reachable: bool, spilled: bool) -> None:
        """Read the pseudonyms of people named in events; unreadable ones are invented later."""
        if not reachable or not names_anybody(events):
            return
        with suppress(BatchRefusedError), self._writing():
            self._committer.check_there()
            with self.engine.connect() as connection:
                self.directory.prefetch(connection, events)

    def commit(self, names: Sequence[Row], batch: LeafBatch, *, again: bool = False) -> int:
        """Commit in one transaction."""
        try:
            with self._writing():
                return self._committer.write(batch, names, skip_known=again)
        except _UNWRITABLE as problem:
            raise BatchRefusedError(type(problem).__name__, describe(problem)) from problem

    def replay(self, names: Sequence[Row], data: Sequence[bytes]) -> int:
        """Write names first, then leaves, each once (rule 5)."""
        with self._reaching():
            try:
                batch = read_leaves(data)
                if names:
                    self._committer.write_names(names, own=True)
                return self._committer.write(batch, skip_known=True)
            except (IntegrityError, DataError, LookupError, TypeError, ValueError) as problem:
                raise BatchRefusedError(type(problem).__name__, describe(problem)) from problem

    def lost(self, cause: str) -> None:
        """Discard the pool's connections."""
        self.engine.dispose()

    def lost_leaves(self) -> str:
        """Return nothing: it keeps nothing."""
        return ""

    def rewind(self) -> None:
        """Do nothing: it keeps nothing."""

    def make_room(self) -> bool:
        """Return False: it keeps nothing."""
        return False

    def reopen(self) -> None:
        """Accept the present file, if it is suitable."""
        with self._reaching():
            self._committer.reopen()

    def issuers(self) -> Issuers:
        """Return the issuers of the ledger's tenants; on any thread."""
        try:
            self._committer.check_there()
            with self.engine.connect() as connection:
                return known_issuers(connection)
        except (SQLAlchemyError, StoreGoneError) as problem:
            raise self._away(problem) from problem

    def close(self) -> None:
        """Close the connection."""
        self._committer.close()

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Whatever fails, it is the database."""
        try:
            yield
        except (SQLAlchemyError, LedgerError) as problem:
            raise self._away(problem) from problem

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Rule 4."""
        try:
            yield
        except (SQLAlchemyError, StoreGoneError, SchemaChangedError, TreeError) as problem:
            if refused(problem):
                raise BatchRefusedError(type(problem).__name__, describe(problem)) from problem
            raise self._away(problem) from problem

    def _away(self, problem: SQLAlchemyError | LedgerError) -> SinkAwayError:
        error = ledger_error(self.engine, problem) if isinstance(problem, SQLAlchemyError) else problem
        return SinkAwayError(describe(problem), error)
