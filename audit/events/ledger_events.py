"""Events by which the ledger accounts for itself: counters, spills, replays, gaps, withdrawals.

Events of engines that nobody governs, as an observer saw them.
"""

from __future__ import annotations

from typing import NamedTuple


class HitCounted(NamedTuple):
    """One own-scope hit or one denial (class C): added up by the writer, never a leaf of its own."""

    at_us: int
    tenant: str
    owner: str
    action: str
    effect: str
    rule: str
    revision: int
    blocks: int = 0
    tokens: int = 0
    requests: int = 1


class HitCounters(NamedTuple):
    """The class C events of one key over one interval, added up (class B once it exists)."""

    at_us: int
    tenant: str
    owner: str
    action: str
    effect: str
    rule: str
    revision: int
    from_us: int
    requests: int
    blocks: int
    tokens: int


class SpillStarted(NamedTuple):
    """The database was away or behind: events from `first_sequence` on went to the local spill (class B)."""

    at_us: int
    cause: str
    first_sequence: int


class ReplayCompleted(NamedTuple):
    """A spill was read back: leaves added, and leaves that the database already had (class B)."""

    at_us: int
    segments: int
    added: int
    duplicates: int
    torn_bytes: int


class GapRecorded(NamedTuple):
    """Events that could not be kept anywhere, by sequence (class B)."""

    at_us: int
    cause: str
    first_sequence: int
    last_sequence: int


class Withdrawn(NamedTuple):
    """A class A event was committed after its caller had been refused: its act did not happen (class B)."""

    at_us: int
    sequence: int
    tenant: str | None


class ObservationStarted(NamedTuple):
    """A process began to watch an engine that it does not govern (class B).

    Nothing that it records is enforced: observed blocks are in no residency, custody end or receipt, so they
    count in no coverage and no conservation. `digest` is of the policy that the deadlines come from.
    """

    at_us: int
    worker: str
    endpoint: str
    policy: str
    digest: str
    software: str


class ObservedStored(NamedTuple):
    """An engine's own stream said that blocks of one chain entered its cache (class B).

    `residency` is the observer's number for the chain; the first leaf of one opens it. `tenant` is None where
    nothing attributes it, else by `attribution`: salt or scope. `deadline_us`: when the policy's absolute limit
    is reached. Hashes are not recorded: an engine's are functions of token ids.
    """

    at_us: int
    engine: str
    tenant: str | None
    residency: int
    classification: str
    attribution: str
    blocks: int
    deadline_us: int


class ObservedRemoved(NamedTuple):
    """An engine's own stream said that blocks left its cache; nobody saw their memory overwritten (class B).

    `cause`: removed, cleared or engine-restarted. `late`: how many of these blocks left after the deadline.
    `remaining`: blocks of the residency that are still there.
    """

    at_us: int
    engine: str
    tenant: str | None
    residency: int
    cause: str
    blocks: int
    late: int
    remaining: int


class ObservedOverdue(NamedTuple):
    """A deadline passed and, by its own stream, the engine still holds the blocks (class B)."""

    at_us: int
    engine: str
    tenant: str | None
    residency: int
    classification: str
    blocks: int
    deadline_us: int


class ObservationGap(NamedTuple):
    """What an observer could not see, by the engine's own batch numbers: its counts are unsure from here on (class B).

    `cause` says which: batches that nobody can replay, payloads that cannot be read, blocks beyond what it tracks.
    """

    at_us: int
    engine: str
    cause: str
    first_batch: int
    last_batch: int
