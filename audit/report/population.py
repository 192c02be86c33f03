"""The population: every custody that was due in the period, counted, digested, and drawn from by a seed.

1. The order is that of incarnation id, then (pool, generation); custodies that ended come before overdue ones.
2. The digest is SHA-256 over, for each incarnation that has any, its id in ASCII and a newline, and then seven
   big-endian 64-bit integers a custody: pool, generation, block, due (boot-time microseconds), verdict (its place in
   `VERDICTS`), 1 if covered, shards. Whoever has the leaves can compute it again (`recompute.recompute_digest` does).
3. Draw `i` takes custody number SHA-256(seed, ":", i) modulo the size of the population, unless it was drawn before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcustody.audit.coverage.block_uses import LEVELS
from kvcustody.audit.coverage.custody_units import UNKNOWN, LifeUnits
from kvcustody.audit.coverage.verdicts import VERDICTS as ENDED
from kvcustody.audit.events.block_runs import Int64s
from kvcustody.audit.query.evidence_columns import POOL_SHIFT

VERDICTS = (*ENDED, "overdue")
_OVERDUE = VERDICTS.index("overdue")
_GENERATION = (1 << POOL_SHIFT) - 1


class PopulationMember(NamedTuple):
    """One member of the population; `due_us` is UTC, `level` is empty where nothing is destroyed with evidence."""

    incarnation: str
    pool: int
    block: int
    generation: int
    shards: int
    tenant: str
    classification: str
    verdict: str
    covered: bool
    due_us: int
    cause: str
    level: str


class CustodyPopulation:
    """The custodies of a period, laid out in the order of rule 1."""

    def __init__(self, lives: Sequence[LifeUnits]) -> None:
        self.lives = [each for each in lives if len(each.units.keys) + len(each.overdue.keys)]
        self._ends = np.cumsum(
            [len(each.units.keys) + len(each.overdue.keys) for each in self.lives], dtype=np.int64
        )

    @property
    def custodies(self) -> int:
        """How many there are."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def units(self) -> int:
        """The same times shards: what coverage counts."""
        return sum(
            (len(each.units.keys) + len(each.overdue.keys)) * (each.life.shards or 1) for each in self.lives
        )

    def digest(self) -> str:
        """SHA-256 of the population (rule 2), hexadecimal."""
        made = hashlib.sha256()
        for each in self.lives:
            made.update(each.life.uuid.encode() + b"\n")
            made.update(_rows(each).tobytes())
        return made.hexdigest()

    def draw(self, seed: str, size: int) -> list[int]:
        """The numbers of a sample (rule 3), in the order drawn; the whole population where it is no larger."""
        return draw(seed, size, self.custodies)

    def custody(self, number: int) -> PopulationMember:
        """The custody of a number from 0 on."""
        which = int(np.searchsorted(self._ends, number, side="right"))
        each = self.lives[which]
        place = number - (int(self._ends[which - 1]) if which else 0)
        if place < len(each.units.keys):
            return _ended(each, place)
        return _overdue(each, place - len(each.units.keys))


def draw(seed: str, size: int, population: int) -> list[int]:
    """The numbers of a sample (rule 3) of a population, in the order drawn."""
    drawn: dict[int, None] = {}
    turn = 0
    while len(drawn) < min(size, population):
        picked = hashlib.sha256(f"{seed}:{turn}".encode()).digest()
        drawn.setdefault(int.from_bytes(picked, "big") % population)
        turn += 1
    return list(drawn)


def is_covered(each: LifeUnits) -> Int64s:
    """1 for each ended custody that is in time and not disputed."""
    covered: Int64s = ((each.units.verdict == 0) & ~each.units.disputed).astype(np.int64)
    return covered


def _rows(each: LifeUnits) -> Int64s:
    units, overdue = each.units, each.overdue
    keys = np.concatenate((units.keys, overdue.keys))
    late = np.full(len(overdue.keys), _OVERDUE)
    columns = (
        keys >> POOL_SHIFT,
        keys & _GENERATION,
        np.concatenate((units.blocks, overdue.blocks)),
        np.concatenate((units.due, overdue.due)),
        np.concatenate((units.verdict, late)),
        np.concatenate((is_covered(each), np.zeros(len(late), np.int64))),
        np.full(len(keys), each.life.shards or 1),
    )
    rows: Int64s = np.stack(columns, axis=1).astype(">i8")
    return rows


def _ended(each: LifeUnits, place: int) -> PopulationMember:
    units = each.units
    row = each.ends.row(int(units.row[place]))
    level = int(units.level[place])
    return PopulationMember(
        incarnation=each.life.uuid,
        pool=int(units.keys[place]) >> POOL_SHIFT,
        block=int(units.blocks[place]),
        generation=int(units.keys[place]) & _GENERATION,
        shards=each.life.shards or 1,
        tenant=row["tenant"],
        classification=row["classification"],
        verdict=VERDICTS[int(units.verdict[place])],
        covered=bool(units.verdict[place] == 0 and not units.disputed[place]),
        due_us=int(units.due[place]) + each.life.offset_us,
        cause=row["cause"],
        level=LEVELS[level] if level >= 0 else "",
    )


def _overdue(each: LifeUnits, place: int) -> PopulationMember:
    late = each.overdue
    tenant, classification = each.tenants.get(int(late.writer[place]), (UNKNOWN, UNKNOWN))
    return PopulationMember(
        incarnation=each.life.uuid,
        pool=int(late.keys[place]) >> POOL_SHIFT,
        block=int(late.blocks[place]),
        generation=int(late.keys[place]) & _GENERATION,
        shards=each.life.shards or 1,
        tenant=tenant,
        classification=classification,
        verdict="overdue",
        covered=False,
        due_us=int(late.due[place]) + each.life.offset_us,
        cause="no end on record",
        level="",
    )
