"""Where a ledger writer's batches go: a database, or a control plane over its API.

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
    """One process of a worker, whose events a writer hands in."""

    worker: str
    incarnation: str
    offset_us: int


class NotAcknowledgedError(Exception):
    """A batch was not acknowledged; `cause` says why in a few words, without any value of it."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class SinkAwayError(NotAcknowledgedError):
    """Nothing is taken now. `error` is what a start fails with; `passing` where it may begin without the sink.

    `wait_seconds`: how long the sink asks to be left alone.
    """

    def __init__(self, cause: str, error: CustodyError, *, wait_seconds: float = 0.0, passing: bool = False) -> None:
        super().__init__(cause)
        self.error = error
        self.wait_seconds = wait_seconds
        self.passing = passing


class BatchRefusedError(NotAcknowledgedError):
    """This batch, or a part of it, cannot be written, however often it is tried; `kind` goes into the ledger."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind


class LedgerSink(Protocol):
    """Used by one thread at a time, but for `prepare`, which may run beside a `commit`, and `issuers`."""

    @property
    def directory(self) -> SubjectDirectory:
        """Who is behind a pseudonym."""

    @property
    def sealer(self) -> RootSealer | None:
        """What seals from here; None where somebody else does."""

    @property
    def batch_leaves(self) -> int:
        """The most leaves that a replay hands in at once, and the most events of a batch."""

    @property
    def keeps(self) -> bool:
        """A spill that was handed in is left to the sink, as `.kept`, instead of being deleted (rule 3)."""

    @property
    def early_seconds(self) -> float:
        """How soon after a try that failed another is made for who waits."""

    @property
    def wait_seconds_max(self) -> float:
        """The longest wait between tries that the writer comes to by itself."""

    def register(self, life: Life) -> None:
        """Put a process on record, and have its dead predecessors closed, whose spills were handed in."""

    def prepare(self, events: Sequence[Event], *, reachable: bool, spilled: bool) -> None:
        """Have the names of people that events need, as good as that can be done now."""

    def commit(self, names: Sequence[Row], batch: LeafBatch, *, again: bool = False) -> int:
        """Hand in leaves and the names that they need; how many leaves were new."""

    def replay(self, names: Sequence[Row], data: Sequence[bytes]) -> int:
        """Hand in a part of a spill, all of one process, perhaps not the first time; how many leaves were new."""

    def lost(self, cause: str) -> None:
        """From now on it counts as away."""

    def lost_leaves(self) -> str:
        """Why what it kept is to be handed in once more; empty where nothing of it is missing (rule 3)."""

    def rewind(self) -> None:
        """Make everything that it kept spill again, and forget which processes are on record."""

    def make_room(self) -> bool:
        """Return the disk is full: let go of something that it keeps; False where there is nothing."""

    def reopen(self) -> None:
        """Whether the sink is there again: before a replay, and where there is nothing to replay."""

    def issuers(self) -> Issuers:
        """Whose tenants the ledger names."""

    def close(self) -> None:
        """Let go of everything; may be called again."""
