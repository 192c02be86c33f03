"""A finding: custody that two sources disagree about, and its repair.

- A finding is a disagreement between two sources that are counted apart; a scan changes nothing until it is told to.
- Every finding is of one of the fifteen classes and has a repair; blocks that failed to verify are listed beside them.
  What cannot be explained is ended, never kept; what a fence holds is contained until the fence retires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvcustody.allocator.pool.block_state import Blocks

CLASSES = (
    "reference without sequence",
    "sequence without reference",
    "hold without residency",
    "residency without block",
    "stuck fence",
    "lost finish",
    "dead incarnation",
    "unreachable chain",
    "receipt without release",
    "ledger gap",
    "tier object without index",
    "index without tier object",
    "copy without custody",
    "custody without copy",
    "copy past its ceiling",
)
FAILED_VERIFICATION = "failed verification"
"""Listed beside the fifteen, as all that is QUARANTINED is: no two sources disagree about it, and nothing repairs it.

Its blocks did not become zero; they stay out of use until the pool is torn down.
"""
DRIFT = ("reference without sequence", "hold without residency", "lost finish", "ledger gap")
"""Classes whose blocks are in custody and accounted for by no request, chain or leaf."""

NONE: Blocks = np.empty(0, dtype=np.int64)


class Finding(NamedTuple):
    """One disagreement: its class (docs/how-to/audit/find-orphans.md explains each), its owner, and its blocks.

    `age_us`: for how long at least, where that is known. `action` and `outcome` are empty until it was repaired.
    """

    orphan: str
    tenant: str
    cause: str
    blocks: tuple[int, ...]
    age_us: int = 0
    residency: int = 0
    pool: int = 0
    action: str = ""
    outcome: str = ""


Repair = Callable[[], tuple[str, str]]
"""Returns what was done, and what came of it."""


class RepairableFinding(NamedTuple):
    """A finding with its repair."""

    finding: Finding
    repair: Repair

    def repaired(self) -> Finding:
        """Repair the finding; the returned one has the outcome."""
        action, outcome = self.repair()
        return self.finding._replace(action=action, outcome=outcome)


class FindingBuilder:
    """Makes the findings of one pool at one instant, with ages and plain block numbers."""

    def __init__(self, pool: int, now_us: int) -> None:
        self.pool = pool
        self.now_us = now_us

    def __call__(
        self,
        orphan: str,
        tenant: str,
        cause: str,
        blocks: Blocks,
        repair: Repair,
        *,
        since_us: int = 0,
        residency: int = 0,
    ) -> RepairableFinding:
        """`since_us`: since when at least, on the boot-time clock; 0 where that is not known."""
        assert orphan in CLASSES or orphan == FAILED_VERIFICATION, orphan
        age_us = max(0, self.now_us - since_us) if since_us else 0
        listed = tuple(blocks.tolist())
        return RepairableFinding(Finding(orphan, tenant, cause, listed, age_us, residency, self.pool), repair)


def repair_all(findings: Sequence[RepairableFinding]) -> tuple[Finding, ...]:
    """Repair findings one by one, each at most once."""
    return tuple(trouble.repaired() for trouble in findings)
