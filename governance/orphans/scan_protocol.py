"""What a scan asks of the process that it scans, and of its ledger.

- The ledger is joined only when everything that happened has reached it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.governance.erasure.tier_protocol import CopyStore, HeldCopy
from kvcustody.governance.orphans.finding import RepairableFinding
from kvcustody.governance.orphans.slices import Slices


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


class ScanSource(Protocol):
    """The books of one process: a Governor's, or an engine port's beside its engine's."""

    def findings(self, now_us: int) -> tuple[list[RepairableFinding], int]:
        """What its pools disagree about, and how many holds and requests were compared."""

    def tiers(self) -> Sequence[CopyStore]:
        """Its tiers off the device."""

    def held(self) -> Held:
        """What it has, from its states and tables alone."""

    def generations(self, pool: int) -> NDArray[np.int64]:
        """By block of one pool, its generation now."""

    def slices(self) -> list[Slices]:
        """An online scan of each pool."""
