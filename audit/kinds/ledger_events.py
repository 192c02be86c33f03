"""Events about the ledger itself: counters, spills, replays, gaps, withdrawals.

Events of engines that nobody governs, as an observer saw them.
"""

from __future__ import annotations

from kvcustody.audit.kinds.event import (
    CountedEvent,
    EarlierSequence,
    MaybeServed,
    OwnerTenant,
    OwnWorker,
    ServedTenant,
    Words,
    WorkersLifecycleEvent,
)
from kvcustody.audit.kinds.row import INCARNATION, Kept, LeafFigures, RowColumn, in_table

OUTAGES = in_table(
    "outages", INCARNATION, RowColumn("kind", kept=Kept.TEXT), RowColumn("cause", "_cause", Kept.TEXT),
    *(RowColumn(name, f"_{name}", Kept.NUMBER) for name in
      ("first_sequence", "last_sequence", "added", "duplicates")), "at_us",
)  # fmt: skip


class HitCounted(CountedEvent, frozen=True, tag="hit-counted"):
    """One own-scope hit or one denial (class C): summed by the writer, never a leaf of its own."""

    tenant: str
    owner: str
    action: str
    effect: str
    rule: str
    revision: int
    blocks: int = 0
    tokens: int = 0
    requests: int = 1


class HitCounters(WorkersLifecycleEvent, frozen=True, tag="hit-counters"):
    """The sums of one key's class C events (class B then): from `from_us` to `at_us`, in one minute of UTC."""

    tenant: ServedTenant
    owner: OwnerTenant
    action: Words
    effect: Words
    rule: Words
    revision: int
    from_us: int
    requests: int
    blocks: int
    tokens: int

    row = in_table(
        "hit_counters", "tenant", "owner", "action", "effect", "rule", "revision", "from_us", "at_us", "requests",
        "blocks", "tokens", month="at_us",
    )  # fmt: skip
    figures = LeafFigures(by="effect")
    acting = "tenant"


class SpillStarted(WorkersLifecycleEvent, frozen=True, tag="spill-started"):
    """The database was away or behind: events from `first_sequence` on went to the local spill (class B)."""

    cause: Words
    first_sequence: int

    row = OUTAGES
    by_door = True


class ReplayCompleted(WorkersLifecycleEvent, frozen=True, tag="replay-completed"):
    """A spill was read back: leaves added, and leaves that the database already had (class B)."""

    segments: int
    added: int
    duplicates: int
    torn_bytes: int

    row = OUTAGES
    by_door = True


class GapRecorded(WorkersLifecycleEvent, frozen=True, tag="gap"):
    """Events that could not be stored anywhere, by sequence (class B)."""

    cause: Words
    first_sequence: EarlierSequence
    last_sequence: EarlierSequence

    row = OUTAGES
    by_door = True


class Withdrawn(WorkersLifecycleEvent, frozen=True, tag="withdrawn"):
    """A class A event was committed after its caller had been refused: its act did not happen (class B)."""

    sequence: EarlierSequence
    tenant: MaybeServed

    row = OUTAGES


class ObservationStarted(WorkersLifecycleEvent, frozen=True, tag="observation-started"):
    """A process began to watch an engine that it does not govern (class B).

    Nothing that it records is enforced: observed blocks are in no residency, custody end or receipt, so they
    count in no coverage and no conservation. `digest` is of the policy that the deadlines come from.
    """

    worker: OwnWorker
    endpoint: Words
    policy: Words
    digest: Words
    software: Words


class ObservedStored(WorkersLifecycleEvent, frozen=True, tag="observed-stored"):
    """An engine's own stream reported that blocks of one chain entered its cache (class B).

    `residency` is the observer's number for the chain; the first leaf of one opens it. `tenant` is None where
    nothing attributes it, else by `attribution`: salt or scope. `deadline_us`: when the policy's absolute limit
    is reached. Hashes are not recorded: an engine's are functions of token ids.
    """

    engine: Words
    tenant: MaybeServed
    residency: int
    classification: Words
    attribution: Words
    blocks: int
    deadline_us: int


class ObservedRemoved(WorkersLifecycleEvent, frozen=True, tag="observed-removed"):
    """An engine's own stream reported that blocks left its cache; nobody saw their memory overwritten (class B).

    `cause`: removed, cleared or engine-restarted. `late`: how many of these blocks left after the deadline.
    `remaining`: blocks of the residency that are still there.
    """

    engine: Words
    tenant: MaybeServed
    residency: int
    cause: Words
    blocks: int
    late: int
    remaining: int

    figures = LeafFigures(by="cause")


class ObservedOverdue(WorkersLifecycleEvent, frozen=True, tag="observed-overdue"):
    """A deadline passed although the engine, by its own stream, still holds the blocks (class B)."""

    engine: Words
    tenant: MaybeServed
    residency: int
    classification: Words
    blocks: int
    deadline_us: int


class ObservationGap(WorkersLifecycleEvent, frozen=True, tag="observation-gap"):
    """Events that an observer missed, by the engine's own batch numbers: its counts are uncertain from here on (class
    B).

    `cause` says which: batches that nobody can replay, payloads that cannot be read, blocks beyond what it tracks.
    """

    engine: Words
    cause: Words
    first_batch: int
    last_batch: int
