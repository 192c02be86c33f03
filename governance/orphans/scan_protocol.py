"""What a scan asks of the process that it scans, and of its ledger.

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
    """What a tier has by its own books, and what ends copies of it by name."""

    tier: str
    copies: Sequence[HeldCopy]
    destroy: Callable[[Collection[bytes]], int]


class Held(NamedTuple):
    """What one process has, for the join with the ledger: open residencies, and custody as (pool, generation).

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
        """What the ledger and this process disagree about, each with its repair."""


class PoolFindings(NamedTuple):
    """What pools disagree about. Counts: the holds and requests that were compared, and the pools' blocks."""

    findings: list[RepairableFinding]
    residencies: int
    blocks: int


class Census(Protocol):
    """One process's books, read from states and tables alone. Nothing may move while it is used."""

    def findings(self, now_us: int) -> PoolFindings:
        """Every disagreement, with its repair."""

    def problems(self) -> list[str]:
        """Every invariant that does not hold, in words."""

    def counts(self) -> PoolCounts:
        """The pools' own counters for conservation, where everything that happened went to the ledger."""

    def held(self) -> Held:
        """What the process has, for the join with the ledger."""

    def domains(self) -> Iterable[Domain]:
        """Those that blocks are of."""

    def generations(self, pool: int) -> NDArray[np.int64]:
        """By block of one pool, its generation now."""
