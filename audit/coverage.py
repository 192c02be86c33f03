"""Deletion coverage: of all custody due to end, how much has evidence of its end, in time.

C1 The unit is (block, generation, shard). A custody of n shards is n units with one verdict: it is covered
only when every shard has a receipt for that very block and generation, started after the last use, ended
within `scrub_within` of `due_at` or, if later, of the fence's retirement.
C2 `due_at = max(last release, min(ceiling, end of the last hold, erasure))`, recomputed from the
residencies' own leaves. A hold ends at its deadline, at an erasure of its residency, or when custody did
(eviction), whichever is first. A reader of another tenant holds blocks only where custody says so (a segment; through
a grant it has references, not holds). The due time that the allocator claimed decides nothing; where the two
differ the custody counts as disputed.
C3 Every due unit gets exactly one verdict: in time, late, failed (receipts exist, none that counts),
missing (a shard has no receipt), unproven (its process died, or nothing recorded that the block was ever
written).
C4 Two figures, never mixed: custody ended (and by when), and bytes destroyed, by the weakest verification
level of their shards. A sampled block is counted as sampled; only `reread_blocks` counts what was read
back.
C5 All arithmetic runs on boot-time microseconds of the incarnation. A period selects by the recorded due
time in UTC.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, func, select, true

from kvcustody.audit.evidence import Evidence, read
from kvcustody.audit.runs import Int64s
from kvcustody.audit.schema import custody_ends, events, incarnations
from kvcustody.audit.uses import LEVELS, Uses, read_receipts, read_uses, unit_keys_of
from kvcustody.audit.verdicts import VERDICTS, Units, assess

_END_COLUMNS = (
    custody_ends.c.tenant,
    custody_ends.c.classification,
    custody_ends.c.cause,
    custody_ends.c.due_boot_us,
    custody_ends.c.ended_boot_us,
    custody_ends.c.retired_boot_us,
    custody_ends.c.ceiling_boot_us,
    custody_ends.c.scrub_within_us,
)


class CoverageRow(NamedTuple):
    """Coverage of one tenant's custody of one classification; every count is of units (C1)."""

    tenant: str
    classification: str
    due: int = 0
    ended_in_time: int = 0
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
        """Units whose custody ended; the rest of what was due is `overdue`."""
        return self.due - self.overdue

    @property
    def coverage(self) -> float:
        """The covered share of what was due; 1.0 when nothing was."""
        return self.in_time / self.due if self.due else 1.0


class Coverage(NamedTuple):
    """Coverage by tenant and classification, and the times from due (or retirement) to the last receipt."""

    rows: tuple[CoverageRow, ...]
    lag_us_p50: int
    lag_us_p99: int
    lag_us_max: int

    @property
    def total(self) -> CoverageRow:
        """All rows added up (the fence time is the longest)."""
        return add_rows(self.rows)


def add_rows(rows: Iterable[CoverageRow], tenant: str = "*", classification: str = "*") -> CoverageRow:
    """One row that adds up others; of fence times it keeps the longest."""
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
    as_of_us: int | None = None,
) -> Coverage:
    """Coverage of custody due in [since, until) UTC, and custody overdue as of the ledger's last event."""
    if as_of_us is None:
        as_of_us = connection.scalar(select(func.max(events.c.at_us))) or 0
    chosen: list[ColumnElement[bool]] = [true()]
    if since_us is not None:
        chosen.append(custody_ends.c.due_us >= since_us)
    if until_us is not None:
        chosen.append(custody_ends.c.due_us < until_us)
    if tenant is not None:
        chosen.append(custody_ends.c.tenant == tenant)
    if classification is not None:
        chosen.append(custody_ends.c.classification == classification)
    found: list[CoverageRow] = []
    lags: list[Int64s] = [np.empty(0, np.int64)]
    table = incarnations
    for life in connection.execute(
        select(table.c.id, table.c.offset_us, table.c.shards).order_by(table.c.id)
    ).all():
        ends = read(
            connection, custody_ends, _END_COLUMNS, and_(custody_ends.c.incarnation == life.id, *chosen)
        )
        whole = since_us is None and until_us is None
        uses = read_uses(connection, life, None if whole else ends)
        units = assess(ends, uses, read_receipts(connection, life.id, ends), life.shards or 0)
        found += _summarise(ends, units, life.shards or 1)
        lags.append(units.lag[units.lag >= 0])
        if as_of_us - life.offset_us > 0 and whole:
            found += [
                row
                for row in _overdue(connection, life, uses, as_of_us - life.offset_us)
                if tenant in (None, row.tenant) and classification in (None, row.classification)
            ]
    groups: dict[tuple[str, str], list[CoverageRow]] = {}
    for row in found:
        groups.setdefault((row.tenant, row.classification), []).append(row)
    lag = np.concatenate(lags)
    p50, p99, most = (int(value) for value in np.percentile(lag, (50, 99, 100))) if len(lag) else (0, 0, 0)
    return Coverage(tuple(add_rows(groups[key], *key) for key in sorted(groups)), p50, p99, most)


def _summarise(ends: Evidence, units: Units, shards: int) -> list[CoverageRow]:
    codes: dict[tuple[str, str], int] = {}
    of_row = np.array(
        [codes.setdefault((row.tenant, row.classification), len(codes)) for row in ends.rows], np.int64
    )
    if not len(units.keys):
        return []
    group = of_row[units.row]
    width = len(codes)

    def total(mask: Any, weight: Any = None) -> Int64s:
        weights = None if weight is None else weight[mask].astype(np.float64)
        return np.bincount(group[mask], weights, width).astype(np.int64)

    everything = np.ones(len(units.keys), np.bool_)
    ended = ends.column("ended_boot_us")[units.row]
    retired = ends.column("retired_boot_us")[units.row]
    in_time = ended <= units.due + ends.column("scrub_within_us")[units.row]
    fence = np.zeros(width, np.int64)
    np.maximum.at(fence, group, np.maximum(0, retired - ended))
    columns = [
        total(everything) * shards,
        total(in_time) * shards,
        *(total(units.verdict == number) * shards for number in range(len(VERDICTS))),
        np.zeros(width, np.int64),
        total(units.disputed) * shards,
        *(total(units.level == number, units.bytes) for number in range(len(LEVELS))),
        total(units.level == 3) * shards,
        fence,
    ]
    return [CoverageRow(*who, *(int(column[code]) for column in columns)) for who, code in codes.items()]


def _overdue(connection: Connection, life: Any, uses: Uses, now_boot_us: int) -> list[CoverageRow]:
    """Custody that is due and whose end nobody recorded."""
    column = custody_ends.c
    ended = read(connection, custody_ends, (column.tenant,), column.incarnation == life.id)
    keys, place = np.unique(uses.keys, return_inverse=True)
    due = np.zeros(len(keys), np.int64)
    np.maximum.at(due, place, uses.hold_end)
    open_keys = (due < now_boot_us) & ~np.isin(keys, unit_keys_of(ended))
    mine = uses.written & open_keys[place]
    counts: dict[tuple[str, str], int] = {}
    residency, number = np.unique(uses.residency[mine], return_counts=True)
    for item, blocks in zip(residency.tolist(), number.tolist(), strict=True):
        who = uses.tenants.get(item, ("unknown", "unknown"))
        counts[who] = counts.get(who, 0) + blocks * (life.shards or 1)
    return [CoverageRow(*who, due=units, overdue=units) for who, units in counts.items()]
