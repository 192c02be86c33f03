"""Holds that ended before their deadline: by an erasure, or by an act that narrowed what its tenant holds.

E1  A hold ends at the earliest of what applies to it; what a residency does not hold, nothing ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcustody.audit.coverage.recompute.facts import OPEN, ErasureFact, Person
from kvcustody.audit.coverage.recompute.history import RecomputedLife


def ended_by_erasures(life: RecomputedLife, erasures: Sequence[ErasureFact]) -> dict[int, int]:
    """For each residency that an erasure selects, when its hold ended at the latest."""
    made: dict[int, int] = {}
    people = life.persons() if erasures else {}
    for erasure in erasures:
        at = erasure.at_us - life.offset_us
        for residency, person in people.items():
            if person.opened < at and _covers(erasure, person):
                made.setdefault(residency, at)
    return made


def ended_by_narrowing(life: RecomputedLife) -> dict[int, int]:
    """For each residency that was released before a narrowing of its tenant's holds, when its hold ended at the latest.

    One walk over releases and acts in the order of their process; a hold leaves it with the first act that misses it.
    """
    if not life.narrowings:
        return {}
    made: dict[int, int] = {}
    standing: dict[str, list[int]] = {}
    moments: list[tuple[int, int, str]] = [
        (place, residency, tenant) for residency, (place, tenant) in life.left().items()
    ]
    moments += [(place, -1, act.tenant) for place, act in life.narrowings.items()]
    for place, residency, tenant in sorted(moments):
        here = standing.setdefault(tenant, [])
        if residency >= 0:
            here.append(residency)
            continue
        act = life.narrowings[place]
        for one in here:
            made[one] = min(made.get(one, OPEN), act.standing.get(one, act.at))
        here[:] = [one for one in here if one in act.standing]
    return made


def _covers(erasure: ErasureFact, person: Person) -> bool:
    if erasure.tenant not in (None, person.tenant):
        return False
    if erasure.selector == "tenant":
        return True
    if erasure.selector == "subject":
        return person.subject == erasure.subject
    if erasure.selector == "session":
        return person.session == erasure.session
    return False  # a domain or model is not in a residency's leaf; the end carries the cause
