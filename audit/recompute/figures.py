"""The figures of a recount: counts of units a tenant and classification, and the lag from due to destroyed.

F1 Names and meanings are those of `audit.coverage.CoverageRow` and `Coverage`; the classes are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple


class Judged(NamedTuple):
    """Custodies of consecutive generations that are alike: one verdict for each of `custodies` x `shards` units.

    `blocks[i]` has generation `generation + i`.

    `verdict` is in_time, late, failed, missing, unproven or overdue; times are the incarnation's boot-time
    microseconds; `lag` and `level` are None and "" where nothing is destroyed with evidence; `bytes` are of all shards.
    """

    incarnation: str
    pool: int
    generation: int
    blocks: Sequence[int]
    shards: int
    tenant: str
    classification: str
    verdict: str
    covered: bool
    due: int
    is_ended_in_time: bool
    is_disputed: bool
    lag: int | None
    level: str
    bytes: int
    fence: int

    @property
    def custodies(self) -> int:
        """How many custodies there are."""
        return len(self.blocks)


@dataclass(slots=True)
class Figures:
    """Counts of units (block, generation, shard) of one tenant's custody of one classification."""

    due: int = 0
    ended_in_time: int = 0
    covered: int = 0
    in_time: int = 0
    late: int = 0
    failed: int = 0
    missing: int = 0
    unproven: int = 0
    overdue: int = 0
    disputed: int = 0
    launched_bytes: int = 0
    retired_bytes: int = 0
    sampled_bytes: int = 0
    full_bytes: int = 0
    reread_blocks: int = 0
    fence_us_max: int = 0

    def count(self, judged: Judged) -> None:
        """Add the units of one verdict."""
        units = len(judged.blocks) * judged.shards
        self.due += units
        setattr(self, judged.verdict, getattr(self, judged.verdict) + units)
        self.ended_in_time += units * judged.is_ended_in_time
        self.covered += units * judged.covered
        self.disputed += units * judged.is_disputed
        if judged.fence > self.fence_us_max:
            self.fence_us_max = judged.fence
        if judged.level:
            name = f"{judged.level}_bytes"
            setattr(self, name, getattr(self, name) + judged.bytes * judged.custodies)
            self.reread_blocks += units * (judged.level == "full")

    def add(self, other: Figures) -> None:
        """Add another's counts; of fence times keep the longer."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            longest = each.name == "fence_us_max"
            setattr(self, each.name, max(mine, theirs) if longest else mine + theirs)


@dataclass(slots=True)
class Recount:
    """Figures by (tenant, classification), and lags with how many custodies had each."""

    rows: dict[tuple[str, str], Figures] = field(default_factory=dict)
    lags: dict[int, int] = field(default_factory=dict)
    leaves: int = 0
    as_of_us: int = 0

    def row(self, tenant: str, classification: str) -> Figures:
        """The figures of one tenant and classification, made on first use."""
        key = tenant, classification
        found = self.rows.get(key)
        if found is None:
            found = self.rows[key] = Figures()
        return found

    @property
    def total(self) -> Figures:
        """All rows added up."""
        total = Figures()
        for row in self.rows.values():
            total.add(row)
        return total

    def lag_us(self, percent: int) -> int:
        """The lag that `percent` % of destroyed custodies did not exceed (nearest rank); 0 where none was destroyed."""
        rank = -(-sum(self.lags.values()) * percent // 100)
        for lag in sorted(self.lags):
            rank -= self.lags[lag]
            if rank <= 0:
                return lag
        return 0
