"""Storage limitation: the age of custody at its end, the cause of its end, and each classification's limits.

1. Age runs from the request's admission to the end of custody. For blocks that were handed out later it is too high,
   never too low. Custody has no age if no leaf records to whom it was handed out.
2. Limits are those that leaves record for these very custodies: the absolute limit of their residencies (deadline less
   admission), and `scrub.within` of their ends. Custody is in time if it was destroyed with evidence within
   `scrub.within` of its due time. If the device's last work on it was later, the time counts from that.
3. The cause of its end is one of these:
   - its deadline (of a hold or of the ceiling);
   - an eviction;
   - an erasure;
   - pressure on memory;
   - the death of its process;
   - another act of its owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcustody.audit.evidence.coverage.block_uses import NEVER
from kvcustody.audit.evidence.coverage.custody_units import LifeUnits
from kvcustody.audit.evidence.coverage.summary import lag_percentiles
from kvcustody.audit.evidence.query.evidence_columns import Evidence
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.population import SECTION as POPULATION

ENDED_BY = {
    "deadline": ("expired", "ceiling", "lapsed", "deadline"),
    "eviction": ("evict",),
    "erasure": ("erasure", "erase"),
    "pressure": ("pressure",),
    "death": ("unproven",),
}
OTHER = "other"


class StorageRow(NamedTuple):
    """Ended custodies (block, generation) of one classification; ages and limits are microseconds.

    `beyond_limit` ended later than their ceiling and the `scrub.within` of their end. `unaged` have no age.
    """

    classification: str
    custodies: int
    by_deadline: int
    by_eviction: int
    by_erasure: int
    by_pressure: int
    by_death: int
    by_other: int
    overdue: int
    unaged: int
    age_us_p50: int
    age_us_p99: int
    age_us_max: int
    absolute_us_min: int
    absolute_us_max: int
    within_us_min: int
    within_us_max: int
    beyond_limit: int


class _Piece(NamedTuple):
    """Custodies of one classification of one incarnation."""

    causes: Int64s
    ages: Int64s
    absolutes: Int64s
    within: Int64s
    beyond: int
    overdue: int


def storage_limitation(reading: ReportReading) -> tuple[StorageRow, ...]:
    """Return a row for each classification, from the units of the report."""
    found: dict[str, list[_Piece]] = {}
    for each in reading.lives:
        for name, piece in _pieces(each, _openings(each.openings)):
            found.setdefault(name, []).append(piece)
    return tuple(_row(name, pieces) for name, pieces in sorted(found.items()))


def group_of(cause: str) -> str:
    """Return the group of an end, by the cause in its leaf (rule 3)."""
    return next((name for name, begins in ENDED_BY.items() if cause.startswith(begins)), OTHER)


def _openings(found: Evidence) -> Int64s:
    """(residency, opened, absolute limit) in boot time, by residency."""
    first = found.column("part") == 1
    names = ("residency", "opened_boot_us", "absolute_boot_us")
    rows = np.stack([found.column(name)[first] for name in names], axis=1)
    made: Int64s = rows[np.argsort(rows[:, 0], kind="stable")]
    return made


def _pieces(life_units: LifeUnits, openings: Int64s) -> Iterator[tuple[str, _Piece]]:
    units, ends = life_units.units, life_units.ends
    code, names = ends.codes("classification")
    cause, causes = ends.codes("cause")
    groups = np.array([[*ENDED_BY, OTHER].index(group_of(name)) for (name,) in causes], np.int64)
    ended = ends.column("ended_boot_us")[units.row]
    ceiling = ends.column("ceiling_boot_us")[units.row]
    within = ends.column("scrub_within_us")[units.row]
    opened, absolute = _of_writers(units.writer, openings)
    late = _late(life_units)
    for number, (name,) in enumerate(names):
        mine = code[units.row] == number
        if mine.any() or late.get(name):
            aged = mine & (opened >= 0)
            yield (
                name,
                _Piece(
                    groups[cause[units.row[mine]]] if len(groups) else np.zeros(0, np.int64),
                    np.maximum(0, ended[aged] - opened[aged]),
                    (absolute - opened)[aged & (absolute > 0)],
                    within[mine],
                    int(((ceiling > 0) & (ended > ceiling + within) & mine).sum()),
                    late.pop(name, 0),
                ),
            )
    nothing = np.zeros(0, np.int64)
    for name, number in late.items():
        yield name, _Piece(nothing, nothing, nothing, nothing, 0, number)


def _late(each: LifeUnits) -> dict[str, int]:
    """Overdue custodies by classification."""
    return Counter(classification for _, classification in each.late_owners)


def _of_writers(writers: Int64s, openings: Int64s) -> tuple[Int64s, Int64s]:
    """When each writer was admitted, and its absolute limit; -1 where no leaf says so."""
    if not len(openings):
        return np.full(len(writers), -1), np.full(len(writers), -1)
    place = np.minimum(np.searchsorted(openings[:, 0], writers), len(openings) - 1)
    known = (openings[place, 0] == writers) & (writers < NEVER)
    return np.where(known, openings[place, 1], -1), np.where(known, openings[place, 2], -1)


def _row(name: str, pieces: Sequence[_Piece]) -> StorageRow:
    causes, ages, absolutes, within = (np.concatenate([piece[place] for piece in pieces]) for place in range(4))
    counts = np.bincount(causes, minlength=len(ENDED_BY) + 1).tolist()
    values: list[int] = [
        len(causes),
        *counts,
        sum(piece.overdue for piece in pieces),
        len(causes) - len(ages),
        *lag_percentiles(np.sort(ages)),
        *_bounds(absolutes),
        *_bounds(within),
        sum(piece.beyond for piece in pieces),
    ]
    return StorageRow(name, *values)


def _bounds(values: Int64s) -> tuple[int, int]:
    return (int(values.min()), int(values.max())) if len(values) else (0, 0)


def _carries(report: ReportFacts) -> bool:
    return any(row.custodies and row.absolute_us_max for row in report[SECTION])


def _disagreements(report: ReportFacts) -> Iterator[str]:
    for row in report[SECTION]:
        causes = (
            row.by_deadline,
            row.by_eviction,
            row.by_erasure,
            row.by_pressure,
            row.by_death,
            row.by_other,
        )
        if sum(causes) != row.custodies or max(row.unaged, row.beyond_limit) > row.custodies:
            yield f"what ended custody of classification `{row.classification}` does not add up"
        if not row.age_us_p50 <= row.age_us_p99 <= row.age_us_max:
            yield f"ages of classification `{row.classification}` are out of order"
    if sum(row.custodies + row.overdue for row in report[SECTION]) != report[POPULATION].custodies:
        yield "the classifications do not have the custodies of the population"


SECTION: Section[tuple[StorageRow, ...]] = Section(
    "storage",
    "Storage limitation",
    storage_limitation,
    order=90,
    about=(
        "by classification: ages at the end, what ended custody (deadline, eviction, erasure, pressure, "
        "death), the limits that leaves record beside it"
    ),
    fields={"storage": "ages and limits of each classification"},
    cited={"storage": Citation("Storage limitation", _carries)},
    disagreements=_disagreements,
)
