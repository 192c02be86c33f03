"""Units of custody with their verdicts, read from the ledger: the basis of coverage and samples.

1. A unit is (block, generation); it counts once a shard. Units that ended have one verdict each; units that are due
   and whose end nobody recorded are overdue.
2. A period takes a unit by its recomputed due time in UTC; by the recorded one where a use of it never ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from sqlalchemy import Connection, and_, case, func, select

from kvcustody.audit.evidence.coverage.block_uses import (
    NEVER,
    UNKNOWN,
    BlockUses,
    ErasureDueTimes,
    Flags,
    LeafPlaces,
    ReceiptCells,
    places_of,
    read_erasure_due_times,
    read_models,
    read_receipts,
    read_uses,
    unit_keys_of,
)
from kvcustody.audit.evidence.coverage.verdicts import JudgedUnits, assess
from kvcustody.audit.evidence.query.evidence_columns import POOL_SHIFT, Evidence, distinct, is_among, read
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import custody_ends
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.errors import LedgerError

DEVICE_TIER = "device"  # the tier of all blocks
TIERS = ("host", "nvme", "remote")  # of copies off the device, which `copies.copy_coverage` counts

_END_COLUMNS = (
    custody_ends.c.log,
    custody_ends.c.idx,
    custody_ends.c.tenant,
    custody_ends.c.classification,
    custody_ends.c.cause,
    custody_ends.c.due_boot_us,
    custody_ends.c.ended_boot_us,
    custody_ends.c.retired_boot_us,
    custody_ends.c.ceiling_boot_us,
    custody_ends.c.scrub_within_us,
    events.c.sequence,
    events.c.part,
    case((events.c.incarnation == custody_ends.c.incarnation, 0), else_=1).label("by_successor"),
)


class CustodySelection(NamedTuple):
    """Custody due in [since, until) UTC microseconds, of one tenant, classification, model or tier; None means all.

    `model` is what leaves name it, or "unknown" for custody whose leaves name none.
    """

    since_us: int | None = None
    until_us: int | None = None
    tenant: str | None = None
    classification: str | None = None
    model: str | None = None
    tier: str | None = None


class IncarnationLife(NamedTuple):
    """One incarnation; `shards` is 0 if its start was never recorded."""

    id: int
    uuid: str
    offset_us: int
    shards: int


class Overdue(NamedTuple):
    """Due units whose end nobody recorded."""

    keys: Int64s
    blocks: Int64s
    due: Int64s
    writer: Int64s
    owner: Int64s  # a place in `LifeUnits.owners`: whose it is, whoever was handed it

    def kept(self, which: Flags) -> Overdue:
        """Return the units for which `which` is true."""
        return Overdue(*(column[which] for column in self))


class IncarnationTotals(NamedTuple):
    """The totals of an incarnation's leaves, independent of the selection; counts of (block, generation).

    `reached`: the highest generation of each pool, added up. `unlisted`: generations that no leaf lists, behind
    the first block of a request that runs: each lists its growth at its end.
    """

    handed_out: int
    ended: int
    unended: int
    reached: int
    pools: int
    unlisted: int


class LifeUnits(NamedTuple):
    """The selected units of one incarnation; `units.row` numbers the rows of `ends`."""

    life: IncarnationLife
    ends: Evidence
    units: JudgedUnits
    overdue: Overdue
    account: IncarnationTotals
    places: tuple[LeafPlaces, ...]
    owners: list[tuple[str, str]]  # tenants and classifications that `overdue.owner` names
    openings: Evidence  # every opening of the incarnation, whatever was selected, without its runs

    @property
    def late_owners(self) -> list[tuple[str, str]]:
        """Tenant and classification of each overdue unit."""
        return [self.owners[place] for place in self.overdue.owner.tolist()]


def read_units(
    connection: Connection,
    chosen: CustodySelection,
    *,
    now_us: int,
    as_of: AsOf | None = None,
    incarnation: str | None = None,
    with_rules: bool = False,
) -> Iterator[LifeUnits]:
    """Return the selected units by incarnation, or of one by its uuid. Overdue units were due before `now_us` (UTC).

    `with_rules`: openings say when their leaf was written, their absolute limit, what they attached and by which rules.
    Raises `LedgerError` for a tier that there is none of.
    """
    record = LedgerRecord(connection, as_of, with_rules=with_rules)
    return units_of(record, chosen, now_us=now_us, incarnation=incarnation)


class CustodyRecord(Protocol):
    """A source of custody's evidence: rows of a ledger with the runs of their leaves, or leaves only."""

    def lives(self) -> list[IncarnationLife]:
        """Return every incarnation, by uuid."""

    def ends(self, life: IncarnationLife, chosen: CustodySelection) -> Evidence:
        """Return the ends of custody with their leaves' content, at least those of the chosen tenant and
        classification.
        """

    def ended(self, life: IncarnationLife, ends: Evidence, chosen: CustodySelection) -> Int64s:
        """Return the keys of everything that ended, in order, of every owner; `ends` are the chosen ones."""

    def uses(self, life: IncarnationLife) -> BlockUses:
        """Return who used which block until when."""

    def receipts(self, life: IncarnationLife, ends: Evidence) -> ReceiptCells:
        """Return the receipts that name any generation that ended."""

    def erasure_due_times(self, life: IncarnationLife) -> ErasureDueTimes:
        """Return what erasures covered, and when each was requested."""

    def models(self, life: IncarnationLife) -> dict[int, str]:
        """Return the model of every residency whose leaf names one."""


