"""A database as the sink of a ledger writer: a batch is a transaction, and dead predecessors are closed by the writer.

1. What the statement is at fault for is refused; whatever the database is, is `SinkAwayError`.
2. Of a replay only what the database itself calls wrong data is refused: what was durable is not given up for less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from sqlalchemy import Engine, select
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory, names_anybody
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import Row
from kvcustody.audit.kinds import Event
from kvcustody.audit.leaf.batch import LeafBatch, read_leaves
from kvcustody.audit.leaf.merkle import TreeError
from kvcustody.audit.store.database.engine import WRITE, StoreGoneError, describe, ledger_error
from kvcustody.audit.store.database.open_changes import SchemaChangedError
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.tlog.root_sealer import INTERVAL_SECONDS, RootSealer
from kvcustody.audit.write.append_leaves import register
from kvcustody.audit.write.committer import Committer, refused
from kvcustody.audit.write.crash_recovery import close_predecessors
from kvcustody.audit.write.sink import BatchRefusedError, Life, SinkAwayError
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError
from kvcustody.tenants import Issuers

_UNWRITABLE = (LedgerError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)


class DatabaseSink:
    """Owns the transactions of one writer."""

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
        """Put a process on record, and close its dead predecessors."""
        with self._reaching():
            with self.engine.connect().execution_options(**WRITE) as connection, connection.begin():
                row = incarnations.c
                if connection.scalar(select(row.id).where(row.uuid == life.incarnation)) is None:
                    register(connection, life.incarnation, life.worker, life.offset_us, self._clock.utc_us())
            recorder = f"{life.worker}:closing"
            close_predecessors(
                self._committer, self.engine, self._clock, life.worker, life.incarnation, recorder
            )

    def prepare(self, events: Sequence[Event], *, reachable: bool, spilled: bool) -> None:
        """Read the pseudonyms of people whom events name; what cannot be read is invented where it is needed."""
        if not reachable or not names_anybody(events):
            return
        with suppress(BatchRefusedError), self._writing():
            self._committer.check_there()
            with self.engine.connect() as connection:
                self.directory.prefetch(connection, events)

    def commit(self, names: Sequence[Row], batch: LeafBatch, *, again: bool = False) -> int:
        """One transaction."""
        try:
            with self._writing():
                return self._committer.write(batch, names, skip_known=again)
        except _UNWRITABLE as problem:
            raise BatchRefusedError(type(problem).__name__, describe(problem)) from problem

    def replay(self, names: Sequence[Row], data: Sequence[bytes]) -> int:
        """Names first, then leaves, each once (rule 2)."""
        with self._reaching():
            try:
                batch = read_leaves(data)
                if names:
                    self._committer.write_names(names, own=True)
                return self._committer.write(batch, skip_known=True)
            except (IntegrityError, DataError, LookupError, TypeError, ValueError) as problem:
                raise BatchRefusedError(type(problem).__name__, describe(problem)) from problem

    def lost(self, cause: str) -> None:
        """The pool's connections are not to be trusted."""
        self.engine.dispose()

    def lost_leaves(self) -> str:
        """It keeps nothing."""
        return ""

    def rewind(self) -> None:
        """It keeps nothing."""

    def make_room(self) -> bool:
        """It keeps nothing."""
        return False

    def reopen(self) -> None:
        """Accept the file that is there now, where it fits."""
        with self._reaching():
            self._committer.reopen()

    def issuers(self) -> Issuers:
        """Whose tenants the ledger names; on any thread."""
        try:
            self._committer.check_there()
            with self.engine.connect() as connection:
                return known_issuers(connection)
        except (SQLAlchemyError, StoreGoneError) as problem:
            raise self._away(problem) from problem

    def close(self) -> None:
        """Let go of the connection."""
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
        """Rule 1."""
        try:
            yield
        except (SQLAlchemyError, StoreGoneError, SchemaChangedError, TreeError) as problem:
            if refused(problem):
                raise BatchRefusedError(type(problem).__name__, describe(problem)) from problem
            raise self._away(problem) from problem

    def _away(self, problem: SQLAlchemyError | LedgerError) -> SinkAwayError:
        error = ledger_error(self.engine, problem) if isinstance(problem, SQLAlchemyError) else problem
        return SinkAwayError(describe(problem), error)
