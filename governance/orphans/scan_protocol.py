"""What a scan needs of the scanned process, and of its ledger.

- The ledger is joined only when everything that happened has reached it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.governance.erasure.tier_protocol import HeldCopy
from kvcustody.governance.orphans.finding import RepairableFinding


class TierCopies(NamedTuple):
    """A tier's copies by its own books, and how to end copies by name."""

    tier: str
    copies: Sequence[HeldCopy]
    destroy: Callable[[Collection[bytes]], int]


class Held(NamedTuple):
    """One process's custody, for the join with the ledger: open residencies, and custody as (pool, generation).

    `live` is custody whose end is not on record yet: ACTIVE, CACHED, or waiting for a fence. `tiers`: of those whose
    copies have custody of their own.
    """

    residencies: frozenset[int]
    live: dict[int, NDArray[np.int64]]
    unlisted: int  # of `live`, what no leaf lists before its request ends
    tiers: tuple[TierCopies, ...] = ()


class LedgerJoin(Protocol):
    """The ledger's side of a scan."""

    def findings(self, held: Held, now_us: int) -> list[RepairableFinding]:
        """Return the disagreements of the ledger and this process, each with its repair."""


class PoolFindings(NamedTuple):
    """The disagreements of pools, with the numbers of holds, requests and blocks compared."""

    findings: list[RepairableFinding]
    residencies: int
    blocks: int


class Census(Protocol):
    """One process's books, read from states and tables. Nothing may change while it is used."""

    def findings(self, now_us: int) -> PoolFindings:
        """Return every disagreement with its repair."""

    def problems(self) -> list[str]:
        """Return every broken invariant in words."""

    def counts(self) -> PoolCounts:
        """Return the pools' own counters for conservation, after every event has gone to the ledger."""

    def held(self) -> Held:
        """Return the process's custody, for the join with the ledger."""

    def domains(self) -> Iterable[Domain]:
        """Return the domains that have blocks."""

    def generations(self, pool: int) -> NDArray[np.int64]:
        """Return the present generation of each block of one pool."""
