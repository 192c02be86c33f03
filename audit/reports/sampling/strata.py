"""Strata and draws: the part of a population that a seed selects, reproducible by anybody.

1. A stratum is a tier, a tenant, a classification and what ended the custody; strata are in this order. A member's
   place is its number among those of its stratum, in the order of the population.
2. Every stratum gets one draw, the largest first where there are fewer draws than strata; the rest is shared in
   proportion, by largest remainder, ties by the order of strata.
3. Turn `t` of stratum `s` takes place SHA-256(seed, ":", s, ":", t) modulo its size, unless it was drawn before: such a
   turn is passed over, and counted as a duplicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.audit.reports.sampling.attribute_size import upper_limit_ppm


class StratumKey(NamedTuple):
    """The common attributes of a stratum's members."""

    tier: str
    tenant: str
    classification: str
    cause: str


class Stratum(NamedTuple):
    """A stratum: its size, how many were drawn and passed over, and how many of the drawn are not covered."""

    tier: str
    tenant: str
    classification: str
    cause: str
    members: int
    drawn: int
    duplicates: int
    deviations: int


class Sampling(NamedTuple):
    """How the sample was drawn. `upper_limit_ppm`: the maximum rate of deviations in the whole population."""

    size: int
    risk_ppm: int
    deviations: int
    upper_limit_ppm: int
    strata: tuple[Stratum, ...]


class StratumDraw(NamedTuple):
    """The places drawn from one stratum, in order, and the number of turns passed over."""

    places: tuple[int, ...]
    duplicates: int


def draw_strata(seed: str, size: int, members: Sequence[int]) -> tuple[StratumDraw, ...]:
    """Return the seed's draws from strata with so many members each (rules 2 and 3)."""
    return tuple(
        _draw(seed, number, drawn, of)
        for number, (drawn, of) in enumerate(zip(allocate(size, members), members, strict=True))
    )


def allocate(size: int, members: Sequence[int]) -> list[int]:
    """Return how many to draw from each stratum (rule 2); everything if the population is no larger."""
    whole = sum(members)
    if size >= whole:
        return list(members)
    order = sorted(range(len(members)), key=lambda number: (-members[number], number))
    if size <= len(members):
        chosen = set(order[:size])
        return [int(number in chosen) for number in range(len(members))]
    rest, left = size - len(members), [of - 1 for of in members]
    share = sum(left)
    made = [1 + rest * of // share for of in left]
    remainders = sorted(range(len(members)), key=lambda number: (-(rest * left[number] % share), number))
    for number in remainders[: size - sum(made)]:
        made[number] += 1
    return made


def concluded(size: int, risk_ppm: int, strata: tuple[Stratum, ...]) -> Sampling:
    """Return the sample's conclusion about the population."""
    deviations, drawn = (sum(getattr(one, name) for one in strata) for name in ("deviations", "drawn"))
    return Sampling(size, risk_ppm, deviations, upper_limit_ppm(deviations, drawn, risk_ppm), strata)


def _draw(seed: str, number: int, drawn: int, members: int) -> StratumDraw:
    numbers: dict[int, None] = {}
    turn = 0
    while len(numbers) < drawn:
        picked = hashlib.sha256(f"{seed}:{number}:{turn}".encode()).digest()
        numbers.setdefault(int.from_bytes(picked, "big") % members)
        turn += 1
    return StratumDraw(tuple(numbers), turn - drawn)
