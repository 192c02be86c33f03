"""The verdict on a service: every problem that keeps it from its work, by kind, each with a sentence.

    verdict.troubles()       # () where all is well; takes two seconds at most, whatever the database does
    verdict.is_ready()       # whether requests can be served

1. Every kind of trouble is found from what does the work: the last batch, the signer's last try, the threads, the
   clock. What is asked of the database is read by a thread of its own (`DatabaseProbe`).
2. A checkpoint waits for a signature from when this process first saw it unsigned, whoever signs. So a signer that is
   gone is seen after `signed_within_seconds`, and an idle ledger is none.
3. Of `NOT_READY` any one keeps requests away. The others are for people: requests are still served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple, Protocol

from sqlalchemy import Connection, func, select, text

from kvcustody.audit.store.database.engine import SCHEMA_REVISION, VERSION_TABLE, other_schema
from kvcustody.audit.store.schema.trees import checkpoints, signed_checkpoints
from kvcustody.audit.tlog.checkpoint_signer import SignerStatus
from kvcustody.audit.tlog.root_sealer import Unsealed, unsealed
from kvcustody.audit.write.event_writer import WriterStatus
from kvcustody.governance.service.health.database_probe import DatabaseProbe
from kvcustody.guarding_thread import not_guarding

PATIENCE_SECONDS = 1.5


class TroubleKind(StrEnum):
    """The kinds of problems."""

    DATABASE = "database"
    SCHEMA = "schema"
    LEDGER = "ledger"
    BATCHES = "batches"
    UNSEALED = "unsealed"
    SIGNER = "signer"
    CLOCK = "clock"
    THREAD = "thread"
    SINK = "sink"


NOT_READY = frozenset({TroubleKind.DATABASE, TroubleKind.SCHEMA, TroubleKind.THREAD})


class Trouble(NamedTuple):
    """One problem, in a sentence for an operator."""

    kind: TroubleKind
    text: str


class SeenOfLedger(NamedTuple):
    """The database's part: its revision, unsealed leaves, and the newest checkpoints, sealed and signed."""

    revision: str
    waiting: Unsealed
    sealed_size: int
    signed_size: int


class Observed(Protocol):
    """A service's parts, without a database."""

    def writer_status(self) -> WriterStatus:
        """The ledger's writer."""

    def batch_refusal(self) -> str:
        """Why the last batch of a worker was not committed; empty after a success."""

    def signer_status(self) -> SignerStatus | None:
        """The signer's last attempt; None where another process signs."""

    def clock_in_doubt(self) -> bool:
        """Whether the time is in doubt."""

    def sink_troubles(self) -> list[str]:
        """One sentence for each sink problem."""


def read_ledger(connection: Connection, now_us: int) -> SeenOfLedger:
    """Read the verdict's part of the database; `now_us` is UTC."""
    revision = connection.scalar(text(f"SELECT max(version_num) FROM {VERSION_TABLE}"))  # noqa: S608 - ours
    if revision != SCHEMA_REVISION:  # other tables may be there
        return SeenOfLedger(str(revision), Unsealed(0, 0, 0), 0, 0)
    sizes = [connection.scalar(select(func.max(table.c.size))) or 0 for table in (checkpoints, signed_checkpoints)]
    return SeenOfLedger(str(revision), unsealed(connection, now_us), *sizes)


class ServiceVerdict:
    """Finds problems; thread-safe. Its maker closes the probe."""

    def __init__(
        self,
        observed: Observed,
        probe: DatabaseProbe[SeenOfLedger],
        *,
        root_interval_seconds: float,
        signed_within_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds that only grow."""
        self._observed = observed
        self._probe = probe
        self._root_interval_seconds = root_interval_seconds
        self._signed_within_seconds = signed_within_seconds
        self._clock = clock
        self._unsigned: tuple[int, float] | None = None  # behind which signed size, and since when (rule 2)

    def troubles(self) -> tuple[Trouble, ...]:
        """Return every problem, those that stop requests first."""
        found = [*self._of_database(), *self._of_parts()]
        return tuple(sorted(found, key=lambda one: one.kind not in NOT_READY))

    def is_ready(self) -> bool:
        """Whether requests can be served (rule 3)."""
        admits = self._observed.writer_status().admitting
        return admits and not any(one.kind in NOT_READY for one in self.troubles())

    def database_answers(self) -> bool:
        """Whether the database answers now."""
        return self._probe.look(PATIENCE_SECONDS).value is not None

    def _of_database(self) -> Iterator[Trouble]:
        found = self._probe.look(PATIENCE_SECONDS)
        seen = found.value
        if seen is None:
            silent = f"no answer for {found.silent_seconds:.1f} s"
            yield Trouble(TroubleKind.DATABASE, f"the database: {found.away or silent}")
            return
        if seen.revision != SCHEMA_REVISION:
            yield Trouble(TroubleKind.SCHEMA, other_schema(seen.revision).message)
            return
        if seen.waiting.overdue(self._root_interval_seconds):
            seconds = seen.waiting.age_us // 1_000_000
            yield Trouble(TroubleKind.UNSEALED, f"{seen.waiting.leaves} leaves have not been sealed for {seconds} s")
        late_seconds = self._unsigned_seconds(seen)
        if late_seconds > self._signed_within_seconds:
            sizes = f"{seen.signed_size} of {seen.sealed_size} root leaves are signed"
            yield Trouble(TroubleKind.SIGNER, f"no checkpoint was signed for {late_seconds:.0f} s: {sizes}")

    def _unsigned_seconds(self, seen: SeenOfLedger) -> float:
        """How long a checkpoint has been seen to wait for a signature."""
        now = self._clock()
        if seen.sealed_size <= seen.signed_size:
            self._unsigned = None
            return 0.0
        if self._unsigned is None or self._unsigned[0] != seen.signed_size:
            self._unsigned = seen.signed_size, now
        return now - self._unsigned[1]

    def _of_parts(self) -> Iterator[Trouble]:
        status = self._observed.writer_status()
        if not (status.healthy and status.admitting):
            cause = status.cause or "the writer refuses new custody"
            yield Trouble(TroubleKind.LEDGER, f"the service's own events are not committed: {cause}")
        refusal = self._observed.batch_refusal()
        if refusal:
            yield Trouble(TroubleKind.BATCHES, f"the last batch of a worker was not committed: {refusal}")
        signer = self._observed.signer_status()
        if signer is not None and (signer.refused or signer.problem):
            yield Trouble(TroubleKind.SIGNER, f"nothing is signed: {signer.refused or signer.problem}")
        if self._observed.clock_in_doubt():
            yield Trouble(TroubleKind.CLOCK, "the clock is in doubt: it jumped, and nobody has confirmed it")
        for name in not_guarding():
            yield Trouble(TroubleKind.THREAD, f"the thread `{name}` has ended or keeps failing")
        for said in self._observed.sink_troubles():
            yield Trouble(TroubleKind.SINK, said)