class LedgerRecord:
    """The rows of a ledger, which `audit fsck` derives from the leaves again; runs come from the leaves."""

    def __init__(self, connection: Connection, as_of: AsOf | None = None, *, with_rules: bool = False) -> None:
        self._connection = connection
        self._as_of = as_of
        self._with_rules = with_rules

    def lives(self) -> list[IncarnationLife]:
        """Return every incarnation, by uuid."""
        return lives_of(self._connection)

    def ends(self, life: IncarnationLife, chosen: CustodySelection) -> Evidence:
        """Return the ends of custody of the chosen tenant and classification."""
        column = custody_ends.c
        here = [column.incarnation == life.id, is_in(self._as_of, custody_ends)]
        for each, wanted in ((column.tenant, chosen.tenant), (column.classification, chosen.classification)):
            here += [] if wanted is None else [each == wanted]
        return read(self._connection, custody_ends, _END_COLUMNS, and_(*here), ordered=False)

    def ended(self, life: IncarnationLife, ends: Evidence, chosen: CustodySelection) -> Int64s:
        """Return the keys of everything that ended."""
        whole = (chosen.tenant, chosen.classification) == (None, None)
        return distinct(unit_keys_of(ends)) if whole else ended_keys(self._connection, life, self._as_of)

    def uses(self, life: IncarnationLife) -> BlockUses:
        """Return who used which block until when."""
        return read_uses(self._connection, life, self._as_of, with_rules=self._with_rules)

    def receipts(self, life: IncarnationLife, ends: Evidence) -> ReceiptCells:
        """Return the receipts that can name any generation that ended."""
        return read_receipts(self._connection, life.id, ends, self._as_of)

    def erasure_due_times(self, life: IncarnationLife) -> ErasureDueTimes:
        """Return what erasures covered."""
        return read_erasure_due_times(self._connection, life, self._as_of)

    def models(self, life: IncarnationLife) -> dict[int, str]:
        """Return the model of every residency whose leaf names one."""
        return read_models(self._connection, life.id, self._as_of)


def units_of(
    record: CustodyRecord, chosen: CustodySelection, *, now_us: int, incarnation: str | None = None
) -> Iterator[LifeUnits]:
    """Yield the selected units of a record, like `read_units` for a ledger."""
    check_tier(chosen.tier)
    if chosen.tier in TIERS:
        return
    for life in record.lives():
        if incarnation not in (None, life.uuid):
            continue
        ends, uses = record.ends(life, chosen), record.uses(life)
        cells, asked = record.receipts(life, ends), record.erasure_due_times(life)
        units = assess(ends, uses, cells, life.shards, asked, _selected(ends, chosen))
        ended = record.ended(life, ends, chosen)
        overdue, owners = _overdue(uses, ended, now_us - life.offset_us)
        models = None if chosen.model is None else record.models(life)
        yield LifeUnits(
            life,
            ends,
            _picked(life, ends, units, chosen, models),
            _late(life, overdue, owners, chosen, models),
            _account(uses, ended),
            (places_of(ends), cells.places, *uses.places),
            owners,
            uses.openings,
        )


def within_period(each: LifeUnits, since_us: int, until_us: int) -> LifeUnits:
    """Return the units of a part of the selected period."""
    chosen = CustodySelection(since_us, until_us)
    late = _in_period(each.overdue.due + each.life.offset_us, chosen)
    units = _picked(each.life, each.ends, each.units, chosen, None)
    return each._replace(units=units, overdue=each.overdue if late.all() else each.overdue.kept(late))


def check_tier(tier: str | None) -> None:
    """Raise `LedgerError` for a tier that does not exist."""
    if tier not in (None, DEVICE_TIER, *TIERS):
        raise LedgerError(f"tier `{tier}` is none of: {', '.join((DEVICE_TIER, *TIERS))}", tier=tier)


def _selected(ends: Evidence, chosen: CustodySelection) -> Flags | None:
    """Which rows are of the chosen tenant and classification."""
    wanted = (chosen.tenant, chosen.classification)
    if wanted == (None, None):
        return None
    code, names = ends.codes("tenant", "classification")
    fits = [all(want in (None, has) for want, has in zip(wanted, name, strict=True)) for name in names]
    kept: Flags = np.array(fits, np.bool_)[code]
    return kept


