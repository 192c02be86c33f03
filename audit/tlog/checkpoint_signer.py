"""Sign the ledger's checkpoints after the commits: no commit waits for a signature.

1. Only the newest checkpoint is signed, at most once an interval; the older ones it covers are proved by consistency.
2. A signed checkpoint extends the one signed last. The last one is stored in a file beside the key as well as in the
   database. So a database that was cut, rewritten or restored from an old backup gets no signature; `status()` gives
   the reason. Signing resumes automatically when the lost tree comes back, and after a break that an operator recorded.
3. The file is fsynced before the note is in the database. A signer that dies between the two signs the same checkpoint
   again.
4. While a signer runs, its key cannot be handed over (`alone`), because it would keep signing with the old one.
5. A failure here stops nothing else. The leaves are committed, and signing is tried again at the next interval.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, Engine, insert
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from kvcustody.audit.leaf.merkle import EMPTY, TreeError, TreeHead
from kvcustody.audit.store.database.engine import WRITE, describe
from kvcustody.audit.store.schema.trees import signed_checkpoints
from kvcustody.audit.tlog.checkpoint import parse_checkpoint
from kvcustody.audit.tlog.database_proofs import LedgerProofs, SignedNote, StoredCheckpoint
from kvcustody.audit.tlog.proofs import ProofError, tree_root
from kvcustody.audit.tlog.root_log import root_checkpoint
from kvcustody.audit.tlog.root_sealer import seal_now
from kvcustody.audit.tlog.signed_note import NOTE_BYTES_MAX, NoteError, parse_note
from kvcustody.audit.tlog.signing_key import SigningKey, SigningKeyError, sign_successor
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError
from kvcustody.files import sync_path, write_file
from kvcustody.guarding_thread import GuardingThread


class SignerStatus(NamedTuple):
    """What is signed, and why nothing newer is: `refused` (the tree contradicts earlier signatures) or `problem`."""

    size: int
    at_us: int
    refused: str
    problem: str


class CheckpointSigner:
    """Signs one ledger's checkpoints with the keys of one log; `start` and `close` run it on a thread."""

    def __init__(
        self,
        engine: Engine,
        keys: Sequence[SigningKey],
        *,
        memory: Path,
        clock: Clock,
        interval_seconds: float = 1.0,
        on_signed: Callable[[SignedNote], None] | None = None,
    ) -> None:
        """`memory` is the file that remembers what was signed last (rule 2); `on_signed` is told of each new note."""
        self._engine = engine
        self._keys = tuple(keys)
        self._memory = memory
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._on_signed = on_signed
        self._status = SignerStatus(0, 0, "", "")
        self._stop = threading.Event()
        self._thread: GuardingThread | None = None

    def status(self) -> SignerStatus:
        """Return a snapshot for health and reports."""
        return self._status

    @property
    def at_work(self) -> bool:
        """Whether its thread signs once an interval."""
        return self._thread is not None

    def last_head(self) -> TreeHead:
        """Return the last signed head; the empty one if there is none."""
        return last_signed(self._memory) or EMPTY.head()

    def contradiction(self) -> str:
        """Return why signing stopped (rule 2): the committed tree does not extend what was signed; empty otherwise."""
        with self._engine.connect() as connection:
            try:
                self._successor(connection)
            except TreeError as problem:
                return problem.message
        return ""

    def begin_again(self, base: bytes | None) -> None:
        """Continue from this note, or from nothing; the old memory is kept as `.lost-SIZE`.

        For who has put the break on record (`log_break`).
        """
        with _locked(self._memory):
            lost = self._memory.read_bytes()
            write_file(self._memory.with_name(f"{self._memory.name}.lost-{_head_of(lost).size}"), lost)
            if base is None:
                self._memory.unlink()
                sync_path(self._memory.parent)
            else:
                _remember(self._memory, base)

    def sign_once(self) -> SignedNote | None:
        """Seal what is committed, and sign the newest checkpoint; None if it is already signed or there is none.

        What cannot be sealed from here is left to whoever can. Raises `ProofError` where the tree does not extend what
        was signed (rule 2), and what the database raises.
        """
        with suppress(SQLAlchemyError, LedgerError):
            seal_now(self._engine)
        return self._sign()

    def _sign(self) -> SignedNote | None:
        """Sign the newest checkpoint as it is."""
        with _locked(self._memory):
            with self._engine.connect() as connection:
                signed = self._successor(connection)
            if signed is None:
                return None
            _remember(self._memory, signed.note)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            _store(connection, signed)
        self._status = SignerStatus(signed.size, signed.at_us, "", "")
        if self._on_signed is not None:
            self._on_signed(signed)
        return signed

    def _successor(self, connection: Connection) -> SignedNote | None:
        proofs = LedgerProofs(connection)
        previous, stored = last_signed(self._memory), proofs.signed_or_none()
        try:
            newest = proofs.checkpoint()
        except ProofError:
            if previous is None and stored is None:
                return None
            newest = StoredCheckpoint(0, EMPTY.root(), 0)
        if previous is None and stored is not None:
            previous = _head_of(stored.note)
        before = previous or TreeHead(0, EMPTY.root())
        if stored is not None and stored.size == newest.size and before == newest.head:
            return None
        if newest.size < before.size:
            problem = (
                f"the ledger has `{newest.size}` root leaves, and `{before.size}` were signed: it was cut, or restored "
                "from a backup, or this key signs another ledger"
            )
            raise ProofError(problem, size=newest.size, signed=before.size)
        if not before.size and tree_root(proofs.tiles(None), newest.size) != newest.root:
            raise ProofError(f"the root log does not match the root of its checkpoint of `{newest.size}`")
        path = proofs.root_consistency(before.size, newest.size)
        moment_us = self._clock.utc_us()
        checkpoint = root_checkpoint(self._keys[0].name, newest.head)
        note = sign_successor(before, checkpoint, path, self._keys, at_seconds=moment_us // 1_000_000)
        return SignedNote(newest.size, note, moment_us)

    # -- the thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Sign once every interval from now on."""
        self._running = _running(self._memory, fcntl.LOCK_SH)
        self._thread = GuardingThread(self._run, name="kvcustody-signer")
        self._thread.start()

    def close(self) -> None:
        """Sign the newest checkpoint and stop; may be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._try()
            os.close(self._running)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Check that no signer of this memory is running, here or in another process; raises `SigningKeyError`."""
        try:
            descriptor = _running(self._memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SigningKeyError("a process signs with this key; stop it first", memory=self._memory) from None
        try:
            yield
        finally:
            os.close(descriptor)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._try()

    def _try(self) -> None:
        try:
            self._sign()
        except TreeError as problem:
            self._status = self._status._replace(refused=problem.message)
        except (SQLAlchemyError, NoteError, OSError) as problem:
            self._status = self._status._replace(problem=describe(problem))
        else:
            self._status = self._status._replace(refused="", problem="")


def last_signed(memory: Path) -> TreeHead | None:
    """Return the last signed head from the file; raises `NoteError` if the file is damaged."""
    try:
        data = memory.read_bytes()[: NOTE_BYTES_MAX + 1]
    except FileNotFoundError:
        return None
    return _head_of(data)


def _head_of(note: bytes) -> TreeHead:
    return parse_checkpoint(parse_note(note).text).head


def _store(connection: Connection, found: SignedNote) -> None:
    """Insert the note; another signer may have been as quick."""
    try:
        with connection.begin_nested():
            connection.execute(insert(signed_checkpoints).values(found._asdict()))
    except IntegrityError:
        pass


def _remember(memory: Path, note: bytes) -> None:
    """The file holds the old note or the new one, whole, whatever happens."""
    write_file(memory, note)


@contextmanager
def behind_handover(memory: Path) -> Iterator[None]:
    """Exclude handovers of this memory's keys meanwhile (`CheckpointSigner.alone`); waits for a current one."""
    descriptor = _running(memory, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(descriptor)


def _running(memory: Path, operation: int) -> int:
    """Return a lock on the memory that all running signers share."""
    path = memory.with_name(memory.name + ".running")
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(memory: Path) -> Iterator[None]:
    """One signer at a time for one memory, across processes."""
    descriptor = os.open(memory.with_name(memory.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
