"""The figures of a recount: units a tenant and classification, the lag from due to destroyed, and the digest of
the population (`audit.report.population`), all without any table.

1. Names and meanings are those of `audit.coverage.CoverageRow` and `Coverage`; the classes are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from recompute.columns import Flags, Groups, Numbers
from recompute.facts import LEVELS
from recompute.verdicts import VERDICTS


def recompute_digest(every: Iterable[Judged]) -> str:
    """SHA-256, hexadecimal: of each incarnation its id, then seven numbers a custody in the order of the population."""
    made = hashlib.sha256()
    for judged in sorted(every, key=lambda item: item.incarnation):
        if not len(judged.due):
            continue
        rows = np.empty((len(judged.due), 7), ">i8")
        columns = (judged.pool, judged.generation, judged.block, judged.due, judged.verdict, judged.covered)
        for place, column in enumerate((*columns, judged.shards)):
            rows[:, place] = column
        made.update(judged.incarnation.encode() + b"\n")
        made.update(rows.tobytes())
    return made.hexdigest()


class JudgedCustody(NamedTuple):
    """One custody with its verdict; `due` is boot time."""

    incarnation: str
    pool: int
    generation: int
    block: int
    shards: int
    tenant: str
    classification: str
    verdict: str
    covered: bool
    due: int


class Judged(NamedTuple):
    """The custodies of one incarnation, one row each: those that ended by pool and generation, then the overdue ones.

    Each counts for `shards` units. `verdict` is a place in `verdict.VERDICTS`, `tenant` and `classification` are places
    in `names`; times are boot-time microseconds; `lag` and `level` are -1 where nothing proves destruction; `size` is
    bytes of all shards.
    """

    incarnation: str
    names: Sequence[str]
    shards: int
    pool: Numbers
    generation: Numbers
    block: Numbers
    tenant: Numbers
    classification: Numbers
    verdict: Numbers
    covered: Flags
    due: Numbers
    ended_in_time: Flags
    disputed: Flags
    lag: Numbers
    level: Numbers
    size: Numbers
    fence: Numbers

    def custodies(self) -> Iterator[JudgedCustody]:
        """Every row by itself."""
        columns = (self.pool, self.generation, self.block, self.tenant, self.classification, self.verdict)
        rows = zip(*(column.tolist() for column in (*columns, self.covered, self.due)), strict=True)
        for pool, generation, block, tenant, classification, verdict, covered, due in rows:
            who = self.names[tenant], self.names[classification]
            yield JudgedCustody(
                *(self.incarnation, pool, generation, block, self.shards, *who),
                VERDICTS[verdict],
                covered,
                due,
            )


@dataclass(slots=True)
class CoverageFigures:
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

    def add(self, other: CoverageFigures) -> None:
        """Add another's counts; of fence times keep the longer."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            longest = each.name == "fence_us_max"
            setattr(self, each.name, max(mine, theirs) if longest else mine + theirs)


@dataclass(slots=True)
class Recount:
    """Figures by (tenant, classification), and lags with how many custodies had each."""

    rows: dict[tuple[str, str], CoverageFigures] = field(default_factory=dict)
    lags: dict[int, int] = field(default_factory=dict)
    leaves: int = 0
    as_of_us: int = 0

    def row(self, tenant: str, classification: str) -> CoverageFigures:
        """The figures of one tenant and classification, made on first use."""
        key = tenant, classification
        found = self.rows.get(key)
        if found is None:
            found = self.rows[key] = CoverageFigures()
        return found

    @property
    def total(self) -> CoverageFigures:
        """All rows added up."""
        total = CoverageFigures()
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


def count_up(every: Iterable[Judged]) -> Recount:
    """The figures of verdicts."""
    found = Recount()
    for judged in every:
        width = len(judged.names)
        who, of = np.unique(judged.tenant * width + judged.classification, return_inverse=True)
        groups = Groups(of, len(who))
        columns = {name: groups.total(column).tolist() for name, column in _units(judged).items()}
        columns["fence_us_max"] = groups.most(judged.fence).tolist()
        for number, code in enumerate(who.tolist()):
            row = found.row(judged.names[code // width], judged.names[code % width])
            row.add(CoverageFigures(**{name: column[number] for name, column in columns.items()}))
        lags, counts = np.unique(judged.lag[judged.lag >= 0], return_counts=True)
        for lag, count in zip(lags.tolist(), counts.tolist(), strict=True):
            found.lags[lag] = found.lags.get(lag, 0) + count
    return found


def _units(judged: Judged) -> dict[str, Numbers]:
    """What each custody adds to each figure, by the figure's name."""
    shards = judged.shards
    made = {name: (judged.verdict == place) * shards for place, name in enumerate(VERDICTS)}
    made["due"] = np.full(len(judged.due), shards)
    made["ended_in_time"] = judged.ended_in_time * shards
    made["covered"] = judged.covered * shards
    made["disputed"] = judged.disputed * shards
    for place, name in enumerate(LEVELS):
        made[f"{name}_bytes"] = np.where(judged.level == place, judged.size, 0)
    made["reread_blocks"] = (judged.level == LEVELS.index("full")) * shards
    return made
