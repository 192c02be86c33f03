"""Events by which the ledger accounts for itself: counters, spills, replays, gaps, withdrawals."""

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
