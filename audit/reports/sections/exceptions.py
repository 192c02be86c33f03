"""Exceptions: every custody that is not covered, grouped by its fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvcustody.audit.evidence.coverage.custody_units import LifeUnits
from kvcustody.audit.evidence.coverage.summary import is_covered
from kvcustody.audit.reports.sampling.population import VERDICTS
from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE

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


class Exceptional(NamedTuple):
    """Custodies of one kind that are not covered: how many, whose, and why."""

    verdict: str
    disputed: bool
    tenant: str
    classification: str
    cause: str
    incarnation: str
    custodies: int
    units: int
    first_due_us: int
    last_due_us: int
    meaning: str


class ExceptionsFacts(NamedTuple):
    """The first `LISTED_MAX` groups, largest first, and the number of omitted groups."""

    exceptions: tuple[Exceptional, ...]
    exceptions_left_out: int


def exceptions(reading: ReportReading) -> ExceptionsFacts:
    """Return everything that is not covered."""
    found = [item for each in reading.lives for item in (*_ended(each), *_overdue(each))]
    found.sort(key=lambda item: (-item.units, *item[:6]))
    return ExceptionsFacts(tuple(found[:LISTED_MAX]), max(0, len(found) - LISTED_MAX))


def _ended(life_units: LifeUnits) -> list[Exceptional]:
    units = life_units.units
    wrong = np.flatnonzero(is_covered(life_units) == 0)
    groups: dict[_Key, list[int]] = {}
    tenants, classes, causes = map(life_units.ends.texts, ("tenant", "classification", "cause"))
    columns = (wrong, units.verdict[wrong], units.disputed[wrong], units.row[wrong])
    for place, verdict, disputed, row in zip(*(column.tolist() for column in columns), strict=True):
        key = (VERDICTS[verdict], disputed, tenants[row], classes[row], causes[row], life_units.life.uuid)
        groups.setdefault(key, []).append(place)
    return [_group(life_units, key, units.due[np.array(places)]) for key, places in groups.items()]


def _overdue(each: LifeUnits) -> list[Exceptional]:
    groups: dict[_Key, list[int]] = {}
    for place, (tenant, classification) in enumerate(each.late_owners):
        key = ("overdue", False, tenant, classification, "no end on record", each.life.uuid)
        groups.setdefault(key, []).append(place)
    return [_group(each, key, each.overdue.due[np.array(places)]) for key, places in groups.items()]


def _group(each: LifeUnits, key: _Key, due: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Exceptional:
    first, last = int(due.min()) + each.life.offset_us, int(due.max()) + each.life.offset_us
    return Exceptional(*key, len(due), len(due) * (each.life.shards or 1), first, last, MEANINGS[key[0]])


def _disagreements(report: ReportFacts) -> Iterator[str]:
    total = report[COVERAGE].total
    uncovered = sum(item.units for item in report[SECTION].exceptions)
    if uncovered > total.due - total.covered or (
        not report[SECTION].exceptions_left_out and uncovered != total.due - total.covered
    ):
        yield "the exceptions do not add up to what is not covered"
    if any(item.meaning != MEANINGS.get(item.verdict) for item in report[SECTION].exceptions):
        yield "an exception is explained by other words than those of its verdict"


SECTION: Section[ExceptionsFacts] = Section(
    "exceptions",
    "Units not covered",
    exceptions,
    order=120,
    about="all uncovered custody, by cause, with space for a response",
    fields={
        "exceptions": "what is not covered, and of whom",
        "exceptions_left_out": "how many groups are not listed",
    },
    cited={"exceptions": Citation("Units not covered", lambda report: report[COVERAGE].total.due > 0)},
    disagreements=_disagreements,
)
