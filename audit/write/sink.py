"""Destinations of a ledger writer's batches: a database, or a control plane over its API.

1. A call that returned was acknowledged: what it took is committed. When it raises, it may have arrived all the same,
   and is handed in again later; so a sink that is told `again`, and every replay, skips the leaves that are there.
2. A sink fails in two ways. `SinkAwayError`: the same batch may be taken later. `BatchRefusedError`: it never will be.
3. What was acknowledged, and how far, is the writer's to know. A sink that `keeps` has copies of what it took until it
   knows them safe; where they turn out to be lost there, `lost_leaves` says so, and `rewind` makes them spill again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.evidence.subjects.subject_table import Row
from kvcustody.audit.kinds import Event
from kvcustody.audit.leaf.batch import LeafBatch
from kvcustody.audit.tlog.root_sealer import RootSealer
from kvcustody.errors import CustodyError
from kvcustody.tenants import Issuers


class Life(NamedTuple):
    """One process of a worker, whose events a writer submits."""

    worker: str
    incarnation: str
    offset_us: int


class NotAcknowledgedError(Exception):
    """A batch was not acknowledged; `cause` says why in a few words, without any of its values."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class SinkAwayError(NotAcknowledgedError):
    """The sink accepts nothing now. `error` is for a failing start; `passing` if it may start without the sink.

    `wait_seconds`: how long the sink asks to be left alone.
    """

    def __init__(self, cause: str, error: CustodyError, *, wait_seconds: float = 0.0, passing: bool = False) -> None:
        super().__init__(cause)
        self.error = error
        self.wait_seconds = wait_seconds
        self.passing = passing


class BatchRefusedError(NotAcknowledgedError):
    """The batch, or a part of it, can never be written; `kind` goes into the ledger."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind


class LedgerSink(Protocol):
    """One thread uses it at a time, except `prepare`, which may run beside a `commit`, and `issuers`."""

    @property
    def directory(self) -> SubjectDirectory:
        """The people behind pseudonyms."""

    @property
    def sealer(self) -> RootSealer | None:
        """The sealer for this process; None if another process seals."""

    @property
    def batch_leaves(self) -> int:
        """The most leaves in one step of a replay, and the most events of a batch."""

    @property
    def keeps(self) -> bool:
        """Whether a submitted spill stays with the sink as `.kept` instead of being deleted (rule 3)."""

    @property
    def early_seconds(self) -> float:
        """How soon after a failed try another is made if somebody waits."""

    @property
    def wait_seconds_max(self) -> float:
        """The longest wait between tries that the writer chooses by itself."""

    def register(self, life: Life) -> None:
        """Record a process, and have its dead predecessors closed, whose spills were submitted."""

    def prepare(self, events: Sequence[Event], *, reachable: bool, spilled: bool) -> None:
        """Load the names of people that events need, as far as possible now."""

    def commit(self, names: Sequence[Row], batch: LeafBatch, *, again: bool = False) -> int:
        """Submit leaves and the names that they need; return how many leaves were new."""

    def replay(self, names: Sequence[Row], data: Sequence[bytes]) -> int:
        """Submit a part of a spill of one process, perhaps repeatedly; return how many leaves were new."""

    def lost(self, cause: str) -> None:
        """Treat the sink as unavailable from now on."""

    def lost_leaves(self) -> str:
        """Return why what it kept must be submitted again; empty if nothing is missing (rule 3)."""

    def rewind(self) -> None:
        """Make everything that it kept spill again, and forget which processes are registered."""

    def make_room(self) -> bool:
        """Free something that it keeps because the disk is full; return False if there is nothing."""

    def reopen(self) -> None:
        """Check that the sink is available again: before a replay, or if there is nothing to replay."""

    def issuers(self) -> Issuers:
        """Return the issuers of the ledger's tenants."""

    def close(self) -> None:
        """Release everything; may be called again."""
