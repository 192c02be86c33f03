"""The population: every custody that was due in the period, counted, digested, and drawn from by a seed.

1. The order is that of incarnation id, then (pool, generation); custodies that ended come before overdue ones.
2. Draw `i` takes custody number SHA-256(seed, ":", i) modulo the size of the population, unless it was drawn before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcustody.audit.coverage.block_uses import LEVELS
from kvcustody.audit.coverage.custody_units import UNKNOWN, LifeUnits
from kvcustody.audit.coverage.summary import population_digest
from kvcustody.audit.coverage.verdicts import VERDICTS as ENDED
from kvcustody.audit.query.evidence_columns import GENERATION_MASK, POOL_SHIFT

VERDICTS = (*ENDED, "overdue")


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
        """SHA-256 of the population, hexadecimal (`coverage.summary`)."""
        return population_digest(self.lives)

    def draw(self, seed: str, size: int) -> list[int]:
        """The numbers of a sample (rule 2), in the order drawn; the whole population where it is no larger."""
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
    """The numbers of a sample (rule 2) of a population, in the order drawn."""
    drawn: dict[int, None] = {}
    turn = 0
    while len(drawn) < min(size, population):
        picked = hashlib.sha256(f"{seed}:{turn}".encode()).digest()
        drawn.setdefault(int.from_bytes(picked, "big") % population)
        turn += 1
    return list(drawn)


def _ended(each: LifeUnits, place: int) -> PopulationMember:
    units = each.units
    row = each.ends.row(int(units.row[place]))
    level = int(units.level[place])
    return PopulationMember(
        incarnation=each.life.uuid,
        pool=int(units.keys[place]) >> POOL_SHIFT,
        block=int(units.blocks[place]),
        generation=int(units.keys[place]) & GENERATION_MASK,
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
        generation=int(late.keys[place]) & GENERATION_MASK,
        shards=each.life.shards or 1,
        tenant=tenant,
        classification=classification,
        verdict="overdue",
        covered=False,
        due_us=int(late.due[place]) + each.life.offset_us,
        cause="no end on record",
        level="",
    )
