"""The population: every custody due in the period, on the device and in tiers, counted and digested by stratum.

1. The order is that of incarnation id, then (pool, generation); custodies that ended come before overdue ones. Copies
   off the device come behind all of these: by incarnation id and tier, then by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvcustody.audit.evidence.copies.copy_coverage import VERDICTS as COPY_VERDICTS
from kvcustody.audit.evidence.copies.copy_coverage import JudgedCopies
from kvcustody.audit.evidence.coverage.block_uses import LEVELS
from kvcustody.audit.evidence.coverage.custody_units import DEVICE_TIER, LifeUnits
from kvcustody.audit.evidence.coverage.summary import population_digest
from kvcustody.audit.evidence.coverage.verdicts import VERDICTS as ENDED
from kvcustody.audit.evidence.query.evidence_columns import GENERATION_MASK, POOL_SHIFT
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.reports.sampling.strata import StratumKey

VERDICTS = (*ENDED, "overdue")
_NO_END = "no end on record"


class PopulationMember(NamedTuple):
    """One member of the population. `due_us` is UTC; `level` is empty unless destruction has evidence."""

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
    tier: str = DEVICE_TIER
    copy: int = 0  # its number, off the device


class CustodyPopulation:
    """The custodies of a period, in the order of rule 1."""

    def __init__(
        self,
        lives: Sequence[LifeUnits],
        copies: Sequence[JudgedCopies] = (),
        offsets: Mapping[str, int] | None = None,
    ) -> None:
        """`offsets` turn the boot time of an incarnation that has copies into UTC."""
        self.copies = copies
        self._offsets = offsets or {}
        self.lives = [each for each in lives if len(each.units.keys) + len(each.overdue.keys)]
        self._ends = np.cumsum([len(each.units.keys) + len(each.overdue.keys) for each in self.lives], dtype=np.int64)

    @property
    def custodies(self) -> int:
        """The number of custodies."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def units(self) -> int:
        """Custodies times shards, the units of coverage."""
        return sum((len(each.units.keys) + len(each.overdue.keys)) * (each.life.shards or 1) for each in self.lives)

    def digest(self) -> str:
        """SHA-256 of the population, hexadecimal (`coverage.summary`)."""
        return population_digest(self.lives)

    @property
    def members(self) -> int:
        """Custodies on the device and copies off it, from which a sample is drawn."""
        return self.custodies + sum(len(each.numbers) for each in self.copies)

    def strata(self) -> dict[StratumKey, Int64s]:
        """Return the members of each stratum by number, strata in order."""
        places_by_stratum: dict[StratumKey, list[Int64s]] = {}
        first = 0
        for each in self.lives:
            for key, places in _device_strata(each):
                places_by_stratum.setdefault(key, []).append(places + first)
            first += len(each.units.keys) + len(each.overdue.keys)
        for judged in self.copies:
            keys = [StratumKey(judged.tier, *who, cause) for who, cause in zip(judged.who, judged.causes, strict=True)]
            for key, places in _grouped(keys):
                places_by_stratum.setdefault(key, []).append(places + first)
            first += len(judged.numbers)
        return {key: np.concatenate(places_by_stratum[key]) for key in sorted(places_by_stratum)}

    def custody(self, number: int) -> PopulationMember:
        """Return the member with a number from 0 on."""
        if number >= self.custodies:
            return self._copy(number - self.custodies)
        which = int(np.searchsorted(self._ends, number, side="right"))
        each = self.lives[which]
        place = number - (int(self._ends[which - 1]) if which else 0)
        if place < len(each.units.keys):
            return _ended(each, place)
        return _overdue(each, place - len(each.units.keys))

    def _copy(self, place: int) -> PopulationMember:
        for each in self.copies:
            if place < len(each.numbers):
                return PopulationMember(
                    incarnation=each.uuid,
                    pool=0,
                    block=0,
                    generation=0,
                    shards=1,
                    tenant=each.who[place][0],
                    classification=each.who[place][1],
                    verdict=COPY_VERDICTS[int(each.verdict[place])],
                    covered=int(each.verdict[place]) == 0,
                    due_us=int(each.due[place]) + self._offsets.get(each.uuid, 0),
                    cause=each.causes[place] or _NO_END,
                    level="",
                    tier=each.tier,
                    copy=int(each.numbers[place]),
                )
            place -= len(each.numbers)
        raise IndexError(place)


def _device_strata(life_units: LifeUnits) -> Iterator[tuple[StratumKey, Int64s]]:
    """Yield the places of one incarnation's custodies by stratum, ended ones before overdue ones."""
    code, names = life_units.ends.codes("tenant", "classification", "cause")
    of = code[life_units.units.row]
    order = np.argsort(of, kind="stable")
    bounds = np.searchsorted(of[order], np.arange(len(names) + 1))
    for number, name in enumerate(names):
        places = order[bounds[number] : bounds[number + 1]]
        if len(places):
            yield StratumKey(DEVICE_TIER, *name), places
    for key, places in _grouped([StratumKey(DEVICE_TIER, *who, _NO_END) for who in life_units.late_owners]):
        yield key, places + len(of)


def _grouped(keys: Sequence[StratumKey]) -> Iterator[tuple[StratumKey, Int64s]]:
    found: dict[StratumKey, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key._replace(cause=key.cause or _NO_END), []).append(place)
    for key, places in found.items():
        yield key, np.array(places, np.int64)


def _ended(life_units: LifeUnits, place: int) -> PopulationMember:
    units = life_units.units
    row = life_units.ends.row(int(units.row[place]))
    level = int(units.level[place])
    return PopulationMember(
        incarnation=life_units.life.uuid,
        pool=int(units.keys[place]) >> POOL_SHIFT,
        block=int(units.blocks[place]),
        generation=int(units.keys[place]) & GENERATION_MASK,
        shards=life_units.life.shards or 1,
        tenant=row["tenant"],
        classification=row["classification"],
        verdict=VERDICTS[int(units.verdict[place])],
        covered=bool(units.verdict[place] == 0 and not units.disputed[place]),
        due_us=int(units.due[place]) + life_units.life.offset_us,
        cause=row["cause"],
        level=LEVELS[level] if level >= 0 else "",
    )


def _overdue(life_units: LifeUnits, place: int) -> PopulationMember:
    late = life_units.overdue
    tenant, classification = life_units.late_owners[place]
    return PopulationMember(
        incarnation=life_units.life.uuid,
        pool=int(late.keys[place]) >> POOL_SHIFT,
        block=int(late.blocks[place]),
        generation=int(late.keys[place]) & GENERATION_MASK,
        shards=life_units.life.shards or 1,
        tenant=tenant,
        classification=classification,
        verdict="overdue",
        covered=False,
        due_us=int(late.due[place]) + life_units.life.offset_us,
        cause=_NO_END,
        level="",
    )
