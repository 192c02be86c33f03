"""A worker's ledger behind the control plane: a ledger writer whose sink is the control plane's API.

1. A batch is acknowledged when the control plane has committed it. It skips the leaves that it has.
2. A process is put on record under its key's worker; one that wrote a spill, and never came so far itself, before that
   spill's leaves. Registering closes the custody of dead predecessors there.
3. Once it is heard that a subject was unlinked, pseudonyms in memory that nobody is behind any more are forgotten
   before the next event is encoded: who comes back has another.
4. The control plane seals the names that it is handed; the spill here holds them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import structlog

from kvcustody.audit.events import Event
from kvcustody.audit.events.batch import LeafBatch
from kvcustody.audit.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.subjects.subject_table import Row
from kvcustody.audit.writer.event_writer import LedgerWriter, WriterSettings
from kvcustody.audit.writer.sink import BatchRefusedError, Life, SinkAwayError
from kvcustody.clock import Clock
from kvcustody.compression import ENCODING, compress
from kvcustody.errors import ConfigError, ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection, is_away
from kvcustody.governance.service.ingest.check_leaves import write_batch
from kvcustody.tenants import Issuers, issuers_of

_log = structlog.get_logger(__name__)
_MEDIA = "application/x-ndjson"
_MISREAD = frozenset({"refused-leaf", "malformed", "unsupported-media-type"})
_WAIT_SECONDS, _WAIT_SECONDS_MAX = 0.5, 30.0
_BATCH_LEAVES, _NAMES = 5000, 5000


class ControlPlaneSink:
    """Hands in one worker's batches."""

    batch_leaves, early_seconds = _BATCH_LEAVES, _WAIT_SECONDS

    def __init__(self, connection: ControlPlaneConnection, worker: str, clock: Clock) -> None:
        self.directory = SubjectDirectory(clear_names=True)  # rule 4
        self.wait_seconds_max = _WAIT_SECONDS_MAX
        self._connection = connection
        self._worker = worker
        self._clock = clock
        self._registered: set[str] = set()  # incarnations
        self._life: Life | None = None  # this process, once it is on record
        self._encoding = ""  # of batches' bodies: what the control plane said last that it takes
        self._unlinkings = self._forgotten = 0  # subjects unlinked: heard of, and dealt with (rule 3)

    def register(self, life: Life) -> Sequence[Event]:
        """Put this process on record; its dead predecessors' custody is closed by the control plane."""
        self._put_on_record(life.incarnation, life.offset_us, utc_us=self._clock.utc_us())
        self._life = life
        return ()

    def prepare(self, events: Sequence[Event], *, reachable: bool, spilled: bool) -> None:
        """Forget whom nobody is behind any more (rule 3), and have rows for those whom erasures are about.

        Names that are only in the spill are not known there yet: nothing is asked before they are.
        """
        if self._unlinkings != self._forgotten and reachable and not spilled:
            self._forget()
        self.directory.trim()
        self.directory.list_erased(events)

    def commit(self, names: Sequence[Row], batch: LeafBatch, *, again: bool = False) -> int:
        """One request."""
        return self._put(batch.incarnations[0], batch.sequences[0], names, batch.data)

    def replay(self, names: Sequence[Row], data: Sequence[bytes]) -> int:
        """One request, behind the registration of the process that wrote the leaves."""
        try:
            first = orjson.loads(data[0])
            incarnation, sequence = str(first["incarnation"]), int(first["sequence"])
            offset_us = int(first["at_us"]) - int(first["boot_us"])
        except (LookupError, TypeError, ValueError) as problem:
            raise BatchRefusedError(type(problem).__name__, "it cannot be read") from problem
        if incarnation not in self._registered:
            self._put_on_record(incarnation, offset_us)
        return self._put(incarnation, sequence, names, data)

    def lost(self, cause: str) -> None:
        """An operator may want to know."""
        _log.warning("control plane takes no batches", reason=cause)

    def reopen(self) -> None:
        """Ask for something that changes nothing, where this process is on record."""
        if self._life is not None:
            self.register(self._life)

    def issuers(self) -> Issuers:
        """Whose tenants the ledger names; on any thread."""
        assert self._life is not None  # a writer that is not on record is away
        return self._put_on_record(self._life.incarnation, self._life.offset_us, utc_us=self._clock.utc_us())

    def close(self) -> None:
        """The connection is its opener's."""

    def note_unlinkings(self, count: int) -> None:
        """How often the control plane says that subjects were unlinked; on any thread (rule 3)."""
        self._unlinkings = count

    def _put_on_record(self, incarnation: str, offset_us: int, **ours: int) -> Issuers:
        """Register a process; whose tenants the ledger names then."""
        with self._asking():
            answer = self._connection.put(
                f"/v1/worker/incarnations/{incarnation}", {"offset_us": offset_us, **ours}
            )
        if answer["worker"] != self._worker:
            wrong = ConfigError(
                f"worker_name `{self._worker}`: the control plane knows the key's holder as `{answer['worker']}`"
            )
            raise SinkAwayError(wrong.message, wrong)
        self._encoding = ENCODING if ENCODING in answer.get("encodings", ()) else ""
        self._registered.add(incarnation)
        return issuers_of(tuple(answer["issuers"]))

    def _put(self, incarnation: str, sequence: int, names: Sequence[Row], data: Sequence[bytes]) -> int:
        path = f"/v1/worker/incarnations/{incarnation}/batches/{sequence}"
        body = write_batch(names, data)
        with self._asking():
            stored = self._send(path, body)
        self.note_unlinkings(int(stored["unlinkings"]))
        return int(stored["added"])

    def _send(self, path: str, body: bytes) -> Any:
        """The batch as the control plane said that it takes it; one that is refused so is sent plain before that counts.

        An earlier release of the control plane that took a later one's place takes a frame for leaves, and refuses them.
        """
        if self._encoding:
            try:
                return self._connection.put_bytes(path, compress(body), _MEDIA, encoding=self._encoding)
            except ServiceError as error:
                if error.operands.get("problem") not in _MISREAD:
                    raise
        stored = self._connection.put_bytes(path, body, _MEDIA)
        self._encoding = ""
        return stored

    def _forget(self) -> None:
        """Ask which pseudonyms in memory nobody is behind any more, and forget them (rule 3)."""
        count, names = self._unlinkings, self.directory.durable()
        try:
            for start in range(0, len(names), _NAMES):
                some = {"names": names[start : start + _NAMES]}
                with self._asking():
                    gone: Any = self._connection.post("/v1/worker/pseudonyms:check", some)["gone"]
                self.directory.drop(gone)
        except SinkAwayError as away:
            if away.passing:
                raise
            _log.warning("pseudonyms cannot be checked", reason=away.cause)
            return
        self._forgotten = count

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A refused leaf is one; whatever else is answered, or not, the batch is to be tried again."""
        try:
            yield
        except ServiceError as error:
            if error.operands.get("problem") == "refused-leaf":
                raise BatchRefusedError("refused by the control plane", error.message) from error
            wait_seconds = float(error.operands.get("wait_seconds") or 0.0)
            raise SinkAwayError(
                error.message, error, wait_seconds=wait_seconds, passing=is_away(error)
            ) from error


class RemoteLedger(LedgerWriter):
    """A writer whose sink is a control plane."""

    def __init__(
        self,
        connection: ControlPlaneConnection,
        *,
        worker: str,
        clock: Clock,
        spill_directory: Path,
        settings: WriterSettings | None = None,
        may_be_away: bool = False,
    ) -> None:
        """Registers the incarnation; raises `ServiceError` where the control plane refuses or cannot be reached.

        `may_be_away`: where it cannot be reached, begin with the spill. `spill_directory` is this worker's alone.
        """
        self._plane = ControlPlaneSink(connection, worker, clock)
        super().__init__(
            self._plane,
            worker=worker,
            clock=clock,
            spill_directory=spill_directory,
            settings=settings,
            may_be_away=may_be_away,
        )

    def note_unlinkings(self, count: int) -> None:
        """How often the control plane says that subjects were unlinked; thread-safe."""
        self._plane.note_unlinkings(count)
