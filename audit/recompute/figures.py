"""The figures of a recount: counts of units a tenant and classification, and the lag from due to destroyed.

F1 Names and meanings are those of `audit.coverage.CoverageRow` and `Coverage`; the classes are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields


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
        return self.rows.setdefault((tenant, classification), Figures())

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
