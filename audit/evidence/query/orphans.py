"""Disagreements between a ledger and a live process, or within a ledger: the SQL side of a scan.

1. The process tells what it has (open residencies, custody that has not ended); every comparison is with leaves.
2. Counts are compared first. Leaves are read block by block only where the counts of an incarnation do not add up, or
   could hide a loss. They could if a scan has ended blocks that no leaf lists as written.
3. A gap that a finding has already named is not reported again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, and_, func, literal_column, select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.evidence.processes.work_periods import at_work, read_work_periods
from kvcustody.audit.evidence.query.evidence_columns import (
    Assignments,
    Evidence,
    read,
    read_assignments,
    read_opened,
    unit_keys,
)
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import (
    custody_ends,
    orphan_findings,
    receipts,
    releases,
    residencies,
)
from kvcustody.audit.store.schema.ledger import incarnations, workers
from kvcustody.errors import LedgerError

_ASKED_AT_ONCE = 500  # values in a statement


class LostUnits(NamedTuple):
    """Custody of one writer that only one of two sources has."""

    tenant: str
    classification: str
    pool: int
    blocks: Int64s
    generations: Int64s


class OpenResidency(NamedTuple):
    """A residency that is open either only in the ledger or only in the process (then `tenant` is empty)."""

    residency: int
    tenant: str
    opened_boot_us: int


class DeadIncarnation(NamedTuple):
    """A process that ended without recording it: its worker has started a later one."""

    worker: str
    incarnation: str
    started_us: int


class KnownGap(NamedTuple):
    """Missing sequences that no record explains."""

    incarnation: str
    first_sequence: int
    last_sequence: int
    cause: str


class Disagreements(NamedTuple):
    """Everything that one join found."""

    unreleased: tuple[OpenResidency, ...]
    unopened: tuple[int, ...]
    unended: tuple[LostUnits, ...]
    unreleased_receipts: tuple[LostUnits, ...]
    dead: tuple[DeadIncarnation, ...]
    gaps: tuple[KnownGap, ...]


def disagreements(
    connection: Connection,
    incarnation: str,
    running: frozenset[int],
    live: Mapping[int, Int64s],
    unlisted: int,
) -> Disagreements:
    """Join one incarnation's leaves with its process's own state.

    `running`: ids of residencies that are open there; `live`: by pool, generations whose custody has not ended;
    `unlisted`: how many of those no leaf lists yet, because their requests still run.
    """
    life = incarnation_row(connection, incarnation)
    unreleased, unopened = _residencies(connection, life, running)
    unended, unreceived = _units(connection, life, live, unlisted)
    return Disagreements(
        unreleased,
        unopened,
        unended,
        unreceived,
        dead_incarnations(connection, but=incarnation),
        new_gaps(connection),
    )


def incarnation_row(connection: Connection, incarnation: str) -> int:
    """Return the row of a process; raises `LedgerError` if there is none."""
    life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == incarnation))
    if life is None:
        raise LedgerError(f"incarnation `{incarnation}` is not in the ledger", incarnation=incarnation)
    return int(life)


def latest_incarnation(connection: Connection, worker: str) -> str:
    """Return the newest process of a worker."""
    query = (
        select(incarnations.c.uuid)
        .join(workers, workers.c.id == incarnations.c.worker)
        .where(workers.c.name == worker)
        .order_by(incarnations.c.id.desc())
        .limit(1)
    )
    return str(connection.scalar(query))


def dead_incarnations(connection: Connection, *, but: str = "") -> tuple[DeadIncarnation, ...]:
    """Return incarnations with memory that never ended, of workers with a later one; `but` is alive.

    All of it is said by leaves about lives, in their order: no row of `incarnations` counts.
    """
    periods = read_work_periods(connection)
    newest = {period.worker: uuid for uuid, period in periods.items()}
    return tuple(
        DeadIncarnation(periods[uuid].worker, uuid, periods[uuid].started_us)
        for uuid in at_work(periods)
        if uuid not in (but, newest[periods[uuid].worker])
    )


def new_gaps(connection: Connection) -> tuple[KnownGap, ...]:
    """Return gaps that no finding has named yet (rule 3)."""
    named = set(
        connection.scalars(
            select(orphan_findings.c.cause)
            .where(orphan_findings.c.orphan == "ledger gap", has_leaf(orphan_findings))
            .distinct()
        )
    )
    found = (KnownGap(*gap) for gap in gaps(connection))
    return tuple(gap for gap in found if gap_cause(gap) not in named)


def gap_cause(gap: KnownGap) -> str:
    """Return the wording by which a finding names a gap."""
    return f"sequences {gap.first_sequence} to {gap.last_sequence} of {gap.incarnation}: {gap.cause}"


def _residencies(
    connection: Connection, life: int, running: frozenset[int]
) -> tuple[tuple[OpenResidency, ...], tuple[int, ...]]:
    column = residencies.c
    opened = select(column.residency).where(column.incarnation == life, column.part == 1, has_leaf(residencies))
    final = select(releases.c.residency).where(releases.c.incarnation == life, releases.c.final, has_leaf(releases))
    # In order, so that two indices are merged and no set is built.
    still = set(connection.scalars(opened.except_(final).order_by(literal_column("1"))))
    lost, unreleased = sorted(still - running), []
    for start in range(0, len(lost), _ASKED_AT_ONCE):
        some = lost[start : start + _ASKED_AT_ONCE]
        query = select(column.residency, column.tenant, column.opened_boot_us).where(
            column.incarnation == life, column.part == 1, column.residency.in_(some), has_leaf(residencies)
        )
        unreleased += [OpenResidency(*row) for row in connection.execute(query.order_by(column.residency))]
    return tuple(unreleased), tuple(sorted(running - still))


def _units(
    connection: Connection, life: int, live: Mapping[int, Int64s], unlisted: int
) -> tuple[tuple[LostUnits, ...], tuple[LostUnits, ...]]:
    """Written, not ended and not there; and overwritten by receipt, but never ended."""
    written, ended = (_total(connection, life, which) for which in ("written", "ended"))
    found_before = select(func.count()).where(
        custody_ends.c.incarnation == life, custody_ends.c.cause == "orphan", has_leaf(custody_ends)
    )
    if written + unlisted == ended + sum(map(len, live.values())) and not connection.scalar(found_before):
        return (), ()
    column = custody_ends.c
    ends = _keys(read(connection, custody_ends, (column.tenant,), column.incarnation == life))
    there = [unit_keys(np.full(len(units), pool), units) for pool, units in live.items()]
    known = np.concatenate((ends, *there)) if there else ends
    who = {
        row.residency: (row.tenant, row.classification)
        for row in connection.execute(
            select(residencies.c.residency, residencies.c.tenant, residencies.c.classification).where(
                residencies.c.incarnation == life, residencies.c.part == 1, has_leaf(residencies)
            )
        )
    }
    _, handed = read_opened(connection, (residencies.c.residency,), residencies.c.incarnation == life)
    later = read(
        connection,
        releases,
        (releases.c.residency,),
        and_(releases.c.incarnation == life, releases.c.written),
    )
    proofs = read(
        connection,
        receipts,
        (receipts.c.tenant,),
        and_(receipts.c.incarnation == life, receipts.c.high > 0, receipts.c.shard == 0),
    )
    proven = _keys(proofs)
    assigned = read_assignments(connection, life)
    excluded = np.concatenate((known, proven))
    unended = [lost for part in (handed, later) for lost in _lost(part, excluded, who, assigned)]
    writers: dict[int, tuple[str, str]] = {}
    for part in (handed, later):
        owners = part.column("residency")[part.owner].tolist()
        for key, residency in zip(_keys(part).tolist(), owners, strict=True):
            writers[key] = who.get(residency, ("", "unknown"))
    parties = map(assigned.parties.__getitem__, assigned.owner.tolist())
    writers |= zip(assigned.keys.tolist(), parties, strict=True)
    stray = ~np.isin(proven, ends)
    return tuple(unended), _by_writer(proofs, stray, writers)


def _total(connection: Connection, life: int, which: str) -> int:
    def number(table: Any, what: Any, *where: Any) -> int:
        query = select(func.sum(what)).where(table.c.incarnation == life, has_leaf(table), *where)
        return int(connection.scalar(query) or 0)

    if which == "written":
        return number(residencies, residencies.c.written_blocks) + number(releases, releases.c.written_blocks)
    return number(custody_ends, custody_ends.c.blocks)


def _keys(found: Evidence) -> Int64s:
    return unit_keys(found.pairs.pools, found.pairs.generations)


def _lost(
    evidence: Evidence, known: Int64s, who: Mapping[int, tuple[str, str]], assigned: Assignments
) -> list[LostUnits]:
    """Units of `found`, whose rows are residencies, that are not among the known ones, by residency and owner."""
    missing = ~np.isin(_keys(evidence), known)
    if not missing.any():
        return []
    residency = evidence.column("residency")[evidence.owner]
    place = assigned.of(_keys(evidence))
    lost = []
    for number in np.unique(residency[missing]).tolist():
        mine = missing & (residency == number)
        for party in np.unique(place[mine]).tolist():
            owner = who.get(number, ("", "unknown")) if party < 0 else assigned.parties[party]
            lost += _parts(evidence, mine & (place == party), *owner)
    return lost


def _by_writer(
    evidence: Evidence, chosen: np.ndarray[Any, Any], writers: Mapping[int, tuple[str, str]]
) -> tuple[LostUnits, ...]:
    places = np.flatnonzero(chosen)
    groups: dict[tuple[str, str], list[int]] = {}
    keys = _keys(evidence)
    for place in places.tolist():
        groups.setdefault(writers.get(int(keys[place]), ("", "unknown")), []).append(place)
    made: list[LostUnits] = []
    for (tenant, classification), mine in groups.items():
        mask = np.zeros(len(keys), dtype=np.bool_)
        mask[mine] = True
        made += _parts(evidence, mask, tenant, classification)
    return tuple(made)


def _parts(evidence: Evidence, chosen: np.ndarray[Any, Any], tenant: str, classification: str) -> list[LostUnits]:
    pools = evidence.pairs.pools
    return [
        LostUnits(
            tenant,
            classification,
            pool,
            evidence.pairs.blocks[chosen & (pools == pool)],
            evidence.pairs.generations[chosen & (pools == pool)],
        )
        for pool in np.unique(pools[chosen]).tolist()
    ]