def lives_of(connection: Connection, *, among: Collection[int] | None = None) -> list[IncarnationLife]:
    """Return every incarnation, or those with these ids, by uuid."""
    table = incarnations.c
    query = select(table.id, table.uuid, table.offset_us, table.shards).order_by(table.uuid)
    if among is not None:
        query = query.where(table.id.in_(among))
    return [
        IncarnationLife(row.id, row.uuid, row.offset_us, row.shards or 0) for row in connection.execute(query).all()
    ]


def last_event_us(connection: Connection, as_of: AsOf | None = None) -> int:
    """Return when the last leaf was written, UTC; 0 for an empty ledger."""
    return connection.scalar(select(func.max(events.c.at_us)).where(is_in(as_of, events), has_leaf(events))) or 0


def _picked(
    life: IncarnationLife,
    ends: Evidence,
    units: JudgedUnits,
    chosen: CustodySelection,
    models: dict[int, str] | None,
) -> JudgedUnits:
    """Return the units of the period (rule 2) and model."""
    claimed = ends.column("due_boot_us")[units.row]
    kept = _in_period(np.where(units.due < NEVER, units.due, claimed) + life.offset_us, chosen)
    if models is not None:
        kept &= _of_model(units.writer, models, chosen.model)
    return units if kept.all() else units.kept(kept)


def _late(
    life: IncarnationLife,
    overdue: Overdue,
    owners: list[tuple[str, str]],
    chosen: CustodySelection,
    models: dict[int, str] | None,
) -> Overdue:
    is_selected = _in_period(overdue.due + life.offset_us, chosen)
    if chosen.tenant is not None or chosen.classification is not None:
        asked = (chosen.tenant, chosen.classification)
        wanted = [all(want in (None, has) for want, has in zip(asked, who, strict=True)) for who in owners]
        is_selected &= np.array(wanted, np.bool_)[overdue.owner]
    if models is not None:
        is_selected &= _of_model(overdue.writer, models, chosen.model)
    return overdue.kept(is_selected)


def _in_period(at_us: Int64s, chosen: CustodySelection) -> Flags:
    kept: Flags = np.ones(len(at_us), np.bool_)
    if chosen.since_us is not None:
        kept &= at_us >= chosen.since_us
    if chosen.until_us is not None:
        kept &= at_us < chosen.until_us
    return kept


def _of_model(writers: Int64s, models: dict[int, str], wanted: str | None) -> Flags:
    return np.fromiter((models.get(writer, UNKNOWN) == wanted for writer in writers.tolist()), np.bool_, len(writers))


def ended_keys(connection: Connection, life: IncarnationLife, as_of: AsOf | None = None) -> Int64s:
    """Return the keys of everything that ended in an incarnation."""
    column = custody_ends.c
    here = and_(column.incarnation == life.id, is_in(as_of, custody_ends))
    return distinct(unit_keys_of(read(connection, custody_ends, (column.tenant,), here, ordered=False)))


def _account(uses: BlockUses, ended: Int64s) -> IncarnationTotals:
    handed_out = distinct(uses.keys[uses.written])
    every = np.concatenate((uses.keys, ended))
    of = every >> POOL_SHIFT
    pools = distinct(of).tolist()
    reached = sum(int(every[of == pool].max()) - (pool << POOL_SHIFT) for pool in pools)
    unended = int((~is_among(handed_out, ended)).sum())
    running = uses.keys[uses.released == NEVER]
    unlisted = 0
    for pool in distinct(running >> POOL_SHIFT).tolist():
        first = int(running[running >> POOL_SHIFT == pool].min())
        behind = (handed_out > first) & (handed_out >> POOL_SHIFT == pool)
        unlisted += int(every[of == pool].max()) - first - int(behind.sum())
    return IncarnationTotals(len(handed_out), len(ended), unended, reached, len(pools), unlisted)


def _overdue(uses: BlockUses, ended: Int64s, now_boot_us: int) -> tuple[Overdue, list[tuple[str, str]]]:
    """Custody that was handed out, is due, and whose end nobody recorded; and whose it is."""
    open_uses = ~is_among(uses.keys, ended)
    written = np.flatnonzero(open_uses & uses.written)
    written = written[np.lexsort((uses.residency[written], uses.keys[written]))]
    keys, first = np.unique(uses.keys[written], return_index=True)
    writers = written[first]  # of two that were handed one generation, the lower
    due = np.zeros(len(keys), np.int64)
    if len(keys):
        place = np.minimum(np.searchsorted(keys, uses.keys), len(keys) - 1)
        same = (keys[place] == uses.keys) & (uses.blocks == uses.blocks[writers][place])
        np.maximum.at(due, place[same], uses.hold_end[same])
    late = due < now_boot_us
    found, writer = keys[late], uses.residency[writers][late]
    owner, owners = uses.owners(found, writer)
    return Overdue(found, uses.blocks[writers][late], due[late], writer, owner), owners
