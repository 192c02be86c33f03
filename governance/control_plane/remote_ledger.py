"""A worker's ledger behind the control plane: a ledger writer whose sink is the control plane's API.

1. A batch is acknowledged when the control plane has committed it. The control plane skips leaves that it already has.
2. A process is recorded under its key's worker. A process that wrote a spill but was never recorded itself is recorded
   before that spill's leaves. Registering closes the custody of dead predecessors there.
3. After the news that a subject was unlinked, pseudonyms in memory that no longer stand for anybody are forgotten. This
   happens before the next event is encoded, so a subject that comes back gets another pseudonym.
4. The control plane seals the names that it is handed. The spill here holds them in clear.
5. Acknowledged batches stay in this worker's files (`kept_batches`) until the control plane has them under a signed
   checkpoint. If this worker trusts signing keys, one of them must have signed it. Leaves may turn out to be missing
   there, in a database that failed over, or was restored, to an earlier state. They are handed in again with everything
   else that was kept, and the ledger skips what it has. The last known number of signed root leaves is kept too. So the
   next process of this worker sees a ledger that went back while none was running.
6. The control plane writes the leaves that assign issuers and request erasures. They are requested by calls, erasures
   before any leaf about them is handed in (`own_erasures`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.evidence.subjects.subject_table import Row
from kvcustody.audit.kinds import ErasureRequested, Event, IssuerAssigned
from kvcustody.audit.leaf.batch import LeafBatch
from kvcustody.audit.tlog.checkpoint import open_checkpoint
from kvcustody.audit.tlog.signed_note import NoteError, VerifierKey
from kvcustody.audit.write.compression import ENCODING, compress
from kvcustody.audit.write.event_writer import ENGINE_DURABLE_SECONDS, LedgerWriter, WriterSettings
from kvcustody.audit.write.sink import BatchRefusedError, Life, SinkAwayError
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, LedgerUnavailable, ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection, is_away
from kvcustody.governance.control_plane.kept_batches import KeptBatches, KeptRun
from kvcustody.governance.control_plane.own_erasures import OwnErasures
from kvcustody.governance.service.ingest.check_leaves import KEPT_RUNS_MAX, write_batch
from kvcustody.governance.service.ingest.worker_protocol import PROTOCOL
from kvcustody.logger import get_logger
from kvcustody.tenants import Issuers, issuers_of

_log = get_logger(__name__)
_MEDIA = "application/x-ndjson"
_WAIT_SECONDS, _WAIT_SECONDS_MAX = 0.5, 30.0
_BATCH_LEAVES, _NAMES = 5000, 5000


class ControlPlaneSink:
    """Hands in one worker's batches."""

    batch_leaves, early_seconds = _BATCH_LEAVES, _WAIT_SECONDS
    sealer = None  # the control plane seals

    def __init__(
        self,
        connection: ControlPlaneConnection,
        worker: str,
        clock: Clock,
        kept: KeptBatches,
        own_erasures: OwnErasures,
        trusted: Sequence[VerifierKey] = (),
    ) -> None:
        self.directory = SubjectDirectory(clear_names=True)  # rule 4
        self.wait_seconds_max = _WAIT_SECONDS_MAX
        self._connection = connection
        self._worker = worker
        self._clock = clock
        self._registered: set[str] = set()  # incarnations
        self._life: Life | None = None  # this process, once it is on record
        self.kept = kept
        self.own_erasures = own_erasures
        self.keeps = True
        self._trusted = trusted
        self._lost = ""  # why everything that was kept is to be handed in again
        self._refused = ""
        self.unverified = ""  # why no checkpoint counts
        self._unlinkings = self._forgotten = 0  # subjects unlinked: heard of, and dealt with (rule 3)

    def register(self, life: Life) -> None:
        """Put this process on record; the control plane closes its dead predecessors' custody."""
        self._put_on_record(life.incarnation, life.offset_us, utc_us=self._clock.utc_us())
        self._life = life

    def prepare(self, events: Sequence[Event], *, reachable: bool, spilled: bool) -> None:
        """Forget pseudonyms that belong to nobody (rule 3), and add rows for the subjects of erasures.

        Names that are only in the spill are not known there yet: nothing is asked before they are.
        """
        self.own_erasures.keep()
        if self._unlinkings != self._forgotten and reachable and not spilled:
            self._forget()
        self.directory.trim()
        self.directory.list_erased(events)

    def commit(self, names: Sequence[Row], batch: LeafBatch, *, again: bool = False) -> int:
        """Send a batch in one request."""
        added = self._put(batch.incarnations[0], batch.sequences[0], names, batch.data)
        self.kept.keep(names, batch.data)
        return added

    def replay(self, names: Sequence[Row], data: Sequence[bytes]) -> int:
        """Send a batch in one request, after registering the process that wrote the leaves."""
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
        """Log the lost connection for the operator."""
        _log.warning("control plane takes no batches", reason=cause)

    def lost_leaves(self) -> str:
        """Return the leaves that the control plane lost (rule 5)."""
        return self._lost

    def rewind(self) -> None:
        """Turn everything kept back into spill; no process registers before its predecessors' leaves are in."""
        self.kept.rewind()
        self._registered.clear()
        self._life, self._lost = None, ""

    def make_room(self) -> bool:
        """The oldest of what is kept goes: the ledger has it, and new evidence is nowhere else."""
        return self.kept.make_room()

    def check_kept(self) -> None:
        """Ask what is covered by a signed checkpoint, and let go of it (rule 5); on any thread but the writer's."""
        life = self._life  # the writer's thread may take it back
        if self._lost or life is None:
            return
        self.own_erasures.hand_in(self._connection)
        segments = self.kept.closed()
        runs = [run for segment in segments for run in segment.runs]
        covered_runs: list[dict[str, Any]] = []
        for start in range(0, max(1, len(runs)), KEPT_RUNS_MAX):
            answer = self._ask_kept(life, runs[start : start + KEPT_RUNS_MAX])
            if answer is None:
                self._lost = "the ledger no longer knows this process"
                return
            covered_runs += answer["runs"]
            self._lost = self._lost or self._went_back(answer)
        if any(one["leaves"] < run.leaves for one, run in zip(covered_runs, runs, strict=True)):
            self._lost = self._lost or "the ledger lost acknowledged leaves"
        if self._lost or self.unverified:
            return
        told = iter(covered_runs)
        for segment in segments:
            covered = [bool(next(told)["covered"]) for _ in segment.runs]
            if all(covered):
                self.kept.drop(segment)

    def _ask_kept(self, life: Life, runs: Sequence[KeptRun]) -> dict[str, Any] | None:
        """What became of these; None where this process is not on record there."""
        path = f"/v1/worker/incarnations/{life.incarnation}/kept"
        try:
            answer: dict[str, Any] = self._connection.put(path, {"runs": [run._asdict() for run in runs]})
        except ServiceError as error:
            if error.operands.get("problem") != "not-found":
                raise
            return None
        return answer

    def _went_back(self, answer: dict[str, Any]) -> str:
        """Why the ledger is an earlier one than was seen, by what it has signed; empty where it is not."""
        refused, before = str(answer["refused"]), self._refused
        self._refused, self.unverified = refused, ""
        if answer["note"] is not None and self._trusted:
            try:
                open_checkpoint(str(answer["note"]).encode(), self._trusted)
            except NoteError as problem:
                self.unverified = problem.message
                _log.warning("no trusted key signed a checkpoint; the worker keeps all batches", reason=problem.message)
                return ""
        size = int(answer["size"])
        seen = self.kept.pin_signed(size)
        if size < seen:
            return f"the ledger has `{size}` signed root leaves, and had `{seen}`"
        return f"the ledger contradicts what was signed: {refused}" if refused and not before else ""

    def reopen(self) -> None:
        """Ask for something that changes nothing, where this process is on record."""
        if self._life is not None:
            self.register(self._life)

    def issuers(self) -> Issuers:
        """Whose tenants the ledger names; on any thread. An engine's thread waits, so it takes 2 seconds at most."""
        life = self._life
        assert life is not None  # a writer that is not on record is away
        bound = ENGINE_DURABLE_SECONDS
        return self._put_on_record(life.incarnation, life.offset_us, within_seconds=bound, utc_us=self._clock.utc_us())

    def assign_issuer(self, issuer: str, tenants: str) -> None:
        """Have an issuer put on record, as soon as `issuers`; on any thread."""
        with self._asking():
            self._connection.put(
                "/v1/worker/issuers",
                {"issuer": issuer, "tenants": tenants},
                within_seconds=ENGINE_DURABLE_SECONDS,
            )

    def close(self) -> None:
        """The connection is its opener's."""

    def note_unlinkings(self, count: int) -> None:
        """How often the control plane says that subjects were unlinked; on any thread (rule 3)."""
        self._unlinkings = count

    def _put_on_record(
        self, incarnation: str, offset_us: int, *, within_seconds: float | None = None, **ours: int
    ) -> Issuers:
        """Register a process; whose tenants the ledger names then."""
        with self._asking():
            answer = self._connection.put(
                f"/v1/worker/incarnations/{incarnation}",
                {"offset_us": offset_us, **ours},
                within_seconds=within_seconds,
            )
        protocol = answer.get("protocol", 1)
        if protocol < PROTOCOL:
            older = ConfigError(
                f"the control plane speaks worker protocol {protocol}, and this worker {PROTOCOL}: upgrade the control "
                "plane first"
            )
            raise SinkAwayError(older.message, older)
        if answer["worker"] != self._worker:
            wrong = ConfigError(
                f"worker_name `{self._worker}`: the control plane knows the key's holder as `{answer['worker']}`"
            )
            raise SinkAwayError(wrong.message, wrong)
        self._registered.add(incarnation)
        return issuers_of(tuple(answer["issuers"]))

    def _put(self, incarnation: str, sequence: int, names: Sequence[Row], data: Sequence[bytes]) -> int:
        path = f"/v1/worker/incarnations/{incarnation}/batches/{sequence}"
        body = write_batch(names, data)
        with self._asking():
            self.own_erasures.hand_in(self._connection)
            stored = self._connection.put_bytes(path, compress(body), _MEDIA, encoding=ENCODING)
        self.note_unlinkings(int(stored["unlinkings"]))
        return int(stored["added"])

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
            raise SinkAwayError(error.message, error, wait_seconds=wait_seconds, passing=is_away(error)) from error


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
        kept_bytes: int = 1 << 30,
        trusted: Sequence[VerifierKey] = (),
    ) -> None:
        """Registers the incarnation; raises `ServiceError` where the control plane refuses or cannot be reached.

        `may_be_away`: where it cannot be reached, begin with the spill. `spill_directory` is this worker's alone.
        `trusted`: keys of which one must have signed a checkpoint that counts as covering what is kept; none: any.
        """
        kept = KeptBatches(spill_directory, bytes_max=kept_bytes)
        own_erasures = OwnErasures(spill_directory / "erasures.json")
        self._plane = ControlPlaneSink(connection, worker, clock, kept, own_erasures, trusted)
        super().__init__(
            self._plane,
            worker=worker,
            clock=clock,
            spill_directory=spill_directory,
            settings=settings,
            may_be_away=may_be_away,
        )

    def submit(self, events: Sequence[Event]) -> int:
        """As for any writer; the control plane is asked to record requests of erasures (rule 6)."""
        asked = [event for event in events if isinstance(event, ErasureRequested)]
        if not asked:
            return super().submit(events)
        for event in asked:
            self._plane.own_erasures.add(event, self.offset_us)
        return super().submit([event for event in events if not isinstance(event, ErasureRequested)])

    def submit_durable(self, event: Event, *, timeout_seconds: float | None = None) -> int:
        """As for any writer; the control plane is asked to assign an issuer (rule 6)."""
        if not isinstance(event, IssuerAssigned):
            return super().submit_durable(event, timeout_seconds=timeout_seconds)
        try:
            if self.down:
                raise LedgerUnavailable(f"not done because it could not be recorded: {self.down}", cause=self.down)
            self._plane.assign_issuer(event.issuer, event.tenants)
        except SinkAwayError as away:
            raise LedgerUnavailable(
                f"not done because it could not be recorded: {away.cause}", cause=away.cause
            ) from away
        return self._intake.sequence

    def note_unlinkings(self, count: int) -> None:
        """How often the control plane says that subjects were unlinked; thread-safe."""
        self._plane.note_unlinkings(count)

    @property
    def kept(self) -> KeptBatches:
        """What is kept until it is signed."""
        return self._plane.kept

    @property
    def unverified(self) -> str:
        """Why no checkpoint counts as covering what is kept; empty where they do."""
        return self._plane.unverified

    def check_kept(self) -> None:
        """Let go of what is signed, and have what is lost handed in again; raises `ServiceError`."""
        self._plane.check_kept()
        if self._plane.lost_leaves():
            self._intake.wake.set()

    def close(self, timeout_seconds: float = 30.0) -> None:
        """As for any writer; what is kept stays for the successor."""
        try:
            super().close(timeout_seconds)
        finally:
            self._plane.kept.close()

    def _bytes_per_second(self) -> float:
        return super()._bytes_per_second() or self._plane.kept.bytes_per_second()
