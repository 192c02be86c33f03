"""Deletion coverage: the share of all custody due to end that has timely evidence of its end.

1. The unit is (block, generation, shard). A custody of n shards is n units with one verdict. It is covered only if
   every shard has a receipt for that very block and generation. The receipt must have started after the last use. It
   must have ended within `scrub_within` of `due_at` or, if later, of the fence's retirement.
2. `due_at = max(last release, min(ceiling, end of the last hold, erasure))`, recomputed from the residencies' own
   leaves. A hold ends at its deadline, at an erasure of its residency, or with custody (eviction), whichever is first.
   A reader of another tenant holds blocks only where custody allows it (a segment; through a grant it has references,
   not holds). The due time that the allocator claimed decides nothing. Where the two differ, the custody counts as
   disputed.
3. Every due unit gets exactly one verdict. A unit is covered if it is in time and not disputed. A recorded due time
   that the holds do not give may be an error of either, and covers nothing.
   - in time;
   - late;
   - failed: receipts exist, but none counts;
   - missing: a shard has no receipt;
   - unproven: its process died, or no leaf recorded that the block was ever written.
4. Two figures, never mixed: custody ended (and by when), and bytes destroyed, by the weakest verification level of
   their shards. A block is counted as sampled if its receipt read some of the blocks. Only `reread_blocks` counts
   blocks that were read back in full.
5. All arithmetic runs on boot-time microseconds of the incarnation. A period selects by the recomputed due time in UTC
   (`units`).
6. The digest of the counted custody is SHA-256 over the incarnations that have any. Each gives its id in ASCII and a
   newline, and then seven big-endian 64-bit integers for each custody. These are pool, generation, block, due
   (boot-time microseconds), verdict (its place in `VERDICTS`, one more for overdue), 1 if covered, and shards. Whoever
   has the leaves can compute it again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import add
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection

from kvcustody.audit.evidence.coverage.block_uses import LEVELS, NEVER
from kvcustody.audit.evidence.coverage.custody_units import (
    CustodySelection,
    LifeUnits,
    last_event_us,
    read_units,
)
from kvcustody.audit.evidence.coverage.lag_counts import LagCounts, counted
from kvcustody.audit.evidence.coverage.verdicts import VERDICTS
from kvcustody.audit.evidence.query.evidence_columns import GENERATION_MASK, POOL_SHIFT
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.store.database.snapshot import AsOf

_AT_ONCE = 100_000  # custodies of a digest, whose columns are laid side by side


class CoverageRow(NamedTuple):
    """Coverage of one tenant's custody of one classification; every count is of units (rule 1)."""

    tenant: str
    classification: str
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

    @property
    def ended(self) -> int:
        """Units whose custody ended; the other due units are `overdue`."""
        return self.due - self.overdue

    @property
    def coverage(self) -> float:
        """The covered share of the due units; 1.0 if none was due."""
        return self.covered / self.due if self.due else 1.0


class CoverageSummary(NamedTuple):
    """Coverage by tenant and classification, and the times from due (or retirement) to the last receipt."""

    rows: tuple[CoverageRow, ...]
    lag_us_p50: int
    lag_us_p99: int
    lag_us_max: int

    @property
    def total(self) -> CoverageRow:
        """The sum of all rows (the fence time is the longest)."""
        return add_rows(self.rows)


def add_rows(rows: Iterable[CoverageRow], tenant: str = "*", classification: str = "*") -> CoverageRow:
    """Return one row that adds up others; it keeps the longest fence time."""
    total = [0] * (len(CoverageRow._fields) - 2)
    for row in rows:
        *counts, fence = row[2:]
        total = [*map(add, total, counts), max(total[-1], fence)]
    return CoverageRow(tenant, classification, *total)


def coverage(
    connection: Connection,
    *,
    since_us: int | None = None,
    until_us: int | None = None,
    tenant: str | None = None,
    classification: str | None = None,
    model: str | None = None,
    tier: str | None = None,
    incarnation: str | None = None,
    as_of_us: int | None = None,
    as_of: AsOf | None = None,
) -> CoverageSummary:
    """Return the coverage of custody due in [since, until) UTC, of one tenant, classification, model, tier or process.

    Overdue is what is due before `as_of_us` (UTC; the ledger's last event) and has no recorded end. `as_of` is the
    state of the ledger that is read. Raises `LedgerError` for a tier that there is none of.
    """
    now_us = last_event_us(connection, as_of) if as_of_us is None else as_of_us
    chosen = CustodySelection(since_us, until_us, tenant, classification, model, tier)
    return summary(read_units(connection, chosen, now_us=now_us, as_of=as_of, incarnation=incarnation))


def periods_of(
    lives: Iterable[LifeUnits], since_us: int, until_us: int, period_us: int
) -> tuple[tuple[int, CoverageRow], ...]:
    """Return the total row of units for each period from `since_us` on."""
    starts = range(since_us, until_us, period_us)
    found: dict[int, list[CoverageRow]] = {start: [] for start in starts}
    for start, part in by_period(lives, since_us, period_us):
        found[start] += rows_of(part)
    return tuple((start, add_rows(found[start])) for start in starts)


def by_period(lives: Iterable[LifeUnits], since_us: int, period_us: int) -> Iterator[tuple[int, LifeUnits]]:
    """Yield the units of each incarnation by the period, from `since_us` on, in which they were due."""
    for each in lives:
        offset_us, claimed = each.life.offset_us, each.ends.column("due_boot_us")[each.units.row]
        at_us = np.where(each.units.due < NEVER, each.units.due, claimed) + offset_us
        which, late = (at_us - since_us) // period_us, (each.overdue.due + offset_us - since_us) // period_us
        for number in sorted({*which.tolist(), *late.tolist()}):
            units, overdue = each.units.kept(which == number), each.overdue.kept(late == number)
            rows, place = np.unique(units.row, return_inverse=True)  # only these: a period costs what is due in it
            part = each._replace(ends=each.ends.of_rows(rows), units=units._replace(row=place), overdue=overdue)
            yield since_us + number * period_us, part


