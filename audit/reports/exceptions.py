"""Exceptions: every custody that is not covered, grouped by what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcustody.audit.evidence.coverage.custody_units import LifeUnits
from kvcustody.audit.evidence.coverage.summary import is_covered
from kvcustody.audit.reports.model import Exceptional
from kvcustody.audit.reports.sampling.population import VERDICTS

LISTED_MAX = 200
MEANINGS = {
    "in_time": "destroyed in time, but the recorded due time is not the one that the holds give",
    "late": "destroyed with evidence, after its deadline",
    "failed": "a shard has receipts and none that counts: failed, of another block, or begun before the last use",
    "missing": "a shard has no receipt",
    "unproven": "its process died, or no leaf says that the block was handed out",
    "overdue": "due, and no leaf says that it ended",
}
_Key = tuple[str, bool, str, str, str, str]


def exceptions(lives: Sequence[LifeUnits]) -> tuple[tuple[Exceptional, ...], int]:
    """The first `LISTED_MAX` groups, largest first, and how many groups are left out."""
    found = [item for each in lives for item in (*_ended(each), *_overdue(each))]
    found.sort(key=lambda item: (-item.units, *item[:6]))
    return tuple(found[:LISTED_MAX]), max(0, len(found) - LISTED_MAX)


def _ended(each: LifeUnits) -> list[Exceptional]:
    units = each.units
    wrong = np.flatnonzero(is_covered(each) == 0)
    groups: dict[_Key, list[int]] = {}
    tenants, classes, causes = map(each.ends.texts, ("tenant", "classification", "cause"))
    columns = (wrong, units.verdict[wrong], units.disputed[wrong], units.row[wrong])
    for place, verdict, disputed, row in zip(*(column.tolist() for column in columns), strict=True):
        key = (VERDICTS[verdict], disputed, tenants[row], classes[row], causes[row], each.life.uuid)
        groups.setdefault(key, []).append(place)
    return [_group(each, key, units.due[np.array(places)]) for key, places in groups.items()]


def _overdue(each: LifeUnits) -> list[Exceptional]:
    groups: dict[_Key, list[int]] = {}
    for place, (tenant, classification) in enumerate(each.late_owners):
        key = ("overdue", False, tenant, classification, "no end on record", each.life.uuid)
        groups.setdefault(key, []).append(place)
    return [_group(each, key, each.overdue.due[np.array(places)]) for key, places in groups.items()]


def _group(each: LifeUnits, key: _Key, due: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Exceptional:
    first, last = int(due.min()) + each.life.offset_us, int(due.max()) + each.life.offset_us
    return Exceptional(*key, len(due), len(due) * (each.life.shards or 1), first, last, MEANINGS[key[0]])