def lags_of(life_units: LifeUnits) -> dict[tuple[str, str], LagCounts]:
    """Return the times from due to the last receipt among one incarnation's units, by tenant and classification."""
    of_row, everybody = life_units.ends.codes("tenant", "classification")
    whose = of_row[life_units.units.row]
    return {who: counted(life_units.units.lag[whose == number]) for number, who in enumerate(everybody)}


def summary(lives: Iterable[LifeUnits]) -> CoverageSummary:
    """Return the coverage of these units."""
    by_tenant: dict[tuple[str, str], list[CoverageRow]] = {}
    lags: list[Int64s] = [np.empty(0, np.int64)]
    for each in lives:
        lags.append(each.units.lag[each.units.lag >= 0])
        for row in rows_of(each):
            by_tenant.setdefault((row.tenant, row.classification), []).append(row)
    rows = tuple(add_rows(by_tenant[key], *key) for key in sorted(by_tenant))
    return CoverageSummary(rows, *lag_percentiles(np.sort(np.concatenate(lags))))


def population_digest(lives: Iterable[LifeUnits]) -> str:
    """Return the SHA-256 (hexadecimal) of every counted custody (rule 6), incarnations by uuid."""
    digest = hashlib.sha256()
    for each in lives:
        if len(each.units.keys) + len(each.overdue.keys):
            digest.update(each.life.uuid.encode() + b"\n")
            for first in range(0, len(each.units.keys) + len(each.overdue.keys), _AT_ONCE):
                digest.update(_population_rows(each, first, first + _AT_ONCE).tobytes())
    return digest.hexdigest()


def is_covered(each: LifeUnits) -> Int64s:
    """Return 1 for each ended custody that is in time and not disputed."""
    covered: Int64s = ((each.units.verdict == 0) & ~each.units.disputed).astype(np.int64)
    return covered


def _population_rows(life_units: LifeUnits, first: int, end: int) -> Int64s:
    """Those of these places; custodies that ended come before overdue ones."""
    units, overdue, ended = life_units.units, life_units.overdue, len(life_units.units.keys)
    here, over = slice(min(first, ended), min(end, ended)), slice(max(0, first - ended), max(0, end - ended))
    keys = np.concatenate((units.keys[here], overdue.keys[over]))
    late = np.full(len(overdue.keys[over]), len(VERDICTS))
    covered = (units.verdict[here] == 0) & ~units.disputed[here]
    columns = (
        keys >> POOL_SHIFT,
        keys & GENERATION_MASK,
        np.concatenate((units.blocks[here], overdue.blocks[over])),
        np.concatenate((units.due[here], overdue.due[over])),
        np.concatenate((units.verdict[here], late)),
        np.concatenate((covered.astype(np.int64), np.zeros(len(late), np.int64))),
        np.full(len(keys), life_units.life.shards or 1),
    )
    rows: Int64s = np.stack(columns, axis=1).astype(">i8")
    return rows


def lag_percentiles(lags: Int64s) -> tuple[int, int, int]:
    """Return the lags that 50, 99 and 100 % of sorted lags do not exceed (nearest rank); 0 if there are none."""
    if not len(lags):
        return 0, 0, 0
    p50, p99, most = (int(lags[-(-len(lags) * percent // 100) - 1]) for percent in (50, 99, 100))
    return p50, p99, most


def rows_of(each: LifeUnits) -> list[CoverageRow]:
    """Return the coverage of one incarnation's units, by tenant and classification."""
    return _summarise(each) + _overdue(each)


def _summarise(each: LifeUnits) -> list[CoverageRow]:
    life, ends, units = each.life, each.ends, each.units
    if not len(units.keys):
        return []
    shards = life.shards or 1
    of_row, everybody = ends.codes("tenant", "classification")
    group = of_row[units.row]
    width = len(everybody)

    def total(mask: Any, weight: Any = None) -> Int64s:
        weights = None if weight is None else weight[mask].astype(np.float64)
        return np.bincount(group[mask], weights, width).astype(np.int64)

    ended = ends.column("ended_boot_us")[units.row]
    retired = ends.column("retired_boot_us")[units.row]
    fence = np.zeros(width, np.int64)
    np.maximum.at(fence, group, np.maximum(0, retired - ended))
    in_time = units.verdict == VERDICTS.index("in_time")
    columns = [
        total(np.ones(len(group), np.bool_)) * shards,
        total(ended <= units.due + ends.column("scrub_within_us")[units.row]) * shards,
        total(in_time & ~units.disputed) * shards,
        *(total(units.verdict == number) * shards for number in range(len(VERDICTS))),
        np.zeros(width, np.int64),
        total(units.disputed) * shards,
        *(total(units.level == number, units.bytes) for number in range(len(LEVELS))),
        total(units.level == LEVELS.index("full")) * shards,
        fence,
    ]
    made = [
        CoverageRow(tenant, classification, *(int(column[code]) for column in columns))
        for code, (tenant, classification) in enumerate(everybody)
    ]
    return [row for row in made if row.due]


def _overdue(each: LifeUnits) -> list[CoverageRow]:
    """Custody that is due and whose end nobody recorded."""
    shards = each.life.shards or 1
    counts = Counter(each.late_owners)
    return [CoverageRow(*who, due=blocks * shards, overdue=blocks * shards) for who, blocks in counts.items()]
